"""`headrace up` as a person starts it, its output in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.ports import free_ports
from tests.support.processes import descendants, gone
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "arithmetic_tiny.yaml"
PORTS = ("replay.redis_port", "replay.port", "reward.port", "reward.http_port")


def own_run(folder: Path, run_id: str, model: Path) -> list[str]:
    """What keeps a run apart from others on this machine."""
    ports = [f"{name}={port}" for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)]
    return [f"run.dir={folder}", f"run.id={run_id}", f"policy.model_name={model}", *ports]


def demo_arguments(folder: Path, model: Path, *more: str) -> list[str]:
    return [*own_run(folder, "demo", model), "grpo.max_val_samples=200", "reward.workers=1", *more]


class Up:
    """One `headrace up`. `config`: a file; `arguments`: what changes it; `output`: where its lines go; `cwd`: where it is started."""

    def __init__(
        self,
        config: Path,
        *arguments: str,
        output: Path,
        environ: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        stdout: int | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        """`stdout` takes the place of the file, which then has standard error alone. `before` happens to the process before it becomes
        the command."""
        self._output = output
        with output.open("wb") as out:
            command = [sys.executable, "-m", "headrace.cli", "up", str(config), *arguments]
            self.process = subprocess.Popen(
                command,
                stdout=out if stdout is None else stdout,
                stderr=out,
                cwd=cwd,
                preexec_fn=before,
                env={**environ, "OMP_NUM_THREADS": "1"},
            )

    def said(self) -> str:
        return self._output.read_text()

    def wait_for(self, line: str) -> None:
        def said() -> bool:
            assert self.process.poll() is None or line in self.said(), self.said()
            return line in self.said()

        try:
            wait_until(said)
        except BaseException as ended:  # by the test's time limit, as a rule
            ended.add_note(f"no {line!r} in what it said:\n{self.said()}")
            raise

    def ends(self) -> int:
        return self.process.wait()

    def started(self) -> dict[int, str]:
        """The processes of the run, without the supervisor: command lines by id."""
        return descendants(self.process.pid)

    def pid_of(self, *words: str) -> int:
        return next(pid for pid, command in self.started().items() if all(word in command for word in words))

    def stop(self, signum: int) -> list[str]:
        """End it by a signal; returns the command lines of processes of the run that are still there a minute later."""
        started = self.started()
        self.process.send_signal(signum)
        self.process.wait(timeout=120)
        return [command for pid, command in started.items() if not gone(pid)]
