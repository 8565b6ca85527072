"""`headrace trainer`. Rank 0 runs the loop and makes all buffer calls except reads of payloads. The other ranks follow it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.base.errors import CodecError, HeadraceError, ServiceError, WrongStep, WrongTimeline
from headrace.base.model_name import MODEL, TOKENIZER
from headrace.base.parent import die_with_parent
from headrace.base.tasks import cancel, run_until
from headrace.config import Config
from headrace.net.http_access import HttpAccess
from headrace.net.service import EXIT_STOPPED, bind, exported, serve_http, stop_on_signals, stop_signals
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory
from headrace.replay import BufferRetry, ReplayClient
from headrace.run import group_files, object_store, prompt_counts
from headrace.run.checkpoints import list_set_aside
from headrace.run.journal import JOURNAL, Journal, list_retries
from headrace.run.lineage import FOLDER
from headrace.run.prompt_counts import PromptRecord

from .control.context import Dependencies, Readiness, TrainerContext
from .control.feeder import Feeder
from .control.history_writer import HistoryWriter
from .control.lineage_writer import LineageWriter
from .control.loop import Loop
from .control.offers import Offers
from .control.rank import LeadRank, TrainerRank, dismiss, follow
from .control.resume import check_prompts, resume
from .control.snapshots import Snapshots
from .data import Prompts
from .distributed.ranks import Ranks, join_ranks, place_on_host
from .memory.fit import check_device
from .network.policy_model import check_refit, load_tokenizer
from .telemetry.http import Gauges, build_app
from .telemetry.now_writer import NowWriter
from .telemetry.telemetry import Telemetry
from .telemetry.throughput import ThroughputMeter

log = logging.getLogger(__name__)


def main(config: Config, dependencies: Dependencies | None = None) -> None:
    """Train until the last step or the last prompt.

    Raises `HeadraceError` for an error that the user must fix, and `SystemExit` with `EXIT_STOPPED` after a signal: a stopped run must not
    look like a finished one.
    """
    dependencies = dependencies or Dependencies()
    for key, name in config.models.items():
        MODEL.check(key, name)
    if config.policy.tokenizer.name is not None:
        TOKENIZER.check(*config.tokenizer)
    if "LOCAL_RANK" in os.environ:
        die_with_parent()
    with join_ranks(config) as ranks:
        check_device(config, ranks.size, place_on_host()[1])
        if ranks.rank > 0:
            _follow(config, ranks, dependencies)
        elif not asyncio.run(_lead(config, ranks, dependencies)):
            raise SystemExit(EXIT_STOPPED)


def _prompts(config: Config) -> Prompts:
    prompts = Prompts(config, load_tokenizer(config))
    prompts.counts.check(config)
    return prompts


async def _lead(config: Config, ranks: Ranks, dependencies: Dependencies) -> bool:
    """Rank 0: assemble the trainer, run its loop, and shut it down in reverse order. Returns False if it was stopped."""
    began, stop = time.monotonic(), stop_on_signals()
    readiness, gauges = Readiness(), Gauges()
    finished = False

    def problems() -> str:
        of_checkpoints = [
            *list_set_aside(config.checkpoint_folder),
            *object_store.list_problems(config.checkpoint_folder),
        ]
        return "\n".join([*of_checkpoints, *([readiness.failures] if readiness.failures else [])])

    try:
        async with contextlib.AsyncExitStack() as stack:
            sock = bind(config.trainer.host, config.trainer.port, "trainer.port")
            access = HttpAccess.of(config, config.trainer.host)
            stack.enter_context(exported(gauges))
            app = build_app(config, readiness, ranks.progress)
            await stack.enter_async_context(serve_http(app, sock, access))
            scheme = "http" if access.certificate is None else "https"
            log.info("%s://%s:%d", scheme, *sock.getsockname()[:2])
            journal = Journal(config.run_folder / JOURNAL)
            telemetry = Telemetry(config, journal, problems)

            # find an unusable model and unusable prompts before anything heavy is loaded
            await asyncio.to_thread(check_refit, config)
            readiness.problem = "reading the prompts"
            prompts = await asyncio.to_thread(_prompts, config)
            for line in prompts.counts.lines(config):
                log.info("%s", line)

            readiness.problem = "waiting for the replay buffer"
            replay = await run_until(dependencies.connect(config), stop.wait())
            if replay is None:
                await asyncio.to_thread(dismiss, ranks)
                return False
            stack.push_async_callback(replay.aclose)
            retry = BufferRetry(config.trainer.fleet_deadline_s)
            events = asyncio.get_running_loop()
            uploads = dependencies.uploads(config)
            if uploads is not None:
                stack.callback(uploads.close)
                readiness.problem = f"looking at {config.checkpointing.store}"
                known = (await retry(replay.state)).timeline
                if not await asyncio.to_thread(uploads.claim, known, stop.is_set):
                    await asyncio.to_thread(dismiss, ranks)
                    return False
            record, before = PromptRecord.of(config, prompts.counts), prompt_counts.read(config.run_folder)

            def read(keys: Sequence[str]) -> list[tuple[AnyTrajectory, Score] | CodecError]:
                # called on the torch thread, but the connection belongs to the event loop
                return asyncio.run_coroutine_threadsafe(retry(lambda: replay.read_each(keys)), events).result()

            readiness.problem = "loading the model"
            torch_thread = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch"))
            checkpoints = dependencies.checkpoints(config)
            stack.callback(checkpoints.lock().release)
            snapshots = Snapshots.of(config, checkpoints)
            lead = LeadRank(config, ranks, read, snapshots)
            on_torch = functools.partial(events.run_in_executor, torch_thread)
            newest = None if snapshots is None else await on_torch(lead.adopt_snapshot)
            if newest is None:
                newest = await on_torch(checkpoints.newest, lambda path: lead.damage(str(path)))
            folder = None if newest is None else str(checkpoints.path(newest))
            if newest is not None:
                check_prompts(checkpoints.state(newest), checkpoints.path(newest), prompts.counts.digest)
            await on_torch(lead.load, folder)
            if config.checkpointing.enabled:
                with checkpoints.trial() as trial:
                    await on_torch(lead.learner.try_saving, trial)
            if snapshots is not None:
                await on_torch(lead.require_room_for_snapshots)
            meter = await on_torch(ThroughputMeter.of, config, lead.learner.policy.model.config)

            resumed = await resume(
                replay,
                retry,
                checkpoints,
                newest,
                list_retries(journal.read()),
                config.run.id or "",
                afresh=record.differs(before),
            )
            prompt_counts.write(config.run_folder, record)
            if uploads is not None:
                await asyncio.to_thread(uploads.begin, resumed.timeline)
            if journal.read():
                journal.append("rewind", resumed.version, resumed.timeline, {})
            lineage = LineageWriter(config.checkpoint_folder / FOLDER, resumed.timeline)
            await asyncio.to_thread(lineage.supersede, resumed.version)
            sender = dependencies.sender(config, replay)
            stack.push_async_callback(sender.aclose)
            offers = Offers.of(config, replay, retry, resumed.timeline)
            if offers is not None:
                stack.callback(offers.close)
            now_writer = NowWriter(config, replay)
            stack.push_async_callback(cancel, [asyncio.create_task(now_writer.run())])
            context = TrainerContext(
                replay=replay,
                retry=retry,
                lead=lead,
                torch_thread=torch_thread,
                sender=sender,
                checkpoints=checkpoints,
                snapshots=snapshots,
                journal=journal,
                lineage=lineage,
                history=HistoryWriter(
                    config.run_folder / group_files.FOLDER, replay, retry, resumed.timeline, prompts.find
                ),
                gauges=gauges,
                prompts=prompts,
                feeder=Feeder(config, replay, retry, resumed.timeline, prompts, journal),
                meter=meter,
                telemetry=telemetry,
                readiness=readiness,
                now=now_writer,
                stop=stop,
                began=began,
                uploads=uploads,
                offers=offers,
            )
            telemetry.start(lead.learner.tokenizer)
            try:
                finished = await Loop(config, context, resumed).run()
                if snapshots is not None:  # there is a checkpoint of the newest version
                    await on_torch(lead.remove_snapshots)
            except (WrongTimeline, WrongStep):  # the curves are another trainer's now
                raise
            except Exception:
                try:
                    await telemetry.draw_end()
                except HeadraceError as error:  # what ended the run matters more
                    log.warning("%s", error)
                raise
            finally:
                await telemetry.aclose(finished=finished)
        await asyncio.to_thread(dismiss, ranks)
    except (WrongTimeline, WrongStep) as error:
        raise ServiceError(
            f"the buffer is not in the state this trainer left it in ({error}): another trainer has taken over the run. "
            "Stop the other, or start this one again: it resumes from its last checkpoint"
        ) from error
    return finished


def _follow(config: Config, ranks: Ranks, dependencies: Dependencies) -> None:
    """Ranks above 0: carry out rank 0's commands. Each reads trajectories over its own connection."""
    # rank 0 gets the signal too, and dismisses this rank after its step
    for signum in stop_signals():
        signal.signal(signum, signal.SIG_IGN)
    with asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        retry = BufferRetry(config.trainer.fleet_deadline_s)
        clients: list[ReplayClient] = []

        def read(keys: Sequence[str]) -> list[tuple[AnyTrajectory, Score] | CodecError]:
            if not clients:  # connect only for the first read: until then rank 0 may dismiss this rank
                clients.append(runner.run(dependencies.connect(config)))
                stack.callback(lambda: runner.run(clients[0].aclose()))
            return runner.run(retry(lambda: clients[0].read_each(keys)))

        follow(TrainerRank(config, ranks, read, Snapshots.of(config, dependencies.checkpoints(config))))
