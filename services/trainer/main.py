"""`headrace trainer`: rank 0 runs the loop with all calls of the buffer, the other ranks follow it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from headrace.config import Config
from headrace.errors import ReplayUnavailable, ServiceError, WrongStep, WrongTimeline
from headrace.lineage import FOLDER
from headrace.model_name import check_model_name, check_tokenizer_name
from headrace.replay import ReplayClient
from headrace.service import EXIT_STOPPED, bind, die_with_parent, serve_http, stop_on_signals
from headrace.trajectory import Score, Trajectory
from services.trainer.control.checkpoint import Checkpoints
from services.trainer.control.feeder import Demand, Feeder
from services.trainer.control.lineage import Lineage
from services.trainer.control.loop import Loop
from services.trainer.control.patience import Patience
from services.trainer.control.prompts import Prompts
from services.trainer.control.ranks import Ranks, join_ranks
from services.trainer.control.start import Standing, lost_writes, take_up
from services.trainer.control.threads import TorchThread
from services.trainer.control.tools import Phase, Sender, Tools
from services.trainer.control.weight_sender import WeightSender
from services.trainer.control.worker import Lead, Worker, dismiss, follow
from services.trainer.learning.prepare import Passed
from services.trainer.network.teacher import KEY as TEACHER
from services.trainer.network.teacher import teacher_name
from services.trainer.telemetry.http import Gauges, build_app
from services.trainer.telemetry.journal import JOURNAL, Journal
from services.trainer.telemetry.telemetry import Telemetry
from services.trainer.telemetry.throughput import ThroughputMeter

log = logging.getLogger(__name__)

T = TypeVar("T")


@contextlib.asynccontextmanager
async def open_sender(config: Config, replay: ReplayClient) -> AsyncIterator[Sender]:
    sender = WeightSender(config, replay)
    try:
        yield sender
    finally:
        await sender.aclose()


@dataclasses.dataclass(frozen=True)
class Makers:
    """How the trainer gets its collaborators."""

    replay: Callable[[str, str | None, float], Awaitable[ReplayClient]] = ReplayClient.connect
    sender: Callable[[Config, ReplayClient], contextlib.AbstractAsyncContextManager[Sender]] = open_sender
    checkpoints: Callable[[Config], Checkpoints] = lambda config: Checkpoints(
        config.checkpoint_folder, config.checkpointing
    )


def main(config: Config, makers: Makers | None = None) -> None:
    """Train until the last step or the last prompt. Raises `HeadraceError` for what a person must mend, and `SystemExit` with
    `EXIT_STOPPED` when a signal came first: nobody may take a stopped run for a finished one."""
    makers = makers or Makers()
    for key, name in _models(config):
        check_model_name(key, name)
    if config.policy.tokenizer.name is not None:
        check_tokenizer_name("policy.tokenizer.name", config.policy.tokenizer.name)
    if "LOCAL_RANK" in os.environ:
        die_with_parent()
    with join_ranks(config) as ranks:
        if ranks.rank == 0:
            if not asyncio.run(_lead(config, ranks, makers)):
                raise SystemExit(EXIT_STOPPED)
        else:
            _follow(config, ranks, makers)


def _models(config: Config) -> Iterator[tuple[str, str]]:
    """Key and name of each model that a run starts from."""
    yield "policy.model_name", config.policy.model_name
    teacher = teacher_name(config)
    if teacher is not None:
        yield TEACHER, teacher
    if config.value.model_name is not None and Passed.of(config, 1).values:
        yield "value.model_name", config.value.model_name


def _follow(config: Config, ranks: Ranks, makers: Makers) -> None:
    # rank 0 hears the signal too and dismisses this rank when its step is done
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    with asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        patience = Patience(config.trainer.fleet_deadline_s)
        clients: list[ReplayClient] = []

        def read(keys: Sequence[str]) -> list[tuple[Trajectory, Score]]:
            if not clients:  # not before there is something to read: until then rank 0 may dismiss this rank
                clients.append(runner.run(_connect(config, makers)))
                stack.callback(lambda: runner.run(clients[0].aclose()))
            return runner.run(patience(lambda: clients[0].read(keys)))

        follow(Worker(config, ranks, read), ranks)


async def _lead(config: Config, ranks: Ranks, makers: Makers) -> bool:
    """Whether the run is complete; False if it was stopped."""
    stop = stop_on_signals()
    phase, gauges = Phase(), Gauges()
    sock = bind(config.trainer.host, config.trainer.port, "trainer.port")

    async def ready() -> str | None:
        return phase.problem

    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(gauges.registered())
        await stack.enter_async_context(serve_http(build_app(config, ready), sock))
        log.info("http://%s:%d", *sock.getsockname()[:2])
        try:
            finished = await _train(config, ranks, makers, stop, phase, gauges)
            await asyncio.to_thread(dismiss, ranks)
        except (WrongTimeline, WrongStep) as error:
            raise ServiceError(
                f"the buffer goes another way than this trainer ({error}): another trainer has taken the run over. "
                "Stop the other, or start this one again: it goes on from its last checkpoint"
            ) from error
    return finished


async def _train(
    config: Config, ranks: Ranks, makers: Makers, stop: asyncio.Event, phase: Phase, gauges: Gauges
) -> bool:
    began = time.monotonic()
    journal = Journal(config.run_folder / JOURNAL)
    telemetry = Telemetry(config, journal)
    async with contextlib.AsyncExitStack() as stack:
        phase.problem = "waiting for the replay buffer"
        replay = await unless_stopped(stop, _connect(config, makers))
        if replay is None:
            return False
        stack.push_async_callback(replay.aclose)
        torch_thread = stack.enter_context(TorchThread())
        patience = Patience(config.trainer.fleet_deadline_s)
        lead = Lead(config, ranks, _reader(replay, patience))
        phase.problem = "loading the model"
        checkpoints = makers.checkpoints(config)
        newest = checkpoints.newest()
        await torch_thread(lambda: lead.load(None if newest is None else str(checkpoints.path(newest))))
        meter = await torch_thread(lambda: ThroughputMeter.of(config))
        prompts = await asyncio.to_thread(Prompts, config, lead.learner.tokenizer)
        standing = await take_up(replay, patience, checkpoints, config.run.id or "")
        feeder = _feeder(config, replay, patience, standing, prompts)
        if journal.read():
            journal.append("rewind", standing.version, standing.timeline, {})
        lineage = Lineage(config.checkpoint_folder / FOLDER, standing.timeline)
        await asyncio.to_thread(lineage.supersede, standing.version)
        sender = await stack.enter_async_context(makers.sender(config, replay))
        tools = Tools(
            replay=replay,
            patience=patience,
            lead=lead,
            torch=torch_thread,
            sender=sender,
            checkpoints=checkpoints,
            journal=journal,
            lineage=lineage,
            gauges=gauges,
            prompts=prompts,
            feeder=feeder,
            meter=meter,
            telemetry=telemetry,
            phase=phase,
            stop=stop,
            began=began,
        )
        finished = False
        telemetry.start()
        try:
            finished = await _go_on(config, tools, standing)
        finally:
            await telemetry.aclose(finished=finished)
        return finished


async def _go_on(config: Config, tools: Tools, standing: Standing) -> bool:
    """Raises `ReplayUnavailable` where the buffer's server lost writes: the next start makes them good."""
    feeding: asyncio.Task[None] | None = None
    reserved = standing.version
    try:
        if standing.refill:
            again = await tools.feeder.refill(standing.missing())
            log.info("%d prompts that nothing was trained on are queued again", again)
        feeding = asyncio.create_task(tools.feeder.run())
        loop = Loop(config, tools, standing, feeding)
        try:
            return await loop.run()
        finally:
            reserved = loop.reserved
    except (WrongTimeline, WrongStep, ServiceError) as error:
        if lost_writes(standing, await tools.patience(tools.replay.state), reserved):
            raise ReplayUnavailable(
                f"the buffer's server lost writes ({error}); start this trainer again: it goes on from its last checkpoint, and makes "
                "them good"
            ) from error
        raise
    finally:
        if feeding is not None:
            feeding.cancel()
            await asyncio.wait([feeding])


def _feeder(config: Config, replay: ReplayClient, patience: Patience, standing: Standing, prompts: Prompts) -> Feeder:
    algorithm = config.algorithm
    demand = Demand.of(algorithm.num_prompts_per_step, algorithm.ahead_steps, algorithm.max_num_steps, prompts.total)
    return Feeder(replay, patience, standing.timeline, demand, prompts.train)


async def _connect(config: Config, makers: Makers) -> ReplayClient:
    return await makers.replay(config.redis_url, config.run.id, config.trainer.fleet_deadline_s)


def _reader(replay: ReplayClient, patience: Patience) -> Callable[[Sequence[str]], list[tuple[Trajectory, Score]]]:
    """Reads payloads from the torch thread: the connection belongs to the event loop that runs here."""
    loop = asyncio.get_running_loop()

    def read(keys: Sequence[str]) -> list[tuple[Trajectory, Score]]:
        return asyncio.run_coroutine_threadsafe(patience(lambda: replay.read(keys)), loop).result()

    return read


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None if the stop came first."""
    task, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait((task,))
    return None
