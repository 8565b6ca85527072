"""`headrace up` at work: which services there are, the order they start and stop in, and what is seen of them meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.cli.supervisor import Child, Supervisor, child_environ
from headrace.cli.view import UPDATING, Picture, ServiceLine, View
from headrace.config import Config
from headrace.errors import HeadraceError, ReplayUnavailable, ServiceError
from headrace.replay import ReplayClient, Replica

# A service that imports torch takes a while on a busy machine; one that hangs has to be told from one that is slow somewhere.
READY_DEADLINE_S = 120.0
LOOK_EVERY_S = 1.0


@dataclasses.dataclass
class Services:
    replay: Child
    reward: Child
    rollouts: list[Child]
    trainer: Child

    def __iter__(self) -> Iterator[Child]:
        return iter((self.replay, self.reward, *self.rollouts, self.trainer))


def services(config: Config, saved: Path) -> Services:
    """The children of a run whose resolved configuration lies at `saved`."""
    logs = saved.parent / "logs"

    def child(name: str, service: str, ends_run: bool = False) -> Child:
        launcher = [sys.executable, "-m"]
        if service == "trainer" and config.trainer.num_processes > 1:
            ranks = ["--nproc-per-node", str(config.trainer.num_processes), "--standalone", "--max-restarts", "3"]
            launcher += ["torch.distributed.run", *ranks, "-m"]
        argv = [*launcher, "headrace.cli", service, "--config", str(saved)]
        return Child(name, argv, logs / f"{name}.log", ends_run)

    return Services(
        replay=child("replay", "replay"),
        reward=child("reward", "reward"),
        rollouts=[child(f"rollout-{number + 1}", "rollout") for number in range(config.rollout.replicas)],
        trainer=child("trainer", "trainer", ends_run=True),
    )


class Pipeline:
    """One run: `run()` returns when the trainer has finished, or raises what ended it; nothing is left running either way."""

    def __init__(self, config: Config, saved: Path, view: View) -> None:
        self.config = config
        self.view = view
        self.services = services(config, saved)
        self.picture = Picture(run_id=config.run_folder.name, max_steps=config.algorithm.max_num_steps)
        self.supervisor = Supervisor(child_environ(os.environ), view.tell)

    async def run(self) -> Picture:
        """Raises `Interrupted` after a signal, `ServiceFailed` when a service can't go on."""
        interrupted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._on_signals(interrupted)
        work = asyncio.create_task(self._work())
        try:
            waiting: set[asyncio.Future[Any]] = {work, interrupted}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Interrupted(interrupted.result())
            work.result()
            return self.picture
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._stop()

    def _on_signals(self, interrupted: asyncio.Future[int]) -> None:
        def on(signum: int) -> None:
            if interrupted.done():
                self.view.tell("interrupted again: killing what is left")
                self.supervisor.kill()
            else:
                interrupted.set_result(signum)
                self.view.tell(f"{signal.Signals(signum).name}: stopping (once more to kill at once)")

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signum, on, signum)

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                keep = self.supervisor.keep
                running = [tasks.create_task(keep(self.services.replay)), tasks.create_task(keep(self.services.reward))]
                await asyncio.gather(*(self._until_ready(*page) for page in self._pages()[:2]))
                running += [tasks.create_task(keep(rollout)) for rollout in self.services.rollouts]
                trainer = tasks.create_task(keep(self.services.trainer))
                async with contextlib.aclosing(
                    await ReplayClient.connect(self.config.redis_url, self.config.run.id)
                ) as client:
                    watch = tasks.create_task(self._watch(client))
                    await trainer
                    for task in (watch, *running):
                        task.cancel()
                    await asyncio.wait({watch})
                    await self._look(client)  # what the trainer said last
        # not `except*`: before Python 3.11.4, which Debian 12 has, what is raised there arrives as a group
        except BaseExceptionGroup as failures:
            ours, others = failures.split(HeadraceError)
            if ours is None or others is not None:
                raise
            raise _first(ours) from None

    def _pages(self) -> list[tuple[Child, str, int]]:
        """Services that answer `/readyz` where the configuration says; replicas are known to the buffer."""
        config, services = self.config, self.services
        return [
            (services.replay, config.replay.host, config.replay.port),
            (services.reward, config.reward.host, config.reward.http_port),
            (services.trainer, config.trainer.host, config.trainer.port),
        ]

    async def _probe(self, child: Child, host: str, port: int) -> None:
        status, _ = await http_get(host, port, "/readyz")
        if child.state not in ("restarting", "finished", "failed"):
            child.mark(status == 200, "not ready" if child.was_ready else "starting")

    async def _until_ready(self, child: Child, host: str, port: int) -> None:
        """Wait for the service's `/readyz`. Raises `ServiceError` past the deadline, with what the service says it lacks."""
        answer = "no answer"
        try:
            async with asyncio.timeout(READY_DEADLINE_S):
                while True:
                    status, answer = await http_get(host, port, "/readyz")
                    if status == 200:
                        break
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise ServiceError(
                f"{child.name} was not ready after {READY_DEADLINE_S:.0f} s ({answer}); the end of {child.log}:\n"
                f"{child.last_words()}"
            ) from None
        child.mark(True, "")

    async def _watch(self, client: ReplayClient) -> None:
        try:
            while True:
                await self._look(client)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._show([])

    async def _look(self, client: ReplayClient) -> None:
        """One look at the buffer. While it can't be reached the view says so: watching must not end a run that goes on."""
        await asyncio.gather(*(self._probe(*page) for page in self._pages()))
        try:
            entries = await client.metrics(self.picture.last_entry)
            replicas = await client.replicas()
            self.picture.counts = (await client.state()).counts
        except ReplayUnavailable as error:
            self.picture.buffer = str(error)
            self._show([])
            return
        self.picture.buffer = ""
        for entry, kind, step, metrics in entries:
            self.picture.take(entry, kind, step, metrics)
            self.view.metrics(kind, step, metrics)
        self._show(replicas)

    def _show(self, replicas: list[Replica]) -> None:
        by_pid = {replica.info.get("pid"): replica for replica in replicas}
        lines = []
        for child in self.services:
            replica = by_pid.get(child.pid) if child in self.services.rollouts else None
            note = ""
            if replica is not None and child.pid is not None:
                child.mark(replica.state == "HEALTHY", _otherwise(child, replica))
                note = f"weights {replica.version}, {replica.leases} groups"
            lines.append(ServiceLine(child.name, child.state, len(child.restarts), note))
        known = {child.pid for child in self.services}
        for replica in replicas:
            if replica.info.get("pid") not in known and replica.state != "DEAD":
                lines.append(
                    ServiceLine(
                        f"rollout {replica.id[:8]}", replica.state.lower(), 0, f"weights {replica.version}, joined"
                    )
                )
        self.picture.services = lines
        self.view.show(self.picture)

    async def _stop(self) -> None:
        services = self.services
        await self.supervisor.stop([services.trainer, *services.rollouts])
        await self.supervisor.stop([services.reward])
        await self.supervisor.stop([services.replay])
        self.supervisor.close()


class Interrupted(Exception):
    """A signal ended the run."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def _otherwise(child: Child, replica: Replica) -> str:
    if replica.state == "DEAD":
        return "silent"
    return UPDATING if child.was_ready else "waiting for weights"


def _first(group: BaseExceptionGroup[HeadraceError]) -> HeadraceError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def http_get(host: str, port: int, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """(status, body) of a plain GET; status 0 if nothing answers there yet."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(target, port)
            with contextlib.closing(writer):
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {target}\r\n\r\n".encode())
                head, _, body = (await reader.read()).decode(errors="replace").partition("\r\n\r\n")
    except (OSError, TimeoutError) as error:
        return 0, f"no answer from {target}:{port} ({error})"
    words = head.split(maxsplit=2)
    return (int(words[1]) if len(words) > 1 and words[1].isdecimal() else 0), body
