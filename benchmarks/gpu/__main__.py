"""The first 45 minutes on a GPU: what can only be seen there, in one report beside what is expected of it.

    python -m benchmarks.gpu [--device auto|cpu|cuda] [--size full|tiny] [--parts NAME,NAME] [--minutes 45] [--out gpu_report]

Each part is a process with a time limit of its own, and one that fails, hangs or dies is a line of the report; the others go on. Models
have random weights: nothing is fetched. The report is `report.md` and `report.json` in the folder `--out`, with each part's log beside it,
and is written anew after each part. On a CPU (where `tiny` is the default size) the same code runs over gloo, and what needs CUDA is `not
run`.

It needs torch and the trainer's packages (`pip install '.[trainer]'`); the parts of the engine need vLLM and the buffer's too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.report import PartReport, write
from benchmarks.gpu.rows import Expected, Rows

# What the parts but those of the engine import, besides what these bring.
NEEDED = (
    "headrace_services",
    "torch",
    "transformers",
    "safetensors",
    "accelerate",
    "msgspec",
    "redis",
    "pydantic_settings",
    "yaml",
    "rich",
    "psutil",
    "pynvml",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A part's limit in seconds, and what its process has in its environment."""

    limit_s: float
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)


_MULTI_RANK = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
PLANS = {
    "nccl": Plan(180, {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}),
    "nccl-multi-rank": Plan(180, _MULTI_RANK),
    "missing-peer": Plan(150, _MULTI_RANK),
    "stopped-peer": Plan(270, _MULTI_RANK),
    "step": Plan(600),
    "drift": Plan(240),
    "refit": Plan(300, _MULTI_RANK),
    "precision": Plan(240),
    "engine": Plan(300, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "engine-v2": Plan(240, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
}
# To look at the machine, and to compute what is expected.
LOOK_S = 240.0
POLL_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--size", choices=["full", "tiny"], help="full on a GPU, tiny on a CPU")
    parser.add_argument("--parts", default=",".join(PLANS), help="those of these names, comma-separated")
    parser.add_argument("--minutes", type=float, default=45.0, help="for all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"))
    args = parser.parse_args()
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"error: {', '.join(lacking)}: not installed here; pip install '.[trainer]' (docs/gpu.md)")
    if unknown := set(args.parts.split(",")) - PLANS.keys():
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PLANS)}")
    run(args.device, args.size, args.parts.split(","), 60 * args.minutes, args.out)


def run(device: str, size: str | None, parts: Sequence[str], limit_s: float, out: Path) -> None:
    over = time.monotonic() + limit_s
    out.mkdir(parents=True, exist_ok=True)
    about = _about(device)
    device = about["device"]
    size = size or ("full" if device == "cuda" else "tiny")
    expected = _expected(out)
    reports: list[PartReport] = []
    for name, plan in PLANS.items():
        if name not in parts:
            continue
        found = Rows(out / f"{name}.jsonl")
        found.clear()
        limit = round(min(plan.limit_s, over - time.monotonic()))
        problem: str | None = f"not run: the {limit_s / 60:g} minutes were over"
        if limit > 0:
            _say(f"{name} (at most {limit} s)")
            where = [device, size, str(out / "models"), str(found.path)]
            command = [sys.executable, "-m", "benchmarks.gpu.part", name, *where]
            problem = run_part(command, out / f"{name}.log", limit, plan.environ, found)
        if problem:
            _say(f"  {problem}")
        reports.append(PartReport(name, tuple(expected.get(name, ())), tuple(found.read()), problem))
        write(out, about | {"size": size}, reports)
    _say(f"report: {out / 'report.md'}")


def run_part(command: Sequence[str], log: Path, limit_s: float, environ: Mapping[str, str], rows: Rows) -> str | None:
    """Run it to its end or its limit, and show its rows as they come. Why it has no more of them than it has, if something is amiss."""
    began, shown = time.monotonic(), 0
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **environ},
            start_new_session=True,
        )
    try:
        while (code := process.poll()) is None and time.monotonic() - began < limit_s:
            time.sleep(POLL_S)
            shown = _show(rows, shown)
    finally:
        _end(process)
    _show(rows, shown)
    if code is None:
        return f"failed: not over after {limit_s:g} s; see {log}"
    if code == 0:
        return None
    said = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
    last = said[-1][:300] if said else "without a word"
    missing = "ModuleNotFoundError: "
    if last.startswith(missing):
        return f"not run: {last.removeprefix(missing)}"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"failed: {how}: {last}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it started: all of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _show(rows: Rows, shown: int) -> int:
    found = rows.read()
    for row in found[shown:]:
        _say(f"  {row.what}: {row.measured}")
    return len(found)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _expected(out: Path) -> dict[str, list[Expected]]:
    """Computed in another process too, since this one imports no torch."""
    path = out / "expected.json"
    with path.open("w") as file, (out / "expected.log").open("w") as log:
        command = [sys.executable, "-m", "benchmarks.gpu.expected", "--json"]
        try:
            code = subprocess.run(command, stdout=file, stderr=log, timeout=LOOK_S).returncode
        except subprocess.TimeoutExpired:
            code = 1
    if code:
        _say(f"the expected figures could not be computed: see {out / 'expected.log'}")
        return {}
    return {part: [Expected(**row) for row in rows] for part, rows in json.loads(path.read_text()).items()}


def _about(device: str) -> dict[str, str]:
    """The machine and its versions. Raises `SystemExit` where there is no GPU and one was asked for."""
    command = [sys.executable, "-m", "benchmarks.gpu.machine", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(
            f"error: torch did not find out within {LOOK_S:g} s what there is: see what nvidia-smi says"
        ) from None
    if done.returncode:
        raise SystemExit((done.stderr.strip().splitlines() or ["the machine could not be looked at"])[-1])
    found: dict[str, str] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
