"""How each fault is done and undone. A fault that can't be done raises; none is passed over."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.chaos.environment import Conduct
from tests.chaos.network import Network
from tests.chaos.plan import Fault
from tests.chaos.processes import Process, until
from tests.chaos.servers import Embedded, External, Servers, limit_memory, tear_behind, tear_tail
from tests.chaos.watch import Glance

ENGINE = ("spawn_main", "EngineCore")  # one of them is in its command line
_BALLAST = "ballast"
_MOST_TORN = 4096
# The trainer finds its disk full when it next writes a checkpoint.
_DISK_DEADLINE_S = 90.0
_RIVAL_DEADLINE_S = 150.0


class Rival:
    """A second trainer of the run, which somebody starts because the first does not answer. It is there for one fault."""

    def __init__(self, process: Process, glance: Callable[[], Glance | None]) -> None:
        self._process = process
        self._glance = glance

    async def take_over(self) -> None:
        """Return once it has published a checkpoint of its own."""
        before = self._seen()
        self._process.may_start.set()
        async with asyncio.timeout(_RIVAL_DEADLINE_S):
            await until(lambda: self._seen().timeline != before.timeline)
            start = self._seen()
            await until(lambda: self._seen().committed > start.committed)

    def _seen(self) -> Glance:
        glance = self._glance()
        assert glance is not None
        return glance

    async def leave(self) -> None:
        self._process.may_start.clear()
        self._process.kill()
        async with asyncio.timeout(_RIVAL_DEADLINE_S):
            await until(lambda: self._process.pid is None)


class Faults:
    """`strike` happens at one moment, while everything but the server stands still; `undo` when its time is over."""

    def __init__(
        self,
        seed: int,
        network: Network,
        servers: Servers,
        processes: dict[str, Process],
        addresses: dict[str, str],
        checkpoints: Path,
        conduct: Conduct,
        rival: Rival,
    ) -> None:
        self._rng = random.Random(f"faults {seed}")
        self._network = network
        self._servers = servers
        self._processes = processes
        self._addresses = addresses
        self._checkpoints = checkpoints
        self._conduct = conduct
        self._rival = rival
        self._peer = ""

    async def prepare(self, fault: Fault) -> None:
        """Before the phase is waited for."""
        if fault.kind == "failover":
            assert isinstance(self._servers, External)
            await asyncio.wait_for(self._servers.in_step(), 60)
            self._servers.leave_replica_behind()

    def strike(self, fault: Fault, victim: str) -> str:
        """`victim`: the process that is meant, "server" for the server in charge. Returns what was done, in words."""
        match fault.kind:
            case "kill" | "failover" | "torn_tail" | "torn_close":
                return self._kill(fault, victim)
            case "slow" | "overloaded" | "bad_answers":
                self._conduct.tell(mood=fault.kind)
                return f"{fault.kind.replace('_', ' ')} for {fault.seconds} s"
            case "no_memory":
                limit = limit_memory(self._servers, full=True)
                return f"its memory limited to the {limit} bytes that it has, for {fault.seconds} s"
            case "rival":
                self._processes[victim].may_start.clear()
                self._processes[victim].freeze()
                return "SIGSTOP, until another trainer has published a checkpoint"
            case "kill_engine":
                self._processes[victim].may_start.clear()
                self._processes[victim].kill_child(*ENGINE)
                return f"SIGKILL to its engine, away for {fault.seconds} s"
            case "stop":
                (self._servers if victim == "server" else self._processes[victim]).freeze()
                return f"SIGSTOP for {fault.seconds} s"
            case "cut":
                self._network.cut(self._machine(victim))
                return f"cut off the network for {fault.seconds} s"
            case "half_open":
                self._peer = self._rng.choice([self._servers.front, self._other_end(victim)])
                self._network.half_open(victim, self._peer)
                return f"what it sends to {self._peer} is lost for {fault.seconds} s"
            case "full_disk":
                if victim != "server":
                    self._processes[victim].may_start.clear()
                folder = self._servers.disk if victim == "server" else self._checkpoints
                return f"disk full, {_fill(folder)} bytes taken"

    def holds(self, fault: Fault, victim: str) -> set[str]:
        """Processes that the fault keeps stopped until it is undone."""
        if fault.kind in ("stop", "rival") and victim != "server":
            return {victim}
        if (
            fault.kind in ("kill", "torn_tail", "torn_close")
            and victim == "server"
            and isinstance(self._servers, Embedded)
        ):
            return {"replay"}  # which would start the server again at once
        return set()

    async def undo(self, fault: Fault, victim: str) -> None:
        """The fault's time is over: everything is as it should be, but for what the process made of it."""
        if fault.kind == "full_disk" and victim != "server":
            await self._until_ended(self._processes[victim])
        elif fault.kind == "rival":
            await self._rival.take_over()
        else:
            await asyncio.sleep(fault.seconds)
        match fault.kind:
            case "kill" | "kill_engine" | "torn_tail" | "torn_close":
                self._restart(victim)
            case "slow" | "overloaded" | "bad_answers":
                self._conduct.tell(mood="well")
            case "no_memory":
                limit_memory(self._servers, full=False)
            case "rival":  # it wakes up beside its successor, and has to see that it is no longer the run's trainer
                self._processes[victim].thaw()
                await self._until_ended(self._processes[victim])
                await self._rival.leave()
                self._restart(victim)
            case "failover":
                assert isinstance(self._servers, External)
                await self._servers.fail_over()
                self._servers.restart()
            case "stop":
                (self._servers if victim == "server" else self._processes[victim]).thaw()
            case "cut":
                self._network.heal(self._machine(victim))
            case "half_open":
                self._network.close_half(victim, self._peer)
            case "full_disk":
                (self._servers.disk if victim == "server" else self._checkpoints).joinpath(_BALLAST).unlink()
                self._restart(victim)
                if victim == "server":
                    await asyncio.wait_for(self._servers.disk_was_full(), _DISK_DEADLINE_S)

    def _kill(self, fault: Fault, victim: str) -> str:
        if victim != "server":
            self._processes[victim].may_start.clear()
            self._processes[victim].kill()
            return f"SIGKILL, away for {fault.seconds} s"
        self._servers.kill()
        if fault.kind == "torn_tail":
            torn = tear_tail(self._servers.disk, self._rng.randint(1, _MOST_TORN))
            return f"SIGKILL, its file torn by {torn} bytes, away for {fault.seconds} s"
        if fault.kind == "torn_close":
            torn = tear_behind(self._servers.disk, b"$6\r\nclosed\r\n$1\r\n1\r\n")
            return f"SIGKILL, the end of the prompts and what came after torn off its file, {torn} bytes, away for {fault.seconds} s"
        return (
            f"SIGKILL, {'failover to a replica that lags' if fault.kind == 'failover' else 'away'}, {fault.seconds} s"
        )

    def _restart(self, victim: str) -> None:
        if victim == "server":
            self._servers.restart()
        else:
            self._processes[victim].may_start.set()

    def _machine(self, victim: str) -> str:
        return self._servers.machine if victim == "server" else victim

    def _other_end(self, victim: str) -> str:
        return self._addresses["rollout-1" if victim == "trainer" else "trainer"]

    async def _until_ended(self, process: Process) -> None:
        async with asyncio.timeout(_DISK_DEADLINE_S):
            await until(lambda: process.pid is None)


def _fill(folder: Path) -> int:
    """Leave not a byte free where `folder` lies."""
    taken = 0
    with (folder / _BALLAST).open("wb", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    taken += os.write(ballast.fileno(), bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return taken
