"""The lineage of trajectories: which replica wrote which tokens under which weights, which environment scored them, and which step trained
on them.

The buffer has the lineage of waiting groups. That of trained groups is in one gzip file per step (`step_12-<timeline>.jsonl.gz`, in the
folder `lineage` beside the checkpoints): a line that names the step and its groups, then a line for each group. So `zcat` reads it, and the
first lines suffice to find a group. The folder has the history of the newest weights; a rewind moves the files of abandoned steps to the
subfolder `abandoned`.

Weights are named (timeline, version): step v - 1 made version v > 0, on the timeline of that step in the history that the weights descend
from. Version 0 is the initial model and has no timeline.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from headrace.base.errors import CodecError
from headrace.base.files import UNREADABLE
from headrace.records.origin import GroupLineage
from headrace.run.checkpoints import find_timeline as made_on
from headrace.run.checkpoints import read_chain

SCHEMA: Literal[1] = 1
FOLDER, ABANDONED = "lineage", "abandoned"

# step and timeline
NAME = re.compile(r"step_(0|[1-9][0-9]*)-([A-Za-z0-9_-]+)\.jsonl\.gz")


class Header(msgspec.Struct):
    """The first line of a file; the other lines are `GroupLineage`."""

    schema: Literal[1]
    step: int
    timeline: str
    time: float
    groups: tuple[str, ...]


class LineageFiles:
    """The lineage files of one run, for readers; the trainer may be writing them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_files(self) -> list[tuple[int, str, Path]]:
        """Return every file in the folder as (step, timeline, path). A step has a second file if a trainer wrote it after its successor had
        started."""
        if not self.folder.is_dir():
            return []
        matches = ((NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted((int(match[1]), match[2], path) for match, path in matches if match)

    def files(self) -> list[tuple[int, Path]]:
        """Return the steps that the newest weights descend from, in order, with their files. Raises as
        `headrace.run.checkpoints.read_chain` does."""
        by_step: dict[int, dict[str, Path]] = {}
        for step, timeline, path in self.list_files():
            by_step.setdefault(step, {})[timeline] = path
        twice = [step for step, of_step in by_step.items() if len(of_step) > 1]
        starts = read_chain(self.folder.parent) if twice else []
        for step in twice:
            of_step, timeline = by_step[step], made_on(starts, step + 1) or ""
            by_step[step] = {timeline: of_step[timeline]} if timeline in of_step else of_step
        return [(step, path) for step, of_step in by_step.items() for path in of_step.values()]

    def timelines(self) -> list[tuple[int, str]]:
        """Return (step, timeline) wherever the timeline changes, in order: that step and the following ones ran on that timeline."""
        changes: list[tuple[int, str]] = []
        for step, path in self.files():
            match = NAME.fullmatch(path.name)
            if match and (not changes or changes[-1][1] != match[2]):
                changes.append((step, match[2]))
        return changes

    def find(self, group_id: str) -> GroupLineage | None:
        """Return the group if the newest weights descend from a step that trained on it. The newest steps are searched first.

        Raises `CodecError` for a file that can't be read.
        """
        for _, path in reversed(self.files()):
            groups = _read(path, lambda header: group_id in header.groups)
            for group in groups:
                if group.group == group_id:
                    return group
        return None

    def read(self, step: int) -> list[GroupLineage]:
        """Return the groups of one step, in the order in which they were trained; none if the step has no file. Raises `CodecError`."""
        return [group for number, path in self.files() if number == step for group in _read(path)]


def find_timeline(changes: Sequence[tuple[int, str]], version: int) -> str | None:
    """Return the timeline that made weights `version`, given `LineageFiles.timelines`; None for the initial model, and for steps older than
    the first file."""
    return next((timeline for step, timeline in reversed(changes) if step < version), None)


def _read(path: Path, wanted: Callable[[Header], bool] = lambda header: True) -> Iterator[GroupLineage]:
    """Yield the groups of a file if its first line is `wanted`."""
    try:
        with gzip.open(path, "rb") as file:
            if wanted(msgspec.json.decode(file.readline(), type=Header)):
                for line in file:
                    yield msgspec.json.decode(line, type=GroupLineage)
    except FileNotFoundError:
        return  # a rewind has moved it meanwhile
    except UNREADABLE as error:
        raise CodecError(f"{path}: not a lineage file of schema {SCHEMA} ({error}); move it away") from error
