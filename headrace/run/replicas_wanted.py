"""Follows how many replicas a pipeline wants (`headrace.run.scaling`), from look to look at its buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.replay import ReplayClient
from headrace.run import scaling
from headrace.run.scaling import StepTime, Wanted


class ReplicasWanted:
    """The number of replicas that the run of `client` wants, from `least` to `most`. Generation may run `steps_ahead` steps ahead."""

    def __init__(self, client: ReplayClient, steps_ahead: int, least: int = 0, most: int | None = None) -> None:
        self._client = client
        self._steps_ahead, self._least, self._most = steps_ahead, least, most
        self._wanted: Wanted | None = None
        self._newest: str | None = None  # the id of the newest metrics that were read
        self._steps: list[StepTime] = []

    @property
    def seen(self) -> int:
        """The newest step that was looked at, -1 before the first."""
        return -1 if self._wanted is None else self._wanted.seen

    async def decide(self, stats: Mapping[str, Any]) -> int:
        """Return how many are wanted, from the buffer's statistics and the steps that were published since. Raises as a call does."""
        if self._newest is None:
            entries = (await self._client.newest_metrics(scaling.MOST_STEPS))[::-1]
        else:
            entries = await self._client.metrics(self._newest)
        if entries:
            self._newest = entries[-1][0]
            self._steps = scaling.follow_steps(self._steps, (entry[1:] for entry in entries))
        look = scaling.read_look(stats, self._steps, self._steps_ahead)
        self._wanted = scaling.decide(look, self._wanted, self._least, self._most)
        return self._wanted.replicas
