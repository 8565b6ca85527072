"""The first 40 minutes on a GPU: what can only be seen there, in one page beside what is expected of it.

    python -m benchmarks.gpu [--minutes 40] [--parts 1,3] [--again step] [--model NAME|DIR] [--out gpu_report]

Each part is a process with a time limit of its own; one that fails, hangs or dies leaves the others alone. The first parts that fit into
`--minutes` are run, in the order of their value. What a part found is kept in the folder `--out`, and the next call goes on with the parts
that are missing or failed: `--again` runs one anew. The page is `report.html`, its figures are `report.json`, and both are written anew
after each part.

The model is that of examples/gpu_1_5b_1gpu.yaml if it is in the Hub's cache, or `--model`. Without either, random weights of its shape are
made, and the page says so. On a CPU (`--device cpu`) the same code runs at toy size (`--size tiny`), which says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS, Part, choose
from benchmarks.gpu.runner import Outcome, Runner, say

LOOK_S = 240.0  # to look at the machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=_minutes, default=40.0, help="for all parts together")
    parser.add_argument(
        "--parts", type=_parts, default=list(PARTS), help="these alone: names or numbers, comma-separated"
    )
    parser.add_argument("--again", type=_parts, default=[], help="run these anew, though they are done")
    parser.add_argument("--model", help="the directory of a model, or its name in the Hub's cache")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--size", choices=["full", "tiny"], help="full on a GPU, tiny on a CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"))
    arguments = parser.parse_args()
    sys.exit(run(arguments))


def run(arguments: argparse.Namespace) -> int:
    over = time.monotonic() + 60 * arguments.minutes
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=arguments.out).close()
    except OSError as error:
        raise SystemExit(
            f"error: --out {arguments.out} can't be written ({error.strerror}); name another folder"
        ) from None
    about = _about(arguments)
    # it draws, so it imports what only the machine's own look has shown to be here
    from benchmarks.gpu.report import write

    runner = Runner(arguments.out, about, over)
    outcomes: list[Outcome] = []
    for part in PARTS:
        outcomes.append(runner.outcome(part, [*arguments.parts, *arguments.again], arguments.again))
        write(arguments.out, about, outcomes)
    failed = [outcome.part.name for outcome in outcomes if outcome.failed]
    say(f"report: {arguments.out / 'report.html'}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _minutes(text: str) -> float:
    if not (minutes := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes")
    return minutes


def _parts(names: str) -> list[Part]:
    try:
        return choose([name.strip() for name in names.split(",")])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    """The machine, its versions, and the model. Raises `SystemExit` without what every part needs."""
    command = [sys.executable, "-m", "benchmarks.gpu.machine", arguments.device, arguments.size or "auto"]
    command += [str(arguments.out / "model"), *([arguments.model] if arguments.model else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"error: torch did not start within {LOOK_S:g} s; see what nvidia-smi says") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["the machine could not be looked at"])[-1]
        remedy = "; pip install '.[cuda]' (docs/gpu.md)" if last.startswith("ModuleNotFoundError") else ""
        raise SystemExit(f"error: {last.removeprefix('error: ')}{remedy}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
