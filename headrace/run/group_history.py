"""What became of every group of a run: finds groups by text, row of a data set, state and more, and tells the story of one.

The trainer writes the events of groups to Parquet files (`headrace.run.group_files`), from which this module keeps an SQLite index, in the
folder of the files, or in the user's cache folder if that can't be written. Every call first reads what was written since the last. Several
processes may use one index. It can be deleted at any time.

Rewards, tokens and versions of a group are those of its newest attempt. A group that was trained, and is trained again after a rewind, is
shown in its newest state; its story has all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from headrace.run.group_files import What

T = TypeVar("T")

INDEX = ".index.sqlite"
# A change makes existing indexes be built anew.
_SCHEMA = 1
# Characters of a prompt that `GroupSummary` has, and that are searched.
SHOWN, SEARCHED = 300, 8192
# Shortest text that the index of substrings finds.
_TRIGRAM = 3
_BUSY_S = 30.0

State = Literal[
    "queued", "open", "scoring", "ready", "reserved", "trained", "filtered", "failed", "evaluated", "unused"
]
Lane = Literal["train", "validation"]
# What `GroupQuery.sort` names, with `-` before it for descending.
Sort = Literal["order", "reward", "spread", "age", "attempts", "enqueued", "ended", "step"]
_COLUMN_OF = {"order": '"order"', "reward": "mean"}
SORTS: Sequence[str] = ("order", "reward", "spread", "age", "attempts", "enqueued", "ended", "step")


class Row(NamedTuple):
    """A row of a data set's file. The first line, or row of a Parquet file, is 1."""

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
    source: Row | None
    state: State
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
class GroupEvent:
    """One thing that happened to a group. `version` is of an event of the whole run, to whose groups a rewind or restore happened."""

    time: float
    what: What
    index: int | None = None
    replica: str | None = None
    attempt: int | None = None
    step: int | None = None
    version: int | None = None
    timeline: str | None = None
    reward: float | None = None
    build: str | None = None
    cause: str | None = None
    reason: str | None = None
    tokens: int | None = None
    oldest: int | None = None
    newest: int | None = None


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
    """Which groups to find. `text` is a part of the prompt or expected answer (in any case), or a whole id. The file of `row`
    is a path, or the end of one. `reason` is a part of the reason."""

    text: str = ""
    states: Collection[str] = ()
    lane: Lane | None = None
    environment: str | None = None
    task: str | None = None
    step: int | None = None
    reason: str = ""
    replica: str | None = None
    build: str | None = None
    row: Row | None = None
    sort: str = "order"
    offset: int = 0
    limit: int = 100


class GroupHistory:
    """The groups of the run whose files are in `folder`. Every method raises `ConfigError` without pyarrow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def damaged(self) -> list[str]:
        """What is wrong with each file that can't be read, and the remedy. All else can be read."""
        raise NotImplementedError

    def find(self, query: GroupQuery) -> tuple[int, list[GroupSummary]]:
        """Return how many groups there are, and those from `offset` on."""
        raise NotImplementedError

    def story(self, group: str) -> GroupStory | None:
        """Return what happened to a group; None if it isn't known."""
        raise NotImplementedError

    def states(self, query: GroupQuery | None = None) -> dict[str, int]:
        """Return the number of groups by state, of those that `query` finds whatever its states are."""
        raise NotImplementedError

    def lost(self) -> int:
        """Return how many events were cut off the buffer's stream before the trainer read them."""
        raise NotImplementedError


def parse_row(text: str) -> Row | None:
    """Return the row that `FILE:LINE` names; None if the text has another form."""
    file, _, line = text.rpartition(":")
    return Row(file, int(line)) if file and line.isdecimal() and line.isascii() else None
