"""Runs the services of a run as local processes, for `headrace up` and `headrace eval`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headrace.base.devices import DevicePlan
from headrace.base.errors import HeadraceError, Problems, ReplayDenied, ReplayUnavailable, ServiceError, is_outage
from headrace.base.files import is_gone
from headrace.base.scratch import remove_abandoned
from headrace.base.tasks import cancel
from headrace.base.tls import client_context
from headrace.config import Config
from headrace.launch import environment_processes, exposure, ports, runs
from headrace.launch.children import Children, Reserved
from headrace.launch.environment_watch import EnvironmentWatch
from headrace.launch.probe import LONGEST_PROBE_GAP_S, NO_ANSWER, http_get, parse_json, parse_reason, patience
from headrace.launch.summary import UPDATING, Display, RunSummary, ServiceLine, Wait
from headrace.launch.supervisor import Child, ServiceFailed, Supervisor, child_environ
from headrace.net.credentials import buffer_url, load_credentials
from headrace.net.service import SAVE_DEADLINE_S, stop_signals
from headrace.replay import ReplayClient, Replica, Runner, frequent
from headrace.run import history, prompt_counts, snapshots
from headrace.run.checkpoints import list_set_aside
from headrace.run.object_store import list_problems

# Importing torch takes a while on a busy machine; past this, a service hangs rather than being slow.
READY_DEADLINE_S = 120.0
# How long a trainer that is being stopped may take when the run's folder is gone.
WITHOUT_FOLDER_S = 5.0
POLL_S = 1.0
# While services start.
LOOK_S = 0.2


def check(config: Config) -> None:
    """Refuse, before anything is written, a run that can't start. Raises `ConfigError` with everything that is wrong."""
    problems = Problems()
    episodes, page = (["agents"] if config.has_episodes else []), (["page"] if config.page.port is not None else [])
    with problems.gathered():  # the first of them: what one needs, all have
        for service in ("replay", "reward", "rollout", *episodes, "trainer", *page):
            exposure.check(config, service)
    with problems.gathered():
        environment_processes.check(config)
    problems.tell()


@contextlib.contextmanager
def settle(config: Config) -> Iterator[tuple[Config, Path, Reserved]]:
    """Settle and save what the services need before they start: credentials, configuration, and ports, which stay reserved while the
    context is open. Yields the saved configuration, its path, and what reserves the ports. Raises `ConfigError`, `ServiceError`."""
    with ports.settle(config) as (ready, reserved):
        runs.make_credentials(ready)
        yield ready, runs.save(ready), reserved


def list_pages(config: Config) -> list[tuple[str, str, int]]:
    """Return the name, host and port of each service that the configuration gives one. The buffer knows those of the replicas."""
    page = [] if config.page.port is None else [("page", config.page.host, config.page.port)]
    return [
        ("replay", config.replay.host, config.replay.port),
        ("reward", config.reward.host, config.reward.http_port),
        ("trainer", config.trainer.host, config.trainer.port),
        *page,
    ]


class StoppedBySignal(Exception):
    """A signal ended the run."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Pipeline:
    """Runs a pipeline: `run` returns when the trainer has finished, or raises what ended the run. Either way no process is left."""

    def __init__(
        self, config: Config, saved: Path, plan: DevicePlan | None, reserved: Reserved, display: Display
    ) -> None:
        self.config = config
        self.display = display
        self._saved = saved
        self.children = Children.of(config, saved, plan, reserved)
        self._device_is_shared = plan is not None and plan.is_shared
        self._tls = client_context(config.security.tls_ca) if config.security.tls_cert is not None else None
        credentials = load_credentials(config)
        assert credentials is not None  # `prepare` names the file
        self._credentials = credentials
        self.summary = RunSummary(
            run_id=config.run_folder.name,
            max_steps=config.max_num_steps,
            folder=str(config.run_folder),
            evaluates=config.data.evaluate is not None,
        )
        self.supervisor = Supervisor(child_environ(os.environ), display.print)
        self.environments = EnvironmentWatch(config, self.children, self.supervisor, display.print)
        self._asked = time.monotonic()  # when the services were last probed
        # the newest step ever taken (repeating a step is not progress), or the prompts evaluated
        self._furthest = -1
        self._joined = 0  # replicas alive that were started elsewhere
        self._prompts = saved.parent / prompt_counts.FILE
        self._prompts_before = _written(self._prompts)
        self._of_checkpoints = {*list_set_aside(config.checkpoint_folder)}  # as far as they were said
        self._noted: list[str] = []  # waits of restarted services
        self._notes: dict[str, str] = {}  # by service: why it is not ready
        self._ready_at: dict[str, float] = {}  # by service: when it last was ready

    async def run(self) -> RunSummary:
        """Run until the trainer has finished. Raises `StoppedBySignal` after a signal, `ServiceFailed` when a service can't continue."""
        interrupted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._on_signals(interrupted)
        work = asyncio.create_task(self._work())
        try:
            waiting: set[asyncio.Future[Any]] = {work, interrupted}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise StoppedBySignal(interrupted.result())
            work.result()
            return self.summary
        finally:
            await cancel([work])
            await self._stop()

    def _on_signals(self, interrupted: asyncio.Future[int]) -> None:
        def on(signum: int) -> None:
            if interrupted.done():
                self.display.print("interrupted again: killing what is left")
                self.supervisor.kill()
            else:
                interrupted.set_result(signum)
                saving = "saving a checkpoint, then " if self.config.checkpointing.enabled else ""
                self.display.print(f"{signal.Signals(signum).name}: {saving}stopping (once more to kill at once)")

        loop = asyncio.get_running_loop()
        for signum in stop_signals():
            loop.add_signal_handler(signum, on, signum)
        # as a program that SIGPIPE ends; not at once, because it may be found out while a line is printed
        self.display.stop_when_unread(partial(loop.call_soon, on, signal.SIGPIPE))

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                folder = tasks.create_task(self._watch_folder())
                supervise = self.supervisor.supervise
                first = (self.children.replay, self.children.reward, *self.children.environments.values())
                running = [tasks.create_task(supervise(child)) for child in first]
                pages = self._ready_pages()[:2]
                await asyncio.gather(*(self._until_ready(*page) for page in pages))
                # before any model is loaded: an environment that can't be served is an error, one that others start is waited for
                while any(child.state != "ready" for child in self.children.environments.values()):
                    await self._look(pages)
                    self._show([])
                    await asyncio.sleep(LOOK_S)
                async with contextlib.aclosing(
                    await ReplayClient.connect(buffer_url(self.config, "reader"), self.config.run.id)
                ) as client:
                    await self._recall(client)
                    running += [tasks.create_task(self._supervise_rollout(each)) for each in self.children.rollouts]
                    running += [tasks.create_task(supervise(each)) for each in self.children.agents]
                    if self.children.page is not None:
                        running.append(tasks.create_task(self._supervise_page(self.children.page)))
                    watch = tasks.create_task(self._watch(client))
                    if self._device_is_shared:
                        await self._until_loaded(client)
                    trainer = tasks.create_task(supervise(self.children.trainer))
                    await trainer
                    for task in (folder, watch, *running):
                        task.cancel()
                    await asyncio.wait({watch})
                    await self._poll(client)  # the trainer's last metrics
        # not `except*`: before Python 3.11.4 (Debian 12 has 3.11.2) an exception raised in it arrives as a group
        except BaseExceptionGroup as failures:
            if is_gone(self._saved):
                raise self._without_folder() from None  # whatever failed, failed for that
            ours, others = failures.split(HeadraceError)
            if ours is None or others is not None:
                raise
            raise _first(ours) from None

    async def _watch_folder(self) -> None:
        """Raise `ServiceError` once the run's folder is gone."""
        while True:
            if is_gone(self._saved):
                raise self._without_folder()
            await asyncio.sleep(LOOK_S)

    def _without_folder(self) -> ServiceError:
        held, checkpoints = self.config.replay.redis_url, self.config.checkpoint_folder
        return ServiceError(
            f"the run's folder {self.config.run_folder} was deleted or moved while the run was up, and the run ends; "
            + ("its buffer was in it" if held is None else "the buffer's server keeps what it holds")
            + (
                f", and the checkpoints in {checkpoints} are kept"
                if not is_gone(checkpoints)
                else ", and so were its checkpoints"
            )
            + ". Move the folder back, and the run continues; or start a new one with another run.id"
        )

    async def _supervise_rollout(self, child: Child) -> None:
        """Supervise a replica. One that can't continue ends the run only if it was the last."""
        try:
            await self.supervisor.supervise(child)
        except ServiceFailed as failed:
            if self._joined == 0 and all(other.state == "failed" for other in self.children.rollouts):
                raise
            self.display.print(f"{failed}\nThe run continues with the other replicas.")

    async def _supervise_page(self, child: Child) -> None:
        """Supervise the page, which the run does without."""
        try:
            await self.supervisor.supervise(child)
        except ServiceFailed as failed:
            self.display.print(
                f"{failed}\nThe run continues without its page; `headrace page {self._saved.parent}` starts one."
            )

    def _ready_pages(self) -> list[tuple[Child, str, int]]:
        by_name = {child.name: child for child in self.children}
        return [(by_name[name], host, port) for name, host, port in list_pages(self.config)]

    async def _probe(self, child: Child, host: str, port: int, after_s: float) -> None:
        """Ask a service whether it is alive and ready. A refused connection means that the process is starting or ending, not that it
        hangs."""
        alive, _ = await self._ask(host, port, "/healthz")
        status, answer = await self._ask(host, port, "/readyz") if alive == 200 else (0, "")
        ready = status == 200
        self._notes[child.name] = "" if ready else parse_reason(answer)
        if ready:
            self._ready_at[child.name] = time.monotonic()
        if child.state not in ("restarting", "finished", "failed"):
            away = "ending" if alive == 0 else "not ready"
            child.set_ready(ready, away if child.was_ready else "starting")
            child.note_probe(alive not in (503, NO_ANSWER), after_s)

    async def _look_at_environments(self, after_s: float) -> None:
        """Ask the hub which environments it can reach. While it does not answer, nothing changes."""
        status, answer = await self._ask(self.config.reward.host, self.config.reward.http_port, "/v1/environments")
        found = parse_json(answer) if status == 200 else None
        if found is not None:
            await self.environments.note(found, after_s)

    async def _ask(self, host: str, port: int, path: str) -> tuple[int, str]:
        return await http_get(host, port, path, self._credentials.token("reader"), self._tls)

    def _waits(self) -> list[Wait]:
        """Return what the run waits for: environments, and the buffer's server."""
        replay = self.children.replay.name
        waits = self.environments.waits()
        if replay in self._ready_at and self._notes[replay]:
            waits.append(Wait("the buffer's server", time.monotonic() - self._ready_at[replay], self._notes[replay]))
        return [*waits, *self._restarts_that_wait()]

    def _restarts_that_wait(self) -> list[Wait]:
        """Return the waits of services that were restarted and could not start, and so are not there to tell."""
        now = time.monotonic()
        return [
            Wait(child.waits_for.format(child.name), now - child.waits_since, child.waits_why)
            for child in self.children
            if child.waits_for
        ]

    async def _until_ready(self, child: Child, host: str, port: int) -> None:
        """Wait for the service's `/readyz`. Past the deadline, raises `ServiceError` with the service's reason."""
        answer = "no answer"
        try:
            async with asyncio.timeout(READY_DEADLINE_S):
                while True:
                    status, answer = await self._ask(host, port, "/readyz")
                    if status == 200:
                        break
                    self._notes[child.name] = parse_reason(answer)
                    self._show([])
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise ServiceError(
                f"{child.name} was not ready after {READY_DEADLINE_S:.0f} s ({answer}); the end of {child.log}:\n"
                f"{child.log_tail()}"
            ) from None
        child.set_ready(True, "")
        child.note_probe(True, 0.0)
        self._notes[child.name] = ""
        self._show([])

    async def _until_loaded(self, client: ReplayClient) -> None:
        """Wait until each replica's engine is up. While vLLM starts, it attributes other processes' allocations on its device to itself."""
        loaded: set[Any] = set()
        while any(child.pid not in loaded for child in self.children.rollouts):
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(ReplayUnavailable):
                loaded = {each.info.get("pid") for each in await client.replicas() if each.takes_part}

    async def _watch(self, client: ReplayClient) -> None:
        try:
            while True:
                await self._poll(client)
                await asyncio.sleep(POLL_S)
        finally:
            self._show([])

    async def _recall(self, client: ReplayClient) -> None:
        """Read what earlier starts of the run trained, so that it is not displayed as new."""
        with contextlib.suppress(ReplayUnavailable):
            for entry in await client.metrics(self.summary.last_entry):
                self.summary.add(*entry)

    async def _poll(self, client: ReplayClient) -> None:
        """Read the buffer and update the display. A buffer that is away, or refuses, is displayed; watching must not end the run."""
        with _file_server_away():
            self._say_of_checkpoints()
        after_s = await self._look(self._ready_pages())
        try:
            entries = await client.metrics(self.summary.last_entry)
            replicas, runners = await client.replicas(), await client.runners()
            self.summary.counts = await self._counts(client)
            self.environments.note_breakers(await client.environments())
            if self.summary.failed:
                self.summary.failures = frequent(await client.failures())
        except (ReplayUnavailable, ReplayDenied) as error:
            self.summary.buffer = str(error)
            self._show([])
            return
        self.summary.buffer = ""
        with _file_server_away():
            self._say_prompts()
        if self.summary.evaluates:
            self._note_progress(self.summary.evaluated)
        else:
            for entry, kind, step, metrics in entries:
                self.summary.add(entry, kind, step, metrics)
                self.display.metrics(kind, step, metrics)
                if kind == "train":
                    self._note_progress(step)
        self._show(replicas, after_s, runners)

    async def _look(self, pages: Sequence[tuple[Child, str, int]]) -> float:
        """Ask the services with these pages, and the environments, how they are. Replace the silent ones. Returns the time since the last
        look."""
        # a supervisor that was frozen itself, or waited for the buffer, must not mistake its own silence for a service's
        now = time.monotonic()
        after_s, self._asked = min(now - self._asked, LONGEST_PROBE_GAP_S), now
        await asyncio.gather(*(self._probe(*page, after_s) for page in pages), self._look_at_environments(after_s))
        self._replace_silent()
        return after_s

    def _replace_silent(self) -> None:
        """Replace the services that have answered nothing for too long."""
        environments = {child.name: name for name, child in self.children.environments.items()}
        for child in self.children:
            environment = environments.get(child.name)
            limit_s, key = patience(self.config, environment, is_broken=environment in self.environments.broken)
            if child.silent_s > limit_s:
                self.supervisor.replace(child, f"no answer for {child.silent_s:.0f} s ({key})")
                child.silent_s = 0.0

    async def _counts(self, client: ReplayClient) -> dict[str, int]:
        """Return the groups by state, of the lane that the run is about."""
        if not self.summary.evaluates:
            return (await client.state()).counts
        counts: dict[str, int] = (await client.stats())["counts"]["validation"]
        return counts

    def _note_progress(self, done: int) -> None:
        if done > self._furthest:
            self._furthest = done
            self.children.trainer.was_ready = True
            self.children.trainer.note_let_in()
            for child in self.children:
                if child is self.children.trainer or child.state in ("ready", UPDATING):
                    child.fruitless = 0

    def _say_prompts(self) -> None:
        """Print the numbers of prompts, once the trainer has counted them."""
        written = _written(self._prompts)
        if written != self._prompts_before:
            record = prompt_counts.read(self._prompts.parent)
            self._prompts_before = written
            for line in record.counts.lines(self.config) if record else ():
                self.display.print(line)

    def _say_of_checkpoints(self) -> None:
        """Print which damaged checkpoints the trainer has set aside since this start, and which do not reach the store."""
        folder = self.config.checkpoint_folder
        for line in (*list_set_aside(folder), *list_problems(folder)):
            if line not in self._of_checkpoints:
                self._of_checkpoints.add(line)
                self.display.print(line)

    def _show(self, replicas: list[Replica], after_s: float = 0.0, runners: Sequence[Runner] = ()) -> None:
        by_pid = {replica.info.get("pid"): replica for replica in replicas}
        runner_by_pid = {runner.info.get("pid"): runner for runner in runners}
        pages = {name: runs.page_url(self.config, host, port) for name, host, port in list_pages(self.config)}
        lines = []
        for child in self.children:
            replica = by_pid.get(child.pid) if child in self.children.rollouts else None
            note, url = self._notes.get(child.name, ""), pages.get(child.name, "")
            if replica is not None and child.pid is not None:
                child.set_ready(replica.state == "HEALTHY", _unready_state(child, replica))
                child.note_let_in()
                child.note_probe(replica.state != "DEAD", after_s)
                note, url = f"weights {replica.version}, {replica.leases} groups", str(replica.info.get("url", ""))
            runner = runner_by_pid.get(child.pid) if child in self.children.agents else None
            if runner is not None and child.pid is not None:
                child.set_ready(runner.alive, "silent")
                child.note_probe(runner.alive, after_s)
                note, url = f"{runner.leases} groups of episodes", str(runner.info.get("url", ""))
            state = "waiting" if child.waits_for else child.state  # not how each of its starts goes
            lines.append(ServiceLine(child.name, state, child.restarts, note, url))
        known = {child.pid for child in self.children}
        joined = [r for r in replicas if r.info.get("pid") not in known and r.state != "DEAD"]
        self._joined = len(joined)
        for replica in joined:
            note, url = f"weights {replica.version}, joined", str(replica.info.get("url", ""))
            lines.append(ServiceLine(replica.id, replica.state.lower(), 0, note, url))
        self.summary.services = lines
        self.summary.waits = self._waits()
        self._note_waits()
        self.display.update(self.summary)

    def _note_waits(self) -> None:
        """Note for `headrace status` which restarted services wait, and since when."""
        waits = self._restarts_that_wait()
        noted = [f"{wait.whom}: {wait.why}" for wait in waits]
        if noted != self._noted:
            self._noted = noted
            since = [time.strftime("%X", time.localtime(time.time() - wait.seconds)) for wait in waits]
            history.note_waits(
                self._saved.parent, [f"{line} (since {began})" for line, began in zip(noted, since, strict=True)]
            )

    async def _stop(self) -> None:
        # without the run's folder, what the trainer would wait for never comes
        save_s = WITHOUT_FOLDER_S if is_gone(self._saved) else SAVE_DEADLINE_S
        await asyncio.gather(
            self.supervisor.stop([self.children.trainer], save_s),
            self.supervisor.stop([*self.children.rollouts, *self.children.agents]),
        )
        await self.supervisor.stop([self.children.reward, *([self.children.page] if self.children.page else [])])
        await self.supervisor.stop(self.children.environments.values())
        await self.supervisor.stop([self.children.replay])
        self.supervisor.close()
        remove_abandoned()  # by services that had to be killed
        snapshots.remove(self.config)


@contextlib.contextmanager
def _file_server_away() -> Iterator[None]:
    """Leave out what can't be read now: the next poll looks again."""
    try:
        yield
    except (OSError, ServiceError) as error:
        if not is_outage(error):
            raise


def _written(path: Path) -> int | None:
    """Return when a file was written; None if it doesn't exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _unready_state(child: Child, replica: Replica) -> str:
    if replica.state == "LOADING":
        return "loading"
    if not replica.takes_part:
        return "silent" if replica.state == "DEAD" else "quarantined"
    return UPDATING if child.was_ready else "waiting for weights"


def _first(group: BaseExceptionGroup[HeadraceError]) -> HeadraceError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
