"""Runs the parts one after the other, each in a process with a time limit, and keeps what came of each in a folder of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.rows import NOT_RUN, Row, Rows
from headrace.base.files import atomic_write
from headrace.base.parent import die_with_parent

RESULT, ROWS, LOG = "result.json", "rows.jsonl", "log"
LAST_LINES = 40  # of a log, in the report
POLL_S = 0.2
# What an earlier result must have been measured on to be kept.
SAME = ("device", "size", "devices", "versions")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a part. `problem` is why it has no more rows; None if it came to its end. `said` is the end of its log, if it failed."""

    part: Part
    rows: tuple[Row, ...] = ()
    problem: str | None = None
    seconds: float = 0.0
    said: str = ""

    @property
    def failed(self) -> bool:
        never = self.problem is not None and self.problem.startswith(NOT_RUN)
        return not never and (self.problem is not None or any(row.passed is False for row in self.rows))

    @property
    def verdict(self) -> str:
        if self.problem is not None and not self.failed:
            return NOT_RUN
        return "failed" if self.failed else "passed"


class Runner:
    """The parts of one folder and one machine (`about`). `over` is when the time of all parts is over, on the monotonic clock."""

    def __init__(self, out: Path, about: Mapping[str, Any], over: float) -> None:
        self._out, self._about, self._over = out, about, over

    def outcome(self, part: Part, chosen: Collection[Part], again: Collection[Part]) -> Outcome:
        """Return the outcome that is kept of the part, or run it."""
        kept = None if part in again else self._kept(part)
        if kept is not None and (kept.verdict == "passed" or part not in chosen):
            say(f"{part.name}: kept from an earlier call ({kept.verdict})")
            return kept
        if why := self._not_now(part, chosen):
            say(f"{part.name}: {why}")
            return Outcome(part, problem=f"{NOT_RUN}: {why}")
        return self._run(part)

    def _not_now(self, part: Part, chosen: Collection[Part]) -> str | None:
        if part not in chosen:
            return "not asked for"
        gpus = len(self._about["devices"])
        if self._about["device"] == "cuda" and gpus < part.gpus:
            return f"it needs {part.gpus} GPUs, and there is {gpus}"
        left = (self._over - time.monotonic()) / 60
        if part.minutes > left:
            return f"it takes about {part.minutes:g} minutes, and {max(0.0, left):.1f} are left"
        return None

    def _run(self, part: Part) -> Outcome:
        folder = self._out / part.name
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RESULT, ROWS):
            (folder / name).unlink(missing_ok=True)
        limit = min(part.limit_s(self._about["device"]), self._over - time.monotonic())
        say(f"{part.name} (about {part.minutes:g} min, at most {limit / 60:.1f})")
        rows, began = Rows(folder / ROWS), time.monotonic()
        environ = {"HF_HUB_OFFLINE": "1", **part.environ}  # the model is here
        problem = run_part(command_of(part, self._about, folder), folder / LOG, limit, environ, rows)
        outcome = Outcome(part, tuple(rows.read()), problem, time.monotonic() - began, last_lines(folder / LOG))
        if not outcome.failed:
            outcome = dataclasses.replace(outcome, said="")
        say(f"  {outcome.verdict} in {outcome.seconds:.0f} s{f': {problem}' if problem else ''}")
        found = {"problem": problem, "seconds": outcome.seconds, "said": outcome.said, "about": self._identity()}
        with atomic_write(folder / RESULT) as unfinished:
            unfinished.write_text(json.dumps(found))
        return outcome

    def _kept(self, part: Part) -> Outcome | None:
        """Return the outcome of an earlier call, if it was one of this machine, size and versions."""
        folder = self._out / part.name
        try:
            found = json.loads((folder / RESULT).read_text())
            if found.pop("about") == self._identity():
                return Outcome(part, tuple(Rows(folder / ROWS).read()), **found)
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            say(f"{part.name}: what an earlier call left in {folder} can't be read ({type(error).__name__}: {error})")
        return None

    def _identity(self) -> dict[str, Any]:
        return {name: self._about[name] for name in SAME}


def command_of(part: Part, about: Mapping[str, Any], folder: Path) -> list[str]:
    own = [part.function, about["device"], about["size"], str(folder), about["model"]]
    return [sys.executable, "-m", "benchmarks.gpu.part", *own]


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
            preexec_fn=die_with_parent,  # before it imports: who is killed meanwhile leaves no part on the GPU either
        )
    try:
        while (code := process.poll()) is None and time.monotonic() - began < limit_s:
            time.sleep(POLL_S)
            shown = _show(rows, shown)
    finally:
        _end(process)
    _show(rows, shown)
    if code is None:
        return f"failed: not over after {limit_s:.0f} s"
    if code == 0:
        return None
    last = last_lines(log).rpartition("\n")[2] or "without a word"
    missing = "ModuleNotFoundError: "
    if last.startswith(missing):
        return f"{NOT_RUN}: {last.removeprefix(missing)}"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"failed: {how}: {last[:300]}"


def last_lines(log: Path) -> str:
    said = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
    return "\n".join(said[-LAST_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it started: all of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _show(rows: Rows, shown: int) -> int:
    found = rows.read()
    for row in found[shown:]:
        say(f"  {row.what}: {figure(row)}")
    return len(found)


def figure(row: Row) -> str:
    """What was measured, with its unit."""
    measured = row.measured if isinstance(row.measured, str) else _digits(row.measured)
    return f"{measured} {row.unit}".rstrip()


def _digits(number: float) -> str:
    """With three digits, and all of those before the point."""
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.3g}"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
