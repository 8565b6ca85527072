"""The trainer's end of the weight channel, for tests that train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.replay import ReplayClient
from headrace_services.refit.sender import RefitReport, WeightSender
from tests.support.source_model import SourceModel


class Trainer:
    """It sends what `source` holds. `channel`: the section `weight_channel`."""

    def __init__(self, replay: ReplayClient, model: Path, timeline: str, **channel: Any) -> None:
        self.replay, self.source, self._timeline = replay, SourceModel(model), timeline
        self.sender = WeightSender(
            Config.model_validate({"weight_channel": channel, "policy": {"precision": "float32"}}), replay
        )

    async def refit(self, version: int) -> RefitReport:
        probe = self.source.probe_ids
        return await self.sender.refit(version, self._timeline, self.source, probe, self.source.logprobs(probe))

    async def see(self, count: int) -> None:
        """Wait until so many replicas take part."""
        while len([replica for replica in await self.replay.replicas() if replica.takes_part]) < count:
            await self.replay.wait_epoch(0.1)
