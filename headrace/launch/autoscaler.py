"""Starts and ends further replicas of a pipeline that is up, as many as it wants (`headrace.run.scaling`).

Those that `headrace up` started stay: the autoscaler adds to `rollout.replicas`, and ends only what it started, the newest first. An ended
replica gives its groups back with what it has generated, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from headrace.base.errors import ConfigError, ReplayUnavailable, ServiceError
from headrace.base.files import atomic_write
from headrace.base.tasks import cancel
from headrace.config import Config
from headrace.launch.supervisor import Child, Supervisor
from headrace.replay import ReplayClient
from headrace.run import history
from headrace.run.replicas_wanted import ReplicasWanted

LOOK_S = 5.0
# Looks in a row at a buffer that can't be reached, after which the run is taken to be over: its `headrace up` was killed.
_UNREACHABLE = 24
# A command that submits or cancels a job takes no longer.
_COMMAND_S = 60.0


class Further(Protocol):
    """The replicas that an autoscaler has started."""

    def __len__(self) -> int: ...

    async def add(self) -> None:
        """Start one more."""

    async def remove(self) -> None:
        """End the newest."""

    async def close(self) -> None:
        """End all. Raises the error of one that may still run."""

    def check(self, stepped: bool) -> None:
        """Raise the error of one that can't continue. `stepped`: the trainer has taken a step since."""


class Processes:
    """Replicas as processes on this machine, restarted when they die. `devices` are what they have, a slice for each; None: they take none,
    and any number of them may be started."""

    def __init__(
        self, supervisor: Supervisor, argv: Sequence[str], logs: Path, devices: Sequence[str] | None = None
    ) -> None:
        self._supervisor, self._argv, self._logs, self._devices = supervisor, list(argv), logs, devices
        self._running: list[tuple[Child, asyncio.Task[None]]] = []

    def __len__(self) -> int:
        return len(self._running)

    async def add(self) -> None:
        number = len(self._running)
        environ = self._supervisor.environ
        if self._devices is not None:
            environ = environ | {"CUDA_VISIBLE_DEVICES": self._devices[number]}
        name = f"rollout-further-{number + 1}"
        # the buffer has been there: a replica that loses it waits for it
        child = Child(name, self._argv, self._logs / f"{name}.log", environ=environ, was_ready=True)
        self._running.append((child, asyncio.create_task(self._supervisor.supervise(child))))

    async def remove(self) -> None:
        child, task = self._running.pop()
        await cancel([task])
        await self._supervisor.stop([child])

    async def close(self) -> None:
        children = [child for child, _ in self._running]
        await cancel([task for _, task in self._running])
        self._running.clear()
        await self._supervisor.stop(children)

    def check(self, stepped: bool) -> None:
        for child, task in self._running:
            if stepped:
                child.fruitless = 0
            if task.done():
                task.result()


class Jobs:
    """Replicas as jobs of a batch system. `submit` is a shell command that starts one and prints its id last; `cancel` one that ends the
    job `{id}` with SIGTERM. Their ids are in the file `ledger` while they may run, because nobody else knows them."""

    def __init__(self, submit: str, cancel: str, ledger: Path) -> None:
        if "{id}" not in cancel:
            raise ConfigError(
                f"--cancel {cancel!r} does not say which job; give the place of its id, for example 'scancel {{id}}'"
            )
        if ledger.exists():
            raise ConfigError(
                f"an autoscaler was killed that had started the jobs {ledger.read_text(encoding='utf-8')}; end them, and remove {ledger}"
            )
        self._submit, self._cancel, self._ledger = submit, cancel, ledger
        self._ids: list[str] = []
        self._left: dict[str, ServiceError] = {}  # those that could not be cancelled: they may have ended by themselves

    def __len__(self) -> int:
        return len(self._ids)

    async def add(self) -> None:
        words = (await _run(self._submit)).split()
        if not words:
            raise ServiceError(f"{self._submit} printed no id of a job; have it print one, as sbatch --parsable does")
        self._ids.append(words[-1])
        self._note()

    async def remove(self) -> None:
        job = self._ids.pop()
        try:
            await _run(self._cancel.replace("{id}", shlex.quote(job)))
        except ServiceError as error:
            self._left[job] = error
        self._note()

    async def close(self) -> None:
        while self._ids:
            await self.remove()
        if self._left:
            *_, error = self._left.values()
            raise ServiceError(
                f"{error}; end the jobs {' '.join(self._left)}, if they still run, and remove {self._ledger}"
            )

    def check(self, stepped: bool) -> None:
        """A job that ends by itself is the batch system's to report."""

    def _note(self) -> None:
        if jobs := [*self._left, *self._ids]:
            with atomic_write(self._ledger) as unfinished:
                unfinished.write_text(" ".join(jobs), encoding="utf-8")
        else:
            self._ledger.unlink(missing_ok=True)


async def _run(command: str) -> str:
    """Return what a shell command printed. Raises `ServiceError` if it fails."""
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            shell=True,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            start_new_session=True,  # Ctrl-C is not for it
        )
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"{command} has not ended after {_COMMAND_S:.0f} s") from error
    if done.returncode:
        raise ServiceError(
            f"{command} failed with status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def replica_command(saved: Path) -> list[str]:
    """Return the command that starts one more replica of the run whose configuration was saved as `saved`."""
    return [sys.executable, "-m", "headrace.cli", "rollout", "--config", str(saved)]


async def autoscale(
    config: Config,
    client: ReplayClient,
    further: Further,
    most: int,
    stop: asyncio.Event,
    report: Callable[[str], None],
    look_s: float = LOOK_S,
) -> None:
    """Keep as many replicas as the run wants, `rollout.replicas` at least and `most` at most, until it is over or `stop` is set. Then end
    what was started. Raises the error of a replica that can't continue."""
    base, unreachable, seen, told = config.rollout.replicas, 0, -1, set[str]()
    wanted = ReplicasWanted(client, config.algorithm.ahead_steps, base, most)

    def tell(line: str) -> None:
        if line not in told:
            report(line)
        told.add(line)

    try:
        while not stop.is_set() and not is_over(config) and unreachable < _UNREACHABLE:
            further.check(wanted.seen > seen)
            seen = wanted.seen
            try:
                await _follow(further, await wanted.decide(await client.stats()) - base, base, tell)
                unreachable = 0
                told.clear()
            except ReplayUnavailable as error:
                unreachable += 1
                tell(f"{error}; the replicas stay as they are")
            except ServiceError as error:  # of a command, which may do the next time what it did before
                if not len(further):
                    raise
                tell(f"{error}; trying again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), look_s)
    finally:
        await further.close()


async def _follow(further: Further, target: int, base: int, tell: Callable[[str], None]) -> None:
    change = target - len(further)
    if change:
        tell(f"{base + target} replicas are wanted, and {base + len(further)} were started")
    for _ in range(abs(change)):
        await (further.add() if change > 0 else further.remove())


def is_over(config: Config) -> bool:
    """Whether the run's folder says that it has ended."""
    record = history.read_record(config.run_folder)
    return record is not None and record.state != "running"
