"""What became of every group of a run: finds groups by text, row of a data set, state and more, and tells the story of one.

The trainer writes the events of groups to Parquet files (`headrace.run.group_files`), from which this module keeps an SQLite index, in the
folder of the files, or in the user's cache folder if that can't be written. Every call first reads what was written since the last: of a
run of a million groups for minutes, once, and what was read so far can be asked for meanwhile. Several processes may use one index. It can
be deleted at any time.

Rewards, tokens and versions of a group are those of its newest attempt. A group that was trained, and is trained again after a rewind, is
shown in its newest state; its story has all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headrace.base.errors import ConfigError
from headrace.run.group_files import import_parquet, list_files
from headrace.run.group_index import GroupIndex
from headrace.run.group_query import GroupQuery, GroupStory, GroupSummary

T = TypeVar("T")

INDEX = ".index.sqlite"


class GroupHistory:
    """The groups of the run whose files are in `folder`, or with `is_partial` those of them that the index has. Every method raises
    `ConfigError` without pyarrow, and for an index that can't be written anywhere."""

    def __init__(self, folder: Path, is_partial: bool = False) -> None:
        self.folder = folder
        self._is_partial = is_partial

    def refresh(self) -> None:
        """Bring the index up to date."""
        self._ask(lambda _: None)

    def missing(self) -> tuple[int, float]:
        """Return the bytes of the files that the index doesn't have, and the share of all bytes that it has. They are not read."""
        return GroupHistory(self.folder, is_partial=True)._ask(lambda index: index.missing())

    @property
    def damaged(self) -> list[str]:
        """What is wrong with each file that can't be read, and the remedy. All else can be read."""
        present = {file.name for file in list_files(self.folder)}
        return self._ask(lambda index: [damage for name, damage in index.damaged() if name in present])

    def find(self, query: GroupQuery) -> tuple[int, list[GroupSummary]]:
        """Return how many groups there are, and those from `offset` on."""
        return self._ask(lambda index: index.find(query))

    def has_more_texts(self, query: GroupQuery) -> bool:
        """Whether more prompts contain the text of a query than it looks at."""
        return self._ask(lambda index: index.has_more_texts(query))

    def story(self, group: str) -> GroupStory | None:
        """Return what happened to a group; None if it isn't known."""
        return self._ask(lambda index: index.story(group))

    def states(self, query: GroupQuery | None = None) -> dict[str, int]:
        """Return the number of groups by state, of those that `query` finds whatever its states are."""
        return self._ask(lambda index: index.states(query or GroupQuery()))

    def lost(self) -> int:
        """Return how many events were cut off the buffer's stream before the trainer read them."""
        return self._ask(lambda index: index.lost)

    def _ask(self, question: Callable[[GroupIndex], T]) -> T:
        """Return the answer of the index, which is brought up to date first. One that is damaged, or of another schema, is built anew."""
        import_parquet()
        for path in (self.folder / INDEX, _in_cache(self.folder)):
            if self._is_partial and path.parent == self.folder and not _can_write(path):
                continue  # it may be old, and is not the one that is brought up to date
            for attempt in (1, 2):
                try:
                    with contextlib.closing(GroupIndex(path, self.folder)) as index:
                        if not self._is_partial:
                            index.refresh()
                        return question(index)
                except (sqlite3.OperationalError, OSError) as error:
                    if path.parent == self.folder and _is_refused(error):
                        break  # the cache folder may do
                    raise ConfigError(f"{path}: the index of groups can't be used ({error}); {_REMEDY}") from error
                except sqlite3.DatabaseError as error:
                    if attempt == 2:
                        raise ConfigError(f"{path}: the index of groups can't be used ({error}); {_REMEDY}") from error
                    path.unlink(missing_ok=True)
        raise AssertionError("the cache folder answers or raises")


_REMEDY = "delete it, free space there, or name a folder that you may write to in XDG_CACHE_HOME"


def _is_refused(error: Exception) -> bool:
    """Whether a folder can't be written or doesn't exist."""
    return isinstance(error, OSError) or any(
        words in str(error) for words in ("readonly", "unable to open", "disk I/O error", "locking protocol")
    )


def _can_write(path: Path) -> bool:
    return os.access(path if path.exists() else path.parent, os.W_OK)


def _in_cache(folder: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return cache / f"groups-{name}.sqlite"
