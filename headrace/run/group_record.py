"""A group as its events leave it: the fold from which the index of a run's groups is built, and against which the buffer is tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, cast

from headrace.records.group_event import GroupEvent
from headrace.run import group_rewards

ENDS = ("trained", "filtered", "failed", "evaluated", "unused")


class RecordedTrajectory(NamedTuple):
    tokens: int
    oldest: int
    newest: int
    reward: float | None = None


@dataclasses.dataclass(slots=True)
class GroupRecord:
    """A group as its events so far leave it. `first` and `last` are the milliseconds of its events."""

    id: str
    lane: str = "train"
    order: int = -1
    n: int = 0
    environment: str = ""
    state: str = "queued"
    reason: str = ""
    step: int | None = None
    timeline: str | None = None
    attempts: int = 0
    replicas: list[str] = dataclasses.field(default_factory=list)
    build: str | None = None
    trajectories: dict[int, RecordedTrajectory] = dataclasses.field(default_factory=dict)
    enqueued: int | None = None
    ended: int | None = None
    first: int = 0
    last: int = 0

    def apply(self, event: GroupEvent) -> None:
        what, now = event.what, event.cursor[0]
        self.first, self.last = self.first or now, now
        match what:
            case "pushed":
                assert event.index is not None
                self.trajectories[event.index] = RecordedTrajectory(
                    event.tokens or 0, event.oldest or 0, event.newest or 0
                )
            case "scored":
                # one build scores all trajectories of a group (law 3); a score of no build goes with any
                if self.build and event.build != self.build:
                    self.trajectories = {i: t._replace(reward=None) for i, t in self.trajectories.items()}
                if event.index in self.trajectories:
                    self.trajectories[event.index] = self.trajectories[event.index]._replace(reward=event.reward)
                self.build = event.build
            case "leased":
                self._enter("open")
                self.attempts = event.attempt or 0
                if event.replica is not None and event.replica not in self.replicas:
                    self.replicas.append(event.replica)
            case "enqueued":
                self._start_over()
                self.lane, self.order, self.n = event.lane or "train", event.order or 0, event.n or 0
                self.environment, self.attempts, self.replicas, self.enqueued = event.environment or "", 0, [], now
            case "scoring":
                self._enter("scoring")
            case "dropped" | "began_anew":
                self.trajectories.pop(cast(int, event.index), None)
            case "ready" | "evaluated" | "filtered":
                self._enter(what, now)
                # the others are surplus
                self.trajectories = {i: t for i, t in self.trajectories.items() if t.reward is not None}
            case "reserved" | "trained":
                self._enter(what, now)
                self.step, self.timeline = event.step, event.timeline
            case "failed" | "unused":
                self._enter(what, now)
                self.reason = event.reason or ""
                self.trajectories = {} if what == "unused" else self.trajectories
            case "requeued":
                self._start_over()
                self.reason = event.reason or ""
            case "passed_on":
                self.reason = event.reason or ""
            case "retried":
                self._start_over()
            case "restored" if self.state == "reserved" and (self.step or 0) < (event.version or 0):
                self._enter("trained", now)  # the checkpoint was trained on it; that it was committed is lost
            case "rewound" | "restored" if self.is_undone(event):
                self._start_over()
            case "restored" if self.state not in ENDS:
                self._enter("unused", now)

    def is_undone(self, event: GroupEvent) -> bool:
        """Whether a rewind or restore makes the group wait to be enqueued again: to an older checkpoint, or after lost writes."""
        if self.lane != "train":
            return False
        if self.state == "trained":
            return self.step is not None and self.step >= (event.version or 0)
        return event.what == "restored" and self.state not in ("filtered", "failed")

    def _enter(self, state: str, now: int = 0) -> None:
        self.state, self.ended = state, now if state in ENDS else None
        if state in ("open", "ready"):
            self.step = self.timeline = None

    def _start_over(self) -> None:
        self._enter("queued")
        self.step = self.timeline = self.build = None
        self.reason, self.trajectories = "", {}

    @property
    def rewards(self) -> list[float | None]:
        return [t.reward for t in self.trajectories.values()]

    @property
    def mean(self) -> float | None:
        return group_rewards.mean(self.rewards)

    @property
    def spread(self) -> float | None:
        return group_rewards.spread(self.rewards)

    @property
    def oldest(self) -> int | None:
        return min((t.oldest for t in self.trajectories.values()), default=None)

    @property
    def newest(self) -> int | None:
        return max((t.newest for t in self.trajectories.values()), default=None)

    @property
    def age(self) -> int | None:
        return self.step - self.oldest if self.step is not None and self.oldest is not None else None


def apply_to_run(records: Iterable[GroupRecord], event: GroupEvent) -> None:
    """Apply an event of the whole run, or of a group whose id nobody knew any more: that of a failure long ago which is retried."""
    for record in records:
        if event.what != "retried":
            if event.what in ("rewound", "restored"):
                record.apply(event)
        elif (record.lane, record.state, record.order) == ("train", "failed", event.order):
            record.apply(event)
