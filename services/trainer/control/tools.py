"""What the trainer's loop works with."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

from headrace.replay import ReplayClient
from headrace.trajectory import Float32, Int32
from services.trainer.control.checkpoint import Checkpoints
from services.trainer.control.feeder import Feeder
from services.trainer.control.lineage import Lineage
from services.trainer.control.patience import Patience
from services.trainer.control.prompts import Prompts
from services.trainer.control.threads import TorchThread
from services.trainer.control.weight_sender import RefitReport, WeightSource
from services.trainer.control.worker import Lead
from services.trainer.telemetry.http import Gauges
from services.trainer.telemetry.journal import Journal
from services.trainer.telemetry.telemetry import Telemetry
from services.trainer.telemetry.throughput import ThroughputMeter


class Sender(Protocol):
    """What the loop asks of the weight channel; `WeightSender` is it."""

    async def refit(
        self, version: int, timeline: str, source: WeightSource, probe_ids: Int32, probe_logprobs: Float32
    ) -> RefitReport: ...


@dataclasses.dataclass
class Phase:
    """What the trainer is doing, for `/readyz`: None when it is at work, else why it can't."""

    problem: str | None = "starting"


@dataclasses.dataclass(frozen=True)
class Tools:
    """One of each; `stop` is set when the run is to end, `clock` counts seconds and stood at `began` when the trainer started."""

    replay: ReplayClient
    patience: Patience
    lead: Lead
    torch: TorchThread
    sender: Sender
    checkpoints: Checkpoints
    journal: Journal
    lineage: Lineage
    gauges: Gauges
    prompts: Prompts
    feeder: Feeder
    meter: ThroughputMeter
    telemetry: Telemetry
    phase: Phase
    stop: asyncio.Event
    began: float
    clock: Callable[[], float] = time.monotonic
