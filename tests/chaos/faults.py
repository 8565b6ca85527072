"""How each fault is done and undone. A fault that can't be done raises; none is passed over."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import yaml

from tests.chaos.clocks import Clocks
from tests.chaos.conduct import Conduct
from tests.chaos.evidence import Quarantined
from tests.chaos.plan import YOURS, Fault
from tests.chaos.processes import Process, Supervised, Victim
from tests.chaos.servers import Embedded, External, Servers, limit_memory, tear_behind, tear_tail, written
from tests.chaos.watch import Glance, Member
from tests.support.network import SUBNET, Network
from tests.support.processes import descendants, gone
from tests.support.waiting import eventually

ENGINE = "EngineCore"  # in its command line
_BALLAST = "ballast"
_MOST_TORN = 4096
# The trainer finds its disk full when it next writes a checkpoint.
_DISK_DEADLINE_S = 300.0
# A replica copies its primary, or takes its place; a Sentinel that stood still decides nothing for half a minute.
_FAILOVER_DEADLINE_S = 180.0
# The replay service has the server rewrite its file.
_FILE_DEADLINE_S = 60.0
_RIVAL_DEADLINE_S = 300.0
_RESTORE_DEADLINE_S = 300.0
# Of a run whose clock was moved, to take its next steps.
_STEPS_DEADLINE_S = 300.0
_STEPS = 2
# Of a replica, to become healthy or to be quarantined: it fails `rollout.quarantine_after` refits, each after a step.
_FLEET_DEADLINE_S = 600.0
_CLOCK_S = 600
_DATE_S = 2.0  # a service's pages show the time of a second ago
# It ends with its standard input.
_THIEF = """
import socket, sys
try:
    listener = socket.socket()
    listener.bind(("", int(sys.argv[1])))
    listener.listen()
    print("took", flush=True)
except OSError:
    print("could not take", flush=True)
sys.stdin.read()
"""
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_NO_PROXY_THERE = f"http://{SUBNET}.1:9"
# What is cut off the server's file, with all that came after: in words, and the name and value that were written last (no value: the number
# of the newest checkpoint, so that the server forgets a step that the checkpoint holds).
_LOST = {
    "torn_step": ("a step of the newest checkpoint", "next_step", ""),
    "torn_refilled": ("the end of a refill", "refill", "0"),
    "torn_validation": ("a validation's prompts", "lane", "validation"),
    "torn_close": ("the end of the prompts", "closed", "1"),
}
# What `headrace up` left behind when it was killed has ended by then: longer than the services are given to end.
_LEFTOVERS_DEADLINE_S = 120.0


@dataclasses.dataclass(frozen=True)
class Moved:
    """What came of a clock that was moved. `seen_s`: how far off it was when somebody asked; `dead`: living replicas that the buffer
    believed dead; `over`: when it was right again."""

    number: int
    machine: str
    asked_s: int
    seen_s: float
    dead: tuple[str, ...]
    over: float


@dataclasses.dataclass(frozen=True)
class View:
    """Of the run, for faults that wait for it. `clock_off`: how far off the clock of a victim is, in seconds; `fleet`: living replicas by
    the names of their processes, as the buffer knows them. `renew`: give a service another machine."""

    glance: Callable[[], Glance | None]
    clock_off: Callable[[str], Awaitable[float]]
    fleet: Callable[[], Awaitable[dict[str, Member]]]
    renew: Callable[[str], None]

    def now(self) -> Glance:
        glance = self.glance()
        assert glance is not None
        return glance

    async def dead(self) -> tuple[str, ...]:
        """Living replicas that the buffer believes dead."""
        return tuple(name for name, member in (await self.fleet()).items() if member.state == "DEAD")

    async def healthy(self) -> tuple[str, ...]:
        timeline = self.now().timeline
        fleet = await self.fleet()
        return tuple(name for name, m in fleet.items() if (m.state, m.timeline) == ("HEALTHY", timeline))

    async def steps(self, count: int) -> None:
        """Return once so many more steps are reserved on one timeline, or no more prompts will come."""
        start = self.now()
        while not (now := self.now()).closed and now.next_step < start.next_step + count:
            if now.timeline != start.timeline:
                start = now
            await asyncio.sleep(0.05)


class Rival:
    """A second trainer of the run, which somebody starts because the first does not answer. It is there for one fault."""

    def __init__(self, process: Process, view: View) -> None:
        self._process = process
        self._view = view

    async def take_over(self) -> None:
        """Return once it has published a checkpoint of its own."""
        before = self._view.now()
        self._process.may_start.set()
        async with asyncio.timeout(_RIVAL_DEADLINE_S):
            await eventually(lambda: self._view.now().timeline != before.timeline)
            start = self._view.now()
            await eventually(lambda: self._view.now().committed > start.committed)

    async def leave(self) -> None:
        self._process.may_start.clear()
        self._process.kill()
        async with asyncio.timeout(_RIVAL_DEADLINE_S):
            await eventually(lambda: self._process.pid is None)


class Faults:
    """`strike` happens at one moment, while everything but the server stands still; `undo` when its time is over."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        network: Network,
        servers: Servers,
        processes: Mapping[str, Victim],
        checkpoints: Path,
        conducts: Mapping[str, Conduct],
        clocks: Clocks,
        view: View,
        rival: Rival,
    ) -> None:
        self.moved: list[Moved] = []
        self.quarantined: list[Quarantined] = []
        self._folder = folder
        self._rng = random.Random(f"faults {seed}")
        self._network = network
        self._servers = servers
        self._processes = processes
        self._checkpoints = checkpoints
        self._run = checkpoints.parent
        self._thief: subprocess.Popen[str] | None = None
        self._conducts = conducts
        self._clocks = clocks
        self._view = view
        self._rival = rival
        self._peer = ""
        self._where = ""  # the machine that is struck: of a server another may be in charge by the end
        self._sentinels: list[Process] = []  # those that are struck
        self._off_s = 0
        self._incarnation = ""
        self._killed: int | None = None
        self._full = checkpoints
        self._left: tuple[int, ...] = ()  # what `headrace up` had started when it was struck

    async def prepare(self, fault: Fault) -> None:
        """Before the phase is waited for."""
        if fault.kind == "failover":
            assert isinstance(self._servers, External)
            await asyncio.wait_for(self._servers.in_step(), _FAILOVER_DEADLINE_S)
            self._servers.leave_replica_behind()
        elif fault.kind == "node" and fault.target == "server":
            await asyncio.wait_for(self._servers.in_step(), _FAILOVER_DEADLINE_S)
        elif fault.kind == "torn_step":
            # what is to be cut off is in the newest file, whatever was done to the one before
            await self._view.steps(3)
        elif fault.kind == "clock":  # what the fault before has left is over
            await self._view.steps(1)
            async with asyncio.timeout(_FLEET_DEADLINE_S):  # who was cut off comes back when its connections try again
                while await self._view.dead():  # noqa: ASYNC110 - in the server
                    await asyncio.sleep(0.1)
        elif fault.kind == "damaged":  # there is one before it
            async with asyncio.timeout(_STEPS_DEADLINE_S):
                await eventually(lambda: len(published(self._checkpoints)) >= 2, pause_s=0.2)
        elif fault.kind == "noise":  # the last healthy one is never quarantined
            async with asyncio.timeout(_FLEET_DEADLINE_S):
                while len(await self._view.healthy()) < 2:
                    await self._start_quarantined_again()
                    await asyncio.sleep(0.2)

    def strike(self, fault: Fault, victim: str) -> str:
        """`victim`: the process that is meant, "server" for the server in charge. Returns what was done, in words."""
        self._where = self._machine(victim)
        match fault.kind:
            case _ if victim == "sentinel":
                return self._strike_sentinels(fault)
            case "node":
                return self._lose_machine(fault, victim)
            case "proxy":
                self._set_proxy(victim)
                return f"{self._end_all(fault, victim) if victim == 'up' else self._kill(fault, victim)}; then with a proxy"
            case "damaged":
                return f"{self._kill(fault, victim)}, and {damage(self._checkpoints)}"
            case "thief":
                return f"{self._kill(fault, victim)}, and {self._steal(victim)}"
            case "kill" | "terminate" if victim == "up":
                return self._end_all(fault, victim)
            case "kill" | "failover" | "torn_tail" | "torn_step" | "torn_refilled" | "torn_validation" | "torn_close":
                return self._kill(fault, victim)
            case "clock":
                self._off_s = self._rng.choice((_CLOCK_S, -_CLOCK_S))
                self._clocks.move(self._where, self._off_s)
                return f"its clock moved by {self._off_s:+d} s, until {_STEPS} more steps are taken"
            case "noise":
                noise(self._folder, victim).touch()
                return (
                    "its log-probabilities are wrong, until it is quarantined and two more steps are taken without it"
                )
            case "slow" | "overloaded" | "bad_answers" | "raises":
                self._conducts[fault.target].tell(mood=fault.kind)
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
                self._processes[victim].kill_child(ENGINE)
                return f"SIGKILL to its engine, away for {fault.seconds} s"
            case "stop":
                (self._servers if victim == "server" else self._processes[victim]).freeze()
                return f"SIGSTOP for {fault.seconds} s"
            case "cut":
                self._network.cut(self._where)
                return f"cut off the network for {fault.seconds} s"
            case "half_open":
                self._peer = self._rng.choice([self._servers.front, self._other_end(victim)])
                self._network.half_open(victim, self._peer)
                return f"what it sends to {self._peer} is lost for {fault.seconds} s"
            case "full_disk":
                if victim != "server":
                    self._processes[victim].may_start.clear()
                self._full = self._servers.disk if victim == "server" else self._checkpoints
                return f"disk full, {_fill(self._full)} bytes taken"
        raise NotImplementedError(fault.kind)

    def holds(self, fault: Fault, victim: str) -> set[str]:
        """Processes that the fault keeps stopped until it is undone."""
        if fault.kind in ("stop", "rival") and victim != "server":
            return {victim}
        killed = fault.kind == "kill" or fault.kind.startswith("torn")
        if killed and victim == "server" and isinstance(self._servers, Embedded):
            return {"replay"}  # which would start the server again at once
        return set()

    async def undo(self, fault: Fault, victim: str) -> None:
        """The fault's time is over: everything is as it should be, but for what the process made of it."""
        if fault.kind == "full_disk" and victim != "server":
            await self._until_ended(self._processes[victim])
        elif fault.kind == "rival":
            await self._rival.take_over()
        elif fault.kind == "clock":
            await self._watch_clock(fault, victim)
        elif fault.kind == "noise":
            await self._watch_noise(victim)
        else:
            await asyncio.sleep(fault.seconds)
        if self._thief is not None:
            self._thief.communicate()
            self._thief = None
        match fault.kind:
            case _ if victim == "sentinel":
                for sentinel in self._sentinels:
                    sentinel.may_start.set()
                    sentinel.thaw()
                    self._network.heal(sentinel.name)
            case "node" if victim == "server":
                assert isinstance(self._servers, External)
                await asyncio.wait_for(self._servers.replace_machine(), _FAILOVER_DEADLINE_S)
                self._servers.restart()
            case "node":
                self._view.renew(victim)
                self._restart(victim)
            case "kill" | "terminate" | "proxy" if victim == "up":
                async with asyncio.timeout(_LEFTOVERS_DEADLINE_S):
                    await eventually(lambda: all(gone(pid, within_s=0) for pid in self._left))
                self._restart(victim)
            case "kill" | "damaged" | "thief" if isinstance(service := self._processes.get(victim), Supervised):
                async with asyncio.timeout(_LEFTOVERS_DEADLINE_S):
                    await eventually(lambda: service.pid not in (None, self._killed))
            case (
                "kill"
                | "damaged"
                | "proxy"
                | "kill_engine"
                | "torn_tail"
                | "torn_refilled"
                | "torn_validation"
                | "torn_close"
            ):
                self._restart(victim)
                if victim == "server":
                    await asyncio.wait_for(self._servers.came_back(), _FILE_DEADLINE_S)
            case "torn_step":
                self._restart(victim)
                async with asyncio.timeout(_RESTORE_DEADLINE_S):
                    await eventually(lambda: self._view.now().incarnation != self._incarnation)
            case "slow" | "overloaded" | "bad_answers" | "raises":
                self._conducts[fault.target].tell(mood="well")
            case "no_memory":
                limit_memory(self._servers, full=False)
            case "rival":  # it wakes up beside its successor, and has to see that it is no longer the run's trainer
                self._processes[victim].thaw()
                await self._until_ended(self._processes[victim])
                await self._rival.leave()
                self._restart(victim)
            case "failover":
                assert isinstance(self._servers, External)
                await asyncio.wait_for(self._servers.fail_over(), _FAILOVER_DEADLINE_S)
                self._servers.restart()
            case "stop":
                (self._servers if victim == "server" else self._processes[victim]).thaw()
            case "cut":
                self._network.heal(self._where)
            case "half_open":
                self._network.close_half(victim, self._peer)
            case "full_disk":
                self._full.joinpath(_BALLAST).unlink()
                self._restart(victim)
                if victim == "server":
                    await asyncio.wait_for(self._servers.disk_was_full(), _FILE_DEADLINE_S)
        if victim == "server":
            await asyncio.wait_for(self._servers.in_step(), _FAILOVER_DEADLINE_S)

    def _kill(self, fault: Fault, victim: str) -> str:
        if victim != "server":
            self._processes[victim].may_start.clear()
            self._killed = self._processes[victim].pid
            self._processes[victim].kill()
            return f"SIGKILL, away for {fault.seconds} s"
        self._servers.kill(replaced=fault.kind not in _LOST)
        if fault.kind == "torn_step":
            # a late copy of its `reserve` would take the step again, and nothing would have to be restored
            self._servers.lose_copies()
        if fault.kind == "torn_tail":
            torn = tear_tail(self._servers.disk, self._rng.randint(1, _MOST_TORN))
            return f"SIGKILL, its file torn by {torn} bytes, away for {fault.seconds} s"
        if fault.kind in _LOST:
            glance = self._view.now()
            self._incarnation = glance.incarnation
            what, name, value = _LOST[fault.kind]
            torn = tear_behind(self._servers.disk, written(name, value or str(glance.committed)))
            return f"SIGKILL, {what} and what came after torn off its file, {torn} bytes, away for {fault.seconds} s"
        return (
            f"SIGKILL, {'failover to a replica that lags' if fault.kind == 'failover' else 'away'}, {fault.seconds} s"
        )

    def _lose_machine(self, fault: Fault, victim: str) -> str:
        """Nobody is told that it is gone, with its processes and its disk."""
        if victim == "server":
            assert isinstance(self._servers, External)
            self._servers.lose_machine()
        else:
            self._processes[victim].may_start.clear()
            self._network.remove(self._where)
            self._processes[victim].kill()
        replay = self._run / "replay"
        disks = {"trainer": self._run, "up": self._run, "replay": replay, "server": self._servers.disk}
        if victim in disks and disks[victim].exists():
            _wipe(disks[victim], spared=replay if victim == "trainer" else None)
        return f"its machine lost, another after {fault.seconds} s"

    def _strike_sentinels(self, fault: Fault) -> str:
        assert isinstance(self._servers, External)
        self._sentinels = self._rng.sample(self._servers.sentinels, self._rng.randint(1, 3))
        for sentinel in self._sentinels:
            match fault.kind:
                case "kill":
                    sentinel.may_start.clear()
                    sentinel.kill()
                case "stop":
                    sentinel.freeze()
                case _:
                    self._network.cut(sentinel.name)
        return f"{fault.kind} of {', '.join(sentinel.name for sentinel in self._sentinels)} for {fault.seconds} s"

    def _end_all(self, fault: Fault, victim: str) -> str:
        """Of `headrace up`: nothing that it started may be left behind."""
        supervisor = self._processes[victim]
        assert isinstance(supervisor, Process)
        assert supervisor.pid is not None
        self._left = tuple(descendants(supervisor.pid))
        supervisor.may_start.clear()
        if fault.kind == "terminate":
            supervisor.terminate()
        else:
            supervisor.kill()
        what = "SIGTERM" if fault.kind == "terminate" else "SIGKILL"
        return f"{what}, started again when the {len(self._left)} processes that it has started are gone"

    def _set_proxy(self, victim: str) -> None:
        """From its next start on, nothing listens where its shell says that a proxy is. Only what is the user's is to be reached without
        one."""
        process = self._processes[victim]
        assert isinstance(process, Process)
        process.environ |= dict.fromkeys(_PROXY_VARIABLES, _NO_PROXY_THERE) | {"no_proxy": ",".join(YOURS)}

    def _steal(self, victim: str) -> str:
        """Another program of the machine listens on the port that `headrace up` chose for the hub, if it can have it."""
        port = yaml.safe_load((self._run / "config.yaml").read_text())["reward"]["port"]
        argv = [*self._network.enter("up"), sys.executable, "-c", _THIEF, str(port)]
        self._thief = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._thief.stdout is not None
        return f"somebody {self._thief.stdout.readline().strip()} its port {port}"

    async def _watch_clock(self, fault: Fault, victim: str) -> None:
        await asyncio.sleep(_DATE_S)
        off_s = await self._view.clock_off(victim)
        async with asyncio.timeout(_STEPS_DEADLINE_S):
            await self._view.steps(_STEPS)
        dead = await self._view.dead()
        self._clocks.move(self._where, 0)
        async with asyncio.timeout(_STEPS_DEADLINE_S):
            await self._view.steps(1)
        dead += await self._view.dead()
        self.moved.append(Moved(fault.number, self._where, self._off_s, off_s, dead, time.time()))

    async def _start_quarantined_again(self) -> None:
        """What their operator does: earlier faults may have cost them one refit after the other."""
        for name, member in (await self._view.fleet()).items():
            if member.state == "QUARANTINED":
                self._processes[name].kill()

    async def _watch_noise(self, victim: str) -> None:
        async with asyncio.timeout(_FLEET_DEADLINE_S):
            while (member := (await self._view.fleet()).get(victim)) is None or member.state != "QUARANTINED":  # noqa: ASYNC110 - in the server
                await asyncio.sleep(0.1)
        now = self._view.now()
        async with asyncio.timeout(_STEPS_DEADLINE_S):
            await self._view.steps(_STEPS)
            # between a step and the next refit nobody is, for a moment
            while not (healthy := await self._view.healthy()):  # noqa: ASYNC110 - in the server
                await asyncio.sleep(0.1)
        later = (await self._view.fleet()).get(victim, member)
        self.quarantined.append(Quarantined(member.id, now.timeline, now.next_step, later.holds, healthy))
        noise(self._folder, victim).unlink()
        self._processes[victim].kill()  # its operator has mended it, and starts it again

    def _restart(self, victim: str) -> None:
        if victim == "server":
            self._servers.restart()
        else:
            self._processes[victim].may_start.set()

    def _machine(self, victim: str) -> str:
        return self._servers.machine if victim == "server" else victim

    def _other_end(self, victim: str) -> str:
        return "rollout-1" if victim == "trainer" or victim.startswith("agents") else "trainer"

    async def _until_ended(self, process: Victim) -> None:
        async with asyncio.timeout(_DISK_DEADLINE_S):
            await eventually(lambda: process.pid is None)


def published(checkpoints: Path) -> list[Path]:
    """The checkpoints that a trainer may continue from, oldest first."""
    return sorted(checkpoints.glob("step_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))


def damage(checkpoints: Path) -> str:
    """Cut the weights of the newest checkpoint off in the middle."""
    newest = published(checkpoints)[-1]
    weights = newest / "policy" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    return f"the weights of {newest.name} cut off in the middle"


def _wipe(folder: Path, spared: Path | None) -> None:
    """Remove all that is in a folder. (What is mounted there stays, and is empty.)"""
    for path in folder.iterdir():
        if path == spared:
            continue
        if path.is_mount():
            _wipe(path, None)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def noise(folder: Path, name: str) -> Path:
    """While this file is there, the engine of replica `name` is wrong (noisy_rollout.py)."""
    return folder / f"noise-{name}"


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
