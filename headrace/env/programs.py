"""Runs the programs of one environment: its method `episode`, once for each episode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from headrace.base.repeats import Repeats
from headrace.env.environment import Environment, check_score, make_failed
from headrace.env.episode import Episode, EpisodeOutcome
from headrace.env.failure_log import FailureLog
from headrace.env.slots import Raised, Slots
from headrace.records.score import Score

# Replaces an episode's key in messages: a client's error may show the key with the address that it called.
_KEY = "<key>"


class Programs:
    """Runs episodes, at most `environment.episodes` at a time, each until its deadline. Episodes that it can't start at once are
    NOT_STARTED.

    `capacity` overrides the environment's own. `on_free` is called when more can be started.
    """

    def __init__(
        self,
        environment: Environment,
        capacity: int | None = None,
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        if environment.episodes < 1:
            raise ValueError(f"{environment.label}.episodes is {environment.episodes}; it must be at least 1")
        self._environment = environment
        self.capacity = environment.episodes if capacity is None else capacity
        self._failures = FailureLog(environment, Repeats())
        self._slots = Slots(self.capacity, on_free)
        self.drain = self._slots.drain

    @property
    def busy(self) -> int:
        """The number of running programs, including those that were given up."""
        return self._slots.busy

    async def run(self, episode: Episode) -> EpisodeOutcome:
        """Run the program. On cancellation, or at the deadline, the program is cancelled; a plain function continues in its thread, with a
        key that no longer works."""
        if self._slots.is_draining or not self._slots.free:
            return EpisodeOutcome(self._refusal())
        task = asyncio.create_task(self._score(episode, self._slots.take()))
        within_s = episode.remaining_s
        await self._slots.wait([task], within_s)
        if task.done():
            return EpisodeOutcome(task.result(), episode.artifacts)
        late = self._late(within_s)
        self._failures.note([episode], [late])
        return EpisodeOutcome(late, episode.artifacts)

    async def _score(self, episode: Episode, give_back: Callable[[], None]) -> Score | None:
        """Return the program's score."""
        began = time.monotonic()
        try:
            value = await self._slots.call(self._environment.episode, episode, give_back)
        except Raised as raised:
            score = _without_key(make_failed(self._environment, raised.error), episode)
            self._failures.record(raised.error, [episode], score)
            return score
        if value is None:
            return None
        score = check_score(self._environment, value, "episode")
        self._failures.note([episode], [score])
        return msgspec.structs.replace(score, timings={"environment": time.monotonic() - began})

    def _refusal(self) -> Score:
        label = self._environment.label
        full = f"{label} is already running {self._slots.busy} of at most {self.capacity} episodes"
        return self._not_started(f"{label} is shutting down" if self._slots.is_draining else full)

    def _not_started(self, message: str) -> Score:
        return Score("NOT_STARTED", message=message, environment=self._environment.label)

    def _late(self, within_s: float) -> Score:
        label = self._environment.label
        if self._slots.is_cut:
            return self._not_started(f"{label} was shut down before the program ended")
        message = f"the program of {label} did not end within {within_s:.1f} s"
        return Score("TIMED_OUT", message=message, environment=label, build=self._environment.build)


def _without_key(score: Score, episode: Episode) -> Score:
    if not episode.api_key:
        return score
    hidden = {name: getattr(score, name).replace(episode.api_key, _KEY) for name in ("message", "traceback")}
    return msgspec.structs.replace(score, **hidden)
