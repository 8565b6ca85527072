"""The origin of a trajectory: which replica wrote which of its tokens under which weights, and which environment scored it."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterator

from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Trajectory

TimelineOf = Callable[[int], str | None]


@dataclasses.dataclass(frozen=True)
class TokenRange:
    """Completion tokens `[start, end)`, the replica that sampled them, and its weights at the time. Tokens that the environment wrote
    between turns are in no range. For an episode the completions of its calls are counted one after the other (`EpisodeTrajectory.flat`);
    those of calls that are not trained are in no range."""

    start: int
    end: int
    replica: str
    version: int
    timeline: str | None = None


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of one trajectory. `environment`, `build` and `reward` are set once it is scored, `advantage` once it is trained."""

    index: int
    attempt: int
    tokens: int
    ranges: tuple[TokenRange, ...]
    finish_reason: str
    environment: str | None = None
    build: str | None = None
    reward: float | None = None
    advantage: float | None = None


@dataclasses.dataclass(frozen=True)
class GroupLineage:
    """The lineage of one group: its state, and the origin of each of its trajectories. `step` and `timeline` (the trainer's) are set once
    it is trained, `reason` if it failed."""

    group: str
    state: str
    task: str
    env: str
    order: int
    step: int | None
    timeline: str | None
    trajectories: tuple[Origin, ...]
    reason: str = ""


def trace_origin(trajectory: AnyTrajectory, score: Score | None, advantage: float | None = None) -> Origin:
    """Return the origin of a trajectory, with weights by version only; `with_timelines` adds their timelines."""
    flat = trajectory.flat()
    return Origin(
        index=trajectory.index,
        attempt=trajectory.attempt,
        tokens=flat.completion_token_ids.size,
        ranges=tuple(_ranges(flat)),
        finish_reason=flat.finish_reason,
        environment=score.environment if score else None,
        build=score.build if score else None,
        reward=score.reward if score else None,
        advantage=advantage,
    )


def _ranges(trajectory: Trajectory) -> Iterator[TokenRange]:
    """Yield the ranges of tokens with the same writer and weights, without those that the environment wrote between turns."""
    written, spans = trajectory.written, trajectory.spans
    written_until, spans_until = [end for _, _, end in written], [span.end for span in spans]
    for start, last in trajectory.turns or ((0, trajectory.completion_token_ids.size),):
        while start < last:
            replica, _, end = written[bisect_right(written_until, start)]
            span = spans[bisect_right(spans_until, start)]
            end = min(end, span.end, last)
            yield TokenRange(start, end, replica, span.version)
            start = end


def with_timelines(origin: Origin, timeline_of: TimelineOf) -> Origin:
    ranges = tuple(dataclasses.replace(r, timeline=timeline_of(r.version)) for r in origin.ranges)
    return dataclasses.replace(origin, ranges=ranges)
