"""Questions about the groups of a run, and their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, get_args

from headrace.base.errors import ConfigError
from headrace.records.group_event import GroupEvent, GroupState
from headrace.records.trajectory import Lane

# Characters of a prompt that `GroupSummary` has.
SHOWN = 300
# For `GroupQuery.most_texts`.
NO_BOUND = -1
# What `GroupQuery.sort` may be, with `-` before it for descending -> column of the index.
SORTS = {
    "order": '"order"', "reward": "mean", "spread": "spread", "age": "age", "attempts": "attempts", "step": "step",
    "enqueued": "enqueued", "ended": "ended",
}  # fmt: skip


class DataRow(NamedTuple):
    """A row of a data set's file, as error messages count: lines from 1, items of a JSON list and rows of a Parquet file from 0."""

    file: str
    line: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """A group in its newest state. Times are Unix seconds. `rewards` and `tokens` are of the trajectories, by index; `age` is the step less
    the version of the oldest token. Fields that don't apply, or that nobody recorded, are None."""

    id: str
    lane: Lane
    order: int
    epoch: int | None
    task: str
    environment: str
    n: int
    prompt: str  # its first characters
    source: DataRow | None
    state: GroupState
    reason: str
    step: int | None
    timeline: str | None
    attempts: int
    replicas: tuple[str, ...]
    build: str | None
    rewards: tuple[float | None, ...]
    mean: float | None
    spread: float | None
    tokens: tuple[int | None, ...]
    oldest_version: int | None
    newest_version: int | None
    age: int | None
    enqueued: float
    ended: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupStory:
    """A group with its whole prompt and everything that happened to it. `previous` and `next` are its neighbours by order."""

    summary: GroupSummary
    prompt: str
    messages: tuple[Mapping[str, Any], ...] | None  # None: they were too long to be kept whole
    expected: str | None
    events: tuple[GroupEvent, ...]
    previous: str | None
    next: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupQuery:
    """Which groups to find. `text` is a part of the prompt or expected answer (in any case), or a whole id; of the prompts that contain it,
    only the first `most_texts` are looked at. The file of `row` is a path, or the end of one. `reason` is a part of the reason."""

    text: str = ""
    most_texts: int = NO_BOUND
    states: Collection[str] = ()
    lane: Lane | None = None
    environment: str | None = None
    task: str | None = None
    step: int | None = None
    reason: str = ""
    replica: str | None = None
    build: str | None = None
    row: DataRow | None = None
    sort: str = "order"
    offset: int = 0
    limit: int = 100

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a sort or state that there isn't."""
        if unknown := set(self.states) - set(get_args(GroupState)):
            raise ConfigError(f"state {sorted(unknown)[0]!r}: it is one of {', '.join(get_args(GroupState))}")
        if self.sort.removeprefix("-") not in SORTS:
            raise ConfigError(f"sort {self.sort!r}: it is one of {', '.join(SORTS)}, or one of these after a -")


def parse_row(text: str) -> DataRow | None:
    """Return the row that `FILE:LINE` names; None if the text has another form."""
    file, _, line = text.rpartition(":")
    return DataRow(file, int(line)) if file and line.isdecimal() and line.isascii() else None
