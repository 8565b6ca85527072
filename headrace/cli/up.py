"""`headrace up`: the whole pipeline as local processes, until the trainer has finished."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from headrace import exposure
from headrace.cli import page, runs
from headrace.cli.common import ConfigArgument, Overrides
from headrace.cli.config import age_bound
from headrace.cli.display import UPDATING, Display, LiveDisplay, RunSummary, ServiceLine, closing_table
from headrace.cli.rewind import published
from headrace.cli.supervisor import Child, ServiceFailed, Supervisor, child_environ
from headrace.config import Config
from headrace.config.load import examine
from headrace.credentials import buffer_url, credentials_of
from headrace.errors import HeadraceError, ReplayUnavailable, ServiceError
from headrace.replay import ReplayClient, Replica
from headrace.tls import client_context

# Importing torch takes a while on a busy machine; past this, a service hangs rather than being slow.
READY_DEADLINE_S = 120.0
POLL_S = 1.0
# Longest time between two questions that counts as a service's silence.
LONGEST_GAP_S = 10.0
# In place of a status: the service took the connection, and said nothing.
NO_ANSWER = 504


def up(
    config: ConfigArgument,
    overrides: Overrides = None,
    rollouts: Annotated[
        int | None, typer.Option(min=1, help="Rollout replicas to start; the same as rollout.replicas=N.")
    ] = None,
) -> None:
    """Start every service as a local process, show the run, and stop everything when it ends or on Ctrl-C.

    With run.id=NAME of an earlier run, continue it from its last checkpoint.
    """
    given = [*(overrides or ()), *([] if rollouts is None else [f"rollout.replicas={rollouts}"])]
    translation = examine(config, given).nemo_rl
    loaded, changes = runs.prepare(config, given)
    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with runs.locked(loaded):
        loaded = runs.settle_ports(loaded)
        runs.make_credentials(loaded)
        for service in ("replay", "reward", "rollout", "trainer"):
            exposure.check(loaded, service)
        saved = runs.save(loaded)
        say(f"run {loaded.run.id} in {loaded.run_folder} ({age_bound(loaded)})")
        if translation:
            say(f"{translation.summary}; `headrace config check {config}` lists them")
        for change in changes:
            say(f"changed: {change}")
        say(f"curves: {page.address(loaded)}")
        started = time.monotonic()
        try:
            with _display(console) as display:
                run = asyncio.run(Pipeline(loaded, saved, display).run())
        except StoppedBySignal as interrupted:
            say(f"stopped; `run.id={loaded.run.id}` goes on with this run")
            raise typer.Exit(128 + interrupted.signum) from None
        console.print(closing_table(run, time.monotonic() - started))
        # not in the table: a path cut off at a column's width can't be copied
        curve, curves = loaded.run_folder / "curve.png", loaded.run_folder / "curves.html"
        say(f"learning curve: {curve if curve.exists() else 'none was drawn'}")
        if curves.exists():
            say(f"all curves:     {curves}")
        checkpoints = published(loaded.checkpoint_folder)
        newest = checkpoints[max(checkpoints)] / "policy" if checkpoints else None
        say(f"checkpoint:     {newest or 'none was written'}")


@contextlib.contextmanager
def _display(console: Console) -> Iterator[Display]:
    if not console.is_terminal:
        yield Display(console)
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield LiveDisplay(live)


class StoppedBySignal(Exception):
    """A signal ended the run."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclasses.dataclass
class Children:
    """The services of a run, as processes."""

    replay: Child
    reward: Child
    rollouts: list[Child]
    trainer: Child

    def __iter__(self) -> Iterator[Child]:
        return iter((self.replay, self.reward, *self.rollouts, self.trainer))

    @classmethod
    def of(cls, config: Config, saved: Path) -> Children:
        """Those of a run whose resolved configuration was saved as `saved`."""

        def child(name: str, service: str, ends_run: bool = False) -> Child:
            launcher = [sys.executable, "-m"]
            if service == "trainer" and config.trainer.num_processes > 1:
                launcher += ["headrace_services.trainer.launch", str(config.trainer.num_processes), "-m"]
            argv = [*launcher, "headrace.cli", service, "--config", str(saved)]
            return Child(name, argv, saved.parent / "logs" / f"{name}.log", ends_run)

        return cls(
            replay=child("replay", "replay"),
            reward=child("reward", "reward"),
            rollouts=[child(f"rollout-{number + 1}", "rollout") for number in range(config.rollout.replicas)],
            trainer=child("trainer", "trainer", ends_run=True),
        )


class Pipeline:
    """Runs a pipeline: `run` returns when the trainer has finished, or raises what ended it. Either way no process is left."""

    def __init__(self, config: Config, saved: Path, display: Display) -> None:
        self.config = config
        self.display = display
        self.children = Children.of(config, saved)
        self._tls = client_context(config.security.tls_ca) if config.security.tls_cert is not None else None
        credentials = credentials_of(config)
        assert credentials is not None  # `prepare` names the file
        self._credentials = credentials
        self.summary = RunSummary(run_id=config.run_folder.name, max_steps=config.algorithm.max_num_steps)
        self.supervisor = Supervisor(child_environ(os.environ), display.print)
        self._asked = time.monotonic()  # when the services were asked for the last time
        self._furthest = -1  # the newest step that was ever taken: one that is taken again is no progress
        self._joined = 0  # replicas alive that were started elsewhere

    async def run(self) -> RunSummary:
        """Raises `StoppedBySignal` after a signal, `ServiceFailed` when a service can't go on."""
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
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._stop()

    def _on_signals(self, interrupted: asyncio.Future[int]) -> None:
        def on(signum: int) -> None:
            if interrupted.done():
                self.display.print("interrupted again: killing what is left")
                self.supervisor.kill()
            else:
                interrupted.set_result(signum)
                self.display.print(f"{signal.Signals(signum).name}: stopping (once more to kill at once)")

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signum, on, signum)

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                supervise = self.supervisor.supervise
                running = [
                    tasks.create_task(supervise(self.children.replay)),
                    tasks.create_task(supervise(self.children.reward)),
                ]
                await asyncio.gather(*(self._until_ready(*page) for page in self._ready_pages()[:2]))
                running += [tasks.create_task(self._supervise_rollout(rollout)) for rollout in self.children.rollouts]
                trainer = tasks.create_task(supervise(self.children.trainer))
                async with contextlib.aclosing(
                    await ReplayClient.connect(buffer_url(self.config, "reader"), self.config.run.id)
                ) as client:
                    watch = tasks.create_task(self._watch(client))
                    await trainer
                    for task in (watch, *running):
                        task.cancel()
                    await asyncio.wait({watch})
                    await self._poll(client)  # the trainer's last metrics
        # not `except*`: before Python 3.11.4 (Debian 12 has 3.11.2) an exception raised in it arrives as a group
        except BaseExceptionGroup as failures:
            ours, others = failures.split(HeadraceError)
            if ours is None or others is not None:
                raise
            raise _first(ours) from None

    async def _supervise_rollout(self, child: Child) -> None:
        """`Supervisor.supervise`, but a replica that can't go on ends the run only if it was the last one."""
        try:
            await self.supervisor.supervise(child)
        except ServiceFailed as failed:
            if self._joined == 0 and all(other.state == "failed" for other in self.children.rollouts):
                raise
            self.display.print(f"{failed}\nThe run goes on with the other replicas.")

    def _ready_pages(self) -> list[tuple[Child, str, int]]:
        """Host and port of each `/readyz` that the configuration names; the buffer knows the replicas."""
        config, children = self.config, self.children
        return [
            (children.replay, config.replay.host, config.replay.port),
            (children.reward, config.reward.host, config.reward.http_port),
            (children.trainer, config.trainer.host, config.trainer.port),
        ]

    async def _probe(self, child: Child, host: str, port: int, after_s: float) -> None:
        """Ask a service whether it is alive and ready. A refused connection is a process that starts or ends, not one that hangs."""
        alive, _ = await self._ask(host, port, "/healthz")
        ready = alive == 200 and (await self._ask(host, port, "/readyz"))[0] == 200
        if child.state not in ("restarting", "finished", "failed"):
            child.set_ready(ready, "not ready" if child.was_ready else "starting")
            child.heard(alive not in (503, NO_ANSWER), after_s)

    async def _ask(self, host: str, port: int, path: str) -> tuple[int, str]:
        return await http_get(host, port, path, self._credentials.token("reader"), self._tls)

    async def _until_ready(self, child: Child, host: str, port: int) -> None:
        """Wait for the service's `/readyz`. Past the deadline, raises `ServiceError` with the service's reason."""
        answer = "no answer"
        try:
            async with asyncio.timeout(READY_DEADLINE_S):
                while True:
                    status, answer = await self._ask(host, port, "/readyz")
                    if status == 200:
                        break
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise ServiceError(
                f"{child.name} was not ready after {READY_DEADLINE_S:.0f} s ({answer}); the end of {child.log}:\n"
                f"{child.log_tail()}"
            ) from None
        child.set_ready(True, "")

    async def _watch(self, client: ReplayClient) -> None:
        try:
            while True:
                await self._poll(client)
                await asyncio.sleep(POLL_S)
        finally:
            self._show([])

    async def _poll(self, client: ReplayClient) -> None:
        """Read the buffer and update the display. An unreachable buffer is displayed; watching must not end the run."""
        # a supervisor that was itself frozen, or waited for the buffer, must not take its own silence for a service's
        now = time.monotonic()
        after_s, self._asked = min(now - self._asked, LONGEST_GAP_S), now
        await asyncio.gather(*(self._probe(*page, after_s) for page in self._ready_pages()))
        for child in self.children:
            if child.silent_s > self.config.run.hang_timeout_s:
                self.supervisor.replace(child, f"no answer for {child.silent_s:.0f} s (run.hang_timeout_s)")
                child.silent_s = 0.0
        try:
            entries = await client.metrics(self.summary.last_entry)
            replicas = await client.replicas()
            self.summary.counts = (await client.state()).counts
            environments = await client.environments()
            self.summary.broken = {each.name: each.message for each in environments if each.broken}
        except ReplayUnavailable as error:
            self.summary.buffer = str(error)
            self._show([])
            return
        self.summary.buffer = ""
        for entry, kind, step, metrics in entries:
            self.summary.add(entry, kind, step, metrics)
            self.display.metrics(kind, step, metrics)
            if kind == "train" and step > self._furthest:
                self._furthest = step
                for child in self.children:
                    if child is self.children.trainer or child.state in ("ready", UPDATING):
                        child.fruitless = 0
        self._show(replicas, after_s)

    def _show(self, replicas: list[Replica], after_s: float = 0.0) -> None:
        by_pid = {replica.info.get("pid"): replica for replica in replicas}
        lines = []
        for child in self.children:
            replica = by_pid.get(child.pid) if child in self.children.rollouts else None
            note = ""
            if replica is not None and child.pid is not None:
                child.set_ready(replica.state == "HEALTHY", _unready_state(child, replica))
                child.heard(replica.state != "DEAD", after_s)
                note = f"weights {replica.version}, {replica.leases} groups"
            lines.append(ServiceLine(child.name, child.state, child.restarts, note))
        known = {child.pid for child in self.children}
        joined = [r for r in replicas if r.info.get("pid") not in known and r.state != "DEAD"]
        self._joined = len(joined)
        for replica in joined:
            lines.append(
                ServiceLine(f"rollout {replica.id[:8]}", replica.state.lower(), 0, f"weights {replica.version}, joined")
            )
        self.summary.services = lines
        self.display.update(self.summary)

    async def _stop(self) -> None:
        await self.supervisor.stop([self.children.trainer, *self.children.rollouts])
        await self.supervisor.stop([self.children.reward])
        await self.supervisor.stop([self.children.replay])
        self.supervisor.close()


def _unready_state(child: Child, replica: Replica) -> str:
    if replica.state == "DEAD":
        return "silent"
    return UPDATING if child.was_ready else "waiting for weights"


def _first(group: BaseExceptionGroup[HeadraceError]) -> HeadraceError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def http_get(
    host: str, port: int, path: str, token: str, tls: ssl.SSLContext | None = None, timeout_s: float = 5.0
) -> tuple[int, str]:
    """(status, body) of a GET over HTTP/1.0; status 0 if nothing listens there, `NO_ANSWER` if what listens is silent."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(target, port, ssl=tls)
            with contextlib.closing(writer):
                name = f"[{target}]" if ":" in target else target
                head = f"GET {path} HTTP/1.0\r\nHost: {name}:{port}\r\nAuthorization: Bearer {token}\r\n\r\n"
                writer.write(head.encode())
                head, _, body = (await reader.read()).decode(errors="replace").partition("\r\n\r\n")
    except TimeoutError:
        return NO_ANSWER, f"no answer from {target}:{port} within {timeout_s:.0f} s"
    except OSError as error:
        return 0, f"no answer from {target}:{port} ({error})"
    words = head.split(maxsplit=2)
    return (int(words[1]) if len(words) > 1 and words[1].isdecimal() else 0), body
