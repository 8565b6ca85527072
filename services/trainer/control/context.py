"""The objects that the loop on rank 0 works with, and factories of those that tests replace."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.config import Config
from headrace.net.credentials import buffer_url
from headrace.replay import BufferRetry, ReplayClient
from headrace.run.journal import Journal

from ...refit.sender import WeightSender
from ..data import Prompts
from ..telemetry.http import Gauges
from ..telemetry.now_writer import NowWriter
from ..telemetry.telemetry import Telemetry
from ..telemetry.throughput import ThroughputMeter
from .checkpoint import Checkpoints
from .feeder import Feeder
from .history_writer import HistoryWriter
from .lineage_writer import LineageWriter
from .offers import Offers
from .rank import LeadRank
from .snapshots import Snapshots
from .uploads import Uploads

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Dependencies:
    """Factories of the collaborators that a test may replace."""

    replay: Callable[[str, str | None, float], Awaitable[ReplayClient]] = ReplayClient.connect
    sender: Callable[[Config, ReplayClient], WeightSender] = WeightSender
    uploads: Callable[[Config], Uploads | None] = Uploads.of
    checkpoints: Callable[[Config], Checkpoints] = lambda config: Checkpoints(
        config.checkpoint_folder, config.checkpointing
    )

    async def connect(self, config: Config) -> ReplayClient:
        return await self.replay(buffer_url(config, "trainer"), config.run.id, config.trainer.fleet_deadline_s)


@dataclasses.dataclass
class Readiness:
    """The answer of `/readyz`: None when the trainer is at work, else why it isn't. `failures` is the page's text about failed prompts."""

    problem: str | None = "starting"
    failures: str = ""

    async def __call__(self) -> str | None:
        return self.problem


@dataclasses.dataclass(frozen=True)
class TrainerContext:
    """The collaborators of one trainer.

    `stop` is set to end the run. `clock` is in seconds; its value was `began` when the trainer started. All work with torch runs in the one
    thread of `torch_thread`, so that the event loop stays free for health pages and the buffer.
    """

    replay: ReplayClient
    retry: BufferRetry
    lead: LeadRank
    torch_thread: ThreadPoolExecutor
    sender: WeightSender
    checkpoints: Checkpoints
    snapshots: Snapshots | None
    journal: Journal
    lineage: LineageWriter
    history: HistoryWriter
    gauges: Gauges
    prompts: Prompts
    feeder: Feeder
    meter: ThroughputMeter
    telemetry: Telemetry
    readiness: Readiness
    now: NowWriter
    stop: asyncio.Event
    began: float
    uploads: Uploads | None = None  # without `checkpointing.store`
    offers: Offers | None = None  # likewise
    clock: Callable[[], float] = time.monotonic

    async def torch(self, work: Callable[[], T]) -> T:
        def watched() -> T:
            with self.lead.ranks.progress.working():
                return work()

        return await asyncio.get_running_loop().run_in_executor(self.torch_thread, watched)
