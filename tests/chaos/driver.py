"""One run under faults: starts the real services on machines of their own, strikes where the plan says, and sees it to its end.

A fault is struck in the middle of its phase: the driver looks at the buffer every few milliseconds, and when the phase is there
it stops everything but the server (SIGSTOP), looks again, and only if the phase still holds it strikes; then the others go on.
What it saw and did goes to files of `folder`, which the auditor judges; `evidence.py` says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TypeVar, cast

import msgpack

from headrace.replay.connection import keeping_cancellation
from tests.chaos import clocks
from tests.chaos.clocks import Clocks
from tests.chaos.conduct import Conduct
from tests.chaos.configuration import (
    HTTP,
    LEASE_S,
    RUN,
    STORE_PORT,
    configuration,
    hosts,
    machine_of,
    services,
    write_held_out,
    write_problems,
)
from tests.chaos.faults import ENGINE, Faults, Rival, View, noise
from tests.chaos.plan import LONG, YOURS, Fault, Kind, Shape, Target, Topology, make_plan, make_shape
from tests.chaos.processes import Process, Supervised, Victim, child_named
from tests.chaos.servers import PAIR, PORT, Embedded, External, Servers
from tests.chaos.watch import Away, Buffer, Glance, Login, Member, writing_checkpoint
from tests.support.network import Network
from tests.support.s3_server import environ
from tests.support.waiting import eventually

log = logging.getLogger("chaos")

T = TypeVar("T")

LOOK_S = 0.008
PHASE_DEADLINE_S = 600.0
END_DEADLINE_S = 600.0
_LATE = "rollout-2"
_RIVAL = "rival"  # a second trainer on the machine of the first
_AFTERWARDS = "afterwards"  # the server that `headrace up` has stopped, for its evidence
_EXITS = (1, 70, 75)  # something to mend, a part that died, or the buffer is away: the auditor asks for the words
_MOST_CRASHES = 3
_OPEN = "headrace_agents_episodes_open "  # of a runner's metrics
_DISK = "size=128m"
_CLOSED_S = 60.0  # for the episodes that are open when the run ends: a runner may just be starting


class ChaosError(Exception):
    """The run did not go as the plan needs it to: no verdict on the laws is possible."""


@dataclasses.dataclass(frozen=True)
class Struck:
    """A fault that happened. `held`: the groups of each replica that died of it or was beyond the buffer's reach."""

    fault: Fault
    victim: str
    done: str
    time: float
    step: int
    held: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Murder:
    """The deadly prompt has killed a replica, which held these groups."""

    name: str
    held: tuple[str, ...]


class Driver:
    def __init__(self, shape: Shape, plan: list[Fault], seed: int, model: Path, folder: Path) -> None:
        self.shape = shape
        self.plan = plan
        self.folder = folder
        self.struck: list[Struck] = []
        self._undone = 0  # faults that are over
        self._run = folder / "runs" / RUN
        self._checkpoints = self._run / "checkpoints"
        self._conduct, self._of_store = Conduct(folder / "conduct"), Conduct(folder / "conduct_of_store")
        self._conduct.tell()
        self._of_store.tell()
        (folder / "store").mkdir()
        problems = folder / "problems.jsonl"
        self._deadly = write_problems(problems, shape, seed)
        self._murdered: list[Murder] = []
        held_out = folder / "held_out.jsonl"
        write_held_out(held_out)
        self._config = folder / "run.yaml"
        server_disk, external = self._run / "replay", folder / "servers"
        pair = shape.topology == "external"
        for place in (self._checkpoints, *([external / name for name in PAIR] if pair else [server_disk])):
            place.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(place)], check=True)
        self._network = Network(folder / "hosts")
        self._hosts = iter(range(20, 100))  # of machines to come
        for name, host in hosts(shape).items():
            self._network.add(name, host)
        self._clocks = Clocks(folder / "clocks")
        # those whose clock is moved, and no others, run with a library that can do so
        self._moved = {fault.target for fault in plan if fault.kind == "clock"}
        # who ends the run, by ending
        self._last: Process
        self._processes: dict[str, Victim] = {}
        if shape.topology == "up":
            self._processes |= {name: self._service(name) for name in services(shape) if name in YOURS}
            self._last = self._service("up")
            self._processes |= {
                name: Supervised(name, self._last, self._run / "logs" / f"{name}.log")
                for name in services(shape)
                if name not in YOURS
            }
            self._processes["up"] = self._last
        else:
            self._processes |= {name: self._service(name) for name in services(shape)}
            self._last = self._own("trainer")
        self.servers: Servers
        if pair:
            kinds = {"duplicates": shape.duplicates, "sentinels": shape.sentinels}
            self.servers = External(self._network, self._environ, external, seed, **kinds)
        else:
            self.servers = Embedded(self._processes["replay"], machine_of("replay", shape.topology), server_disk)
        # A short run whose plan leaves replicas alone has one: the second's engine would be most of what such a run takes.
        self._alone = len(plan) < LONG and all(fault.target != "rollout" for fault in plan)
        setting, replicas = self.servers.setting, 1 if self._alone else 2
        self._config.write_text(configuration(shape, model, folder, problems, held_out, setting, replicas))
        played = shape.episodes and not shape.graded
        self._buffer = Buffer(self.servers.address, PORT, RUN, self._login, played=played)
        self._glance: Glance | None = None
        self._rival = self._service(_RIVAL)
        self._rival.may_start.clear()
        view = View(lambda: self._glance, self._clock_off, self._fleet, self._renew)
        self._faults = Faults(
            seed, folder, self._network, self.servers, self._processes, self._checkpoints,
            {"environment": self._conduct, "store": self._of_store}, self._clocks, view, Rival(self._rival, view),
        )  # fmt: skip
        self._open: dict[str, int | None] = {}  # episodes of each runner once the run was over, if it said so
        self._still = asyncio.Lock()  # while the others stand still nobody else dies

    def _service(self, name: str) -> Process:
        service = "trainer" if name == _RIVAL else name
        machine = machine_of(service, self.shape.topology)
        address = self._network.address(machine)
        config = str(self._config)
        if name == "environment":
            argv = ["-m", "tests.chaos.environment", "50400", address, str(self._conduct.file)]
        elif name == "store":
            places = str(self.folder / "store"), str(self._of_store.file)
            argv = ["-m", "tests.chaos.store", address, str(STORE_PORT), *places]
        elif name == "up":
            argv = ["-m", "headrace.cli", "up", config]
        elif name == _AFTERWARDS:
            argv = ["-m", "headrace.cli", "replay", "--config", str(self._run / "config.yaml")]
        elif service.startswith("rollout") and self.shape.episodes:
            argv = ["-m", "tests.chaos.light_rollout", str(noise(self.folder, name)), config]
        elif service.startswith("rollout"):
            argv = ["-m", "tests.chaos.noisy_rollout", str(noise(self.folder, name)), "rollout", "--config", config]
        else:
            argv = ["-m", "headrace.cli", service.partition("-")[0], "--config", config]
        # what looks for an address of this machine by itself (gloo, vLLM) finds the one of its namespace
        own = {"HEADRACE_ROLLOUT__HOST": address, "VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": "eth0"}
        if service.startswith("agents"):
            own["HEADRACE_AGENTS__HOST"] = address
        if name == _LATE and self.shape.puller:
            own["HEADRACE_ROLLOUT__WEIGHTS_FROM"] = "store"
        if self.shape.store:
            own |= environ(f"http://store:{STORE_PORT}")
        if name == _RIVAL:
            own["HEADRACE_TRAINER__PORT"] = str(max(HTTP.values()) + 1)
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        variables = {**self._environ(machine), **own, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return Process(name, [*self._network.enter(machine), sys.executable, *argv], variables, logs / f"{name}.log")

    def _environ(self, machine: str) -> dict[str, str]:
        """Of a process on `machine`."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        served = {"server"} if machine in PAIR or (machine == "replay" and self.shape.topology == "embedded") else set()
        moved = self._moved & ({machine.split("-")[0]} | served)
        return kept | (self._clocks.environ(machine) if moved else {})

    def _renew(self, name: str) -> None:
        """Another machine takes the place of the one that `name` ran on: it has the same name, another address, and nothing on its disk."""
        self._network.add(name, next(self._hosts))
        process, fresh = self._own(name), self._service(name)
        process.argv, process.environ = fresh.argv, fresh.environ
        self._rival.argv = self._service(_RIVAL).argv

    def _own(self, name: str) -> Process:
        process = self._processes[name]
        assert isinstance(process, Process)
        return process

    def _login(self) -> Login:
        """`headrace up` makes passwords for the server's users."""
        token = self._token("redis admin")
        return () if token is None else ("headrace-admin", token)

    def _token(self, role: str) -> str | None:
        try:
            lines = (self._run / "credentials").read_text().splitlines()
        except FileNotFoundError:
            return None
        return next((line.split()[-1] for line in lines if line.startswith(f"{role} ")), None)

    # -- the run ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the trainer has finished and the evidence lies in `folder`. Raises `ChaosError`."""
        stopping = asyncio.get_running_loop().create_future()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stopping.set_result, None)
        others = [process for process in self._started() if process is not self._last]
        keepers = [asyncio.create_task(self._join_late(p) if p.name == _LATE else p.keep()) for p in others]
        trainer = asyncio.create_task(self._last.keep(ends=True))
        watching = (self._archive(), self._look(), self.servers.follow())
        helpers = [*(asyncio.create_task(work) for work in watching), stopping]
        striking = asyncio.create_task(self._strike_all())
        try:
            await self._first_of(striking, trainer, helpers, None, "the run ended before its faults were over")
            await self._first_of(trainer, None, helpers, END_DEADLINE_S, "the run did not end")
            self._take_stock()
            await self._save_evidence()
        finally:
            for task in (*helpers, striking, trainer, *keepers):
                task.cancel()
            for process in (*self._processes.values(), *self._started()):
                process.thaw()
            await asyncio.gather(*(process.end() for process in self._started()))
            await asyncio.gather(*helpers, striking, trainer, *keepers, return_exceptions=True)
            await self._buffer.aclose()
            self._save_log()

    async def _join_late(self, replica: Process) -> None:
        """The second replica joins a run that is under way: two engines that start at once take twice as long."""
        if self._alone:
            return
        await eventually(lambda: self._glance is not None and self._glance.next_step >= 1, pause_s=0.2)
        await replica.keep()

    async def _first_of(
        self,
        awaited: asyncio.Task[None],
        forbidden: asyncio.Task[None] | None,
        helpers: list[asyncio.Future[None]],
        deadline_s: float | None,
        problem: str,
    ) -> None:
        others = [task for task in (forbidden, *helpers) if task is not None]
        await asyncio.wait([awaited, *others], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        for task in helpers:
            if task.done():
                task.result()
                raise ChaosError("stopped by a signal")
        if not awaited.done():
            raise ChaosError(problem)
        awaited.result()

    def _started(self) -> Iterator[Process]:
        """What this driver starts."""
        yield from (process for process in self._processes.values() if isinstance(process, Process))
        yield self._rival
        if isinstance(self.servers, External):
            yield from self.servers.processes.values()

    # -- faults ----------------------------------------------------------------------------------------------------------

    async def _strike_all(self) -> None:
        for fault in self.plan:
            async with self._deadline(fault):
                await self._until_ready(fault)
                await self._faults.prepare(fault)
                victim, done, held = await self._catch(fault)
            glance = self._glance
            struck = Struck(fault, victim, done, time.time(), glance.next_step if glance else -1, held)
            self.struck.append(struck)
            log.info("fault %d at step %d, %s, %s: %s", fault.number, struck.step, fault.phase, victim, done)
            try:
                await self._faults.undo(fault, victim)
            except TimeoutError:
                raise ChaosError(f"the run did not get over {fault} ({done}); last seen: {self._glance}") from None
            self._undone = fault.number + 1

    @contextlib.asynccontextmanager
    async def _deadline(self, fault: Fault) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(PHASE_DEADLINE_S):
                yield
        except TimeoutError:
            raise ChaosError(
                f"{fault} found no occasion within {PHASE_DEADLINE_S:g} s; last seen: {self._glance}"
            ) from None

    def _keep_pace(self) -> None:
        """Slow down when the prompts would run out before the faults do."""
        prompts, used = self.shape.prompts, 0
        if self._glance:
            used = self._glance.next_step * self.shape.prompts_per_step + self._glance.untrained
        left = [fault for fault in self.plan[self._undone :] if fault.phase != "closed"]
        # one more than they are: the last may leave the pipeline at work for as long as it lasts
        room = (prompts - used) / self.shape.prompts_per_step / (len(left) + 1)
        pace = 0.0 if not left else 0.5 if room > 6 else 2.0 if room > 4 else 5.0
        if pace != self._conduct.pace:
            self._conduct.tell(pace=pace)

    async def _until_ready(self, fault: Fault) -> None:
        """The process is there and at work, and so is the server."""
        while True:
            if await self._is_ready(fault):
                return
            await asyncio.sleep(0.1)

    async def _is_ready(self, fault: Fault) -> bool:
        if await self._try(self._buffer.glance) is None:
            return False
        if fault.target in ("rollout", "agents"):
            return await self._at_work(fault.target, fault.kind) is not None
        if fault.target in ("server", "sentinel"):
            return self.servers.up()
        if fault.target in YOURS:
            return self._there(fault, fault.target)
        if fault.target == "up":
            return all([await self._page(service, "/readyz") for service in ("replay", "reward", "trainer")])
        return await self._page(fault.target, "/readyz") is not None

    async def _at_work(self, target: Target, kind: Kind) -> str | None:
        """A replica that generates, or a runner that plays, of several any. Replicas that answer calls of episodes hold nothing."""
        if target == "rollout" and self.shape.episodes:
            fleet = await self._fleet()
            busy = [name for name in fleet if fleet[name].state == "HEALTHY"]
        else:
            held = await self._try(self._buffer.held_by_pid) or {}
            busy = [name for name, process in self._processes.items() if held.get(process.pid or -1)]
        # one that pulls its weights fails no refit of the fleet: it comes back under another name, and is not quarantined
        spared = {_LATE} if kind == "noise" and self.shape.puller else set()
        return next((name for name in busy if name.startswith(target) and name not in spared), None)

    async def _catch(self, fault: Fault) -> tuple[str, str, tuple[tuple[str, ...], ...]]:
        """Wait for the phase, hold everything still in the middle of it, and strike. Returns the victim, what was done, and which groups
        were held (`Struck.held`)."""
        several = fault.target in ("rollout", "agents")
        victim: str | None = await self._at_work(fault.target, fault.kind) if several else fault.target
        while True:
            if several and (fault.phase == "generation" or victim is None):
                victim = await self._at_work(fault.target, fault.kind)
            if victim is not None and self._there(fault, victim) and await self._shows(fault):
                async with self._still:
                    stopped: set[str] = set()
                    self._freeze()
                    try:
                        if await self._shows(fault) and self._there(fault, victim):
                            groups = await self._groups_of(victim)
                            done = self._faults.strike(fault, victim)
                            stopped = self._faults.holds(fault, victim)
                            return victim, done, groups
                    finally:
                        self._thaw(stopped)
            await asyncio.sleep(LOOK_S)

    async def _groups_of(self, victim: str) -> tuple[tuple[str, ...], ...]:
        """`Struck.held`. While the server is away every replica misses its heartbeats; with times as short as these they may be dead before
        the run's clock stands still (`LONGEST_GAP_MS` in _run.lua)."""
        held = await self._try(self._buffer.held_by_pid) or {}
        if victim == "server" or (victim == "replay" and self.shape.topology != "external"):
            return tuple(held.values())
        process = self._processes.get(victim)
        return (held.get(process.pid or -1, ()),) if process is not None else ()

    async def _murder(self) -> None:
        """The deadly prompt kills whoever works on it."""
        if self._deadly is None or self._still.locked():
            return
        async with self._still:
            if not any(self._deadly in groups for groups in (await self._buffer.held_by_pid()).values()):
                return
            # else a group that is leased or done between the look and the death would be blamed for nothing that is seen here
            self._freeze()
            try:
                killed = [
                    (victim, pid, groups)
                    for pid, groups in (await self._buffer.held_by_pid()).items()
                    for victim in self._processes.values()
                    if victim.pid == pid and self._deadly in groups
                ]
                for victim, _, _ in killed:
                    victim.kill()
            finally:
                self._thaw(set())
            for victim, pid, groups in killed:
                await eventually(lambda: victim.pid != pid, pause_s=0.01)  # noqa: B023
                self._murdered.append(Murder(victim.name, groups))
                log.info("%s has killed %s, which held %d groups", self._deadly, victim.name, len(groups))

    def _there(self, fault: Fault, victim: str) -> bool:
        if victim in ("server", "sentinel"):
            return self.servers.up()
        pid = self._processes[victim].pid
        return pid is not None and (fault.kind != "kill_engine" or child_named(pid, ENGINE) is not None)

    async def _shows(self, fault: Fault) -> bool:
        if fault.phase == "checkpoint":
            return writing_checkpoint(self._checkpoints)
        glance = await self._try(self._buffer.glance)
        return glance is not None and glance.shows(fault.phase)

    def _freeze(self) -> None:
        """Everything but the server."""
        for name, process in self._processes.items():
            process.freeze(whole=not (name == "replay" and isinstance(self.servers, Embedded)))

    def _thaw(self, held: set[str]) -> None:
        for name, process in self._processes.items():
            if name not in held:
                process.thaw(whole=not (name == "replay" and isinstance(self.servers, Embedded)))

    async def _try(self, look: Callable[[], Awaitable[T]]) -> T | None:
        """None while the server does not answer."""
        try:
            # else a look that is given up at a deadline, or at the end, may go on for ever
            with keeping_cancellation():
                return await look()
        except Away:
            return None

    async def _page(self, service: str, path: str) -> str | None:
        """A service's page with its head, None if it does not answer with 200."""
        machine, port = machine_of(service, self.shape.topology), HTTP[service.split("-")[0]]
        # as their configuration names them: runners by their addresses
        host = self._network.address(machine) if service.startswith("agents") else machine
        request = f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nAuthorization: Bearer {self._token('reader')}\r\n\r\n"
        try:
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_connection(host, port)
                with contextlib.closing(writer):
                    writer.write(request.encode())
                    page = (await reader.read()).decode(errors="replace")
        except (OSError, TimeoutError):
            return None
        return page if " 200 " in page.partition("\r\n")[0] else None

    async def _clock_off(self, victim: str) -> float:
        """By how many seconds the victim's clock is off: it writes the time on its pages."""
        if victim == "server":
            return await self._buffer.clock() - time.time()
        page: str | None = None
        while page is None:
            page = await self._page("trainer" if victim == "up" else victim, "/healthz")
        date = next(line for line in page.splitlines() if line.lower().startswith("date:"))
        return parsedate_to_datetime(date.partition(":")[2]).timestamp() - time.time()

    async def _fleet(self) -> dict[str, Member]:
        """Living replicas, as the buffer knows them; none while it is away."""
        members = await self._try(self._buffer.fleet) or {}
        return {name: members[p.pid] for name, p in self._processes.items() if p.pid is not None and p.pid in members}

    # -- evidence --------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Follow the buffer, and write down every batch while it can be seen."""
        while True:
            glance = await self._try(self._buffer.glance)
            if glance is not None:
                self._glance = glance
                self._keep_pace()
                await self._try(lambda: self._buffer.observe(glance, self.folder / "observed.jsonl"))  # noqa: B023
                await self._try(self._murder)
            await asyncio.sleep(0.03)

    async def _archive(self) -> None:
        """Keep what checkpoints say beside their weights: retention removes the folders."""
        while True:
            self._take_stock()
            self._check_exits()
            await asyncio.sleep(0.05)

    def _check_exits(self) -> None:
        """A service that ends by itself again and again will not get better."""
        for process in self._started():
            bad = [exit_ for exit_ in process.exits if not exit_.by_us and exit_.code not in (0, *_EXITS)]
            if len(bad) >= _MOST_CRASHES:
                raise ChaosError(
                    f"{process.name} crashed {len(bad)} times, last with {bad[-1].code}: {bad[-1].last_words}"
                )

    def _take_stock(self) -> None:
        for folder in self._checkpoints.glob("step_*"):
            kept = self.folder / "archive" / folder.name
            with contextlib.suppress(FileNotFoundError):  # it was dropped meanwhile
                # of one that another trainer had published before it took over, and that was set aside, the second has the name
                if kept.exists() and (kept / "state.json").read_bytes() == (folder / "state.json").read_bytes():
                    continue
                fresh = kept.with_name(f".{folder.name}")
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir(parents=True)
                for path in folder.iterdir():
                    if path.is_file():
                        shutil.copy(path, fresh)
                shutil.rmtree(kept, ignore_errors=True)
                fresh.rename(kept)

    async def _see_sessions_closed(self) -> None:
        """Ask each runner how many episodes it has open, until it has none."""
        self._open = {name: None for name in self._processes if name.startswith("agents")}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSED_S):
                while any(count != 0 for count in self._open.values()):
                    for name in self._open:
                        if page := await self._page(name, "/metrics"):
                            line = next(line for line in page.splitlines() if line.startswith(_OPEN))
                            self._open[name] = int(float(line.removeprefix(_OPEN)))
                    await asyncio.sleep(0.2)

    async def _save_evidence(self) -> None:
        await self._see_sessions_closed()
        async with contextlib.AsyncExitStack() as stack:
            if self.shape.topology == "up":  # it has stopped its server
                again = self._service(_AFTERWARDS)
                keeping = asyncio.create_task(again.keep())
                stack.callback(keeping.cancel)
                stack.push_async_callback(again.end)
            async with asyncio.timeout(60):
                # connections from before the last fault are dead
                while not (dump := await self._try(self._buffer.dump)):  # noqa: ASYNC110 - it starts, somewhere else
                    await asyncio.sleep(0.1)
        (self.folder / "buffer.msgpack").write_bytes(msgpack.packb(dump))
        shutil.copy(self._run / "metrics.jsonl", self.folder / "metrics.jsonl")
        lineage = self.folder / "lineage"
        lineage.mkdir()
        for path in (self._checkpoints / "lineage").glob("step_*.jsonl.gz"):
            shutil.copy(path, lineage)

    def _save_log(self) -> None:
        exits = [dataclasses.asdict(exit_) for process in self._started() for exit_ in process.exits]
        story = {
            "shape": dataclasses.asdict(self.shape),
            "struck": [dataclasses.asdict(struck) for struck in self.struck],
            "planned": len(self.plan),
            "murdered": [dataclasses.asdict(murder) for murder in self._murdered],
            "moved": [dataclasses.asdict(moved) for moved in self._faults.moved],
            "quarantined": [dataclasses.asdict(quarantined) for quarantined in self._faults.quarantined],
            "open": self._open,
            "exits": sorted(exits, key=lambda exit_: exit_["time"]),
        }
        (self.folder / "story.json").write_text(json.dumps(story, indent=1))


def main() -> int:
    """One run, inside namespaces of its own; `runs.py` starts it. Exit code 2: there is no verdict, for the reason that is logged."""
    seed, faults, topology, kind, model, folder = sys.argv[1:]
    episodes = kind == "episodes"
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    shape = make_shape(int(seed), int(faults), cast(Topology, topology), episodes=episodes)
    log.info("seed %s, %s faults: %s; in %s", seed, faults, shape, folder)
    if lacks := clocks.missing():
        log.info("no clock is moved: %s", lacks)
    plan = make_plan(int(seed), int(faults), shape, LEASE_S, clocks=lacks is None)
    try:
        asyncio.run(Driver(shape, plan, int(seed), Path(model), Path(folder)).run())
    except ChaosError as error:
        log.error("no verdict: %s", error)  # noqa: TRY400
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
