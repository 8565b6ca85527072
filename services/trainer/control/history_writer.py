"""Writes what became of every group to the run's folder (`headrace.run.group_files`), from the buffer's stream `history`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import CodecError, HeadraceError
from headrace.net import tracing
from headrace.records.group_event import GroupEvent
from headrace.records.trajectory import Lane
from headrace.replay import BufferRetry, ReplayClient
from headrace.replay.history import expand_entry
from headrace.run.group_files import (
    PROMPT_CHARACTERS,
    cannot_write,
    iterate_events,
    list_files,
    merge_files,
    write_file,
)
from headrace.run.samples import find_expected, write_prompt

from ..data.sources import Problem
from .group_spans import FIELDS, GroupSpans

log = logging.getLogger(__name__)

PERIOD_S = 5.0
# Entries in one file. As many are read and turned into rows in about 0.1 s, in a thread.
ENTRIES = 10_000
_PROMPT = ("epoch", "environment", "task", "prompt", "messages", "expected", "file", "line")
# `Prompts.find`
FindProblem = Callable[[Lane, int], tuple[Problem, int | None] | None]


class HistoryWriter:
    """The only writer of a run's files of groups. Entries are cleared from the buffer only when they are safely on disk, so a kill at any
    moment loses none; at worst a few are written twice.

    The prompt of a group is written with the event that it was enqueued. It follows from the order of prompts, so that of a group which an
    earlier trainer enqueued is the same.
    """

    def __init__(
        self, folder: Path, replay: ReplayClient, retry: BufferRetry, timeline: str, find: FindProblem
    ) -> None:
        self._folder = folder
        self._replay = replay
        self._retry = retry
        self._timeline = timeline
        self._find = find
        self._lost = 0  # as written last
        self._spans: GroupSpans | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._writing = asyncio.Lock()

    def start(self) -> None:
        """From now on, write what there is every few seconds."""
        self._task = asyncio.create_task(self._run())

    def poll(self) -> None:
        """Raise the error that ended the writing, if one has: `ServiceError` if the disk is full."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Write the rest. What can't be written stays in the buffer for the next trainer."""
        if self._task is None:
            return
        self._closing.set()
        # not cancelled: a thread may be writing
        await asyncio.wait([self._task])
        try:
            self._task.result()
            await self.write_all()
        except HeadraceError as error:
            log.warning("the newest events of groups stay in the buffer until the next start: %s", error)

    async def _run(self) -> None:
        while not self._closing.is_set():
            while await self._retry(self._write_some) and not self._closing.is_set():
                pass
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._closing.wait()

    async def write_all(self) -> None:
        """Write what there is now. Raises what calls of the buffer raise, and `ServiceError` if the disk is full."""
        while await self._write_some():
            pass

    async def _write_some(self) -> bool:
        """Write the oldest entries. Returns whether there may be more."""
        async with self._writing:
            entries, lost = await self._replay.read_history(ENTRIES)
            if not entries:
                return False
            await asyncio.to_thread(self._write, entries, lost)
            await self._replay.clear_history(self._timeline, entries[-1][0])
            self._lost = lost
            await asyncio.to_thread(self._merge)
            return len(entries) == ENTRIES

    def _write(self, entries: Sequence[tuple[str, Mapping[bytes, bytes]]], lost: int) -> None:
        rows = [row for entry, fields in entries for row in expand_entry(entry, fields)]
        if lost != self._lost:
            rows.append(GroupEvent(rows[-1].id, rows[-1].part + 1, "lost", lost=lost))
        ended = list(self._end_spans(rows)) if tracing.is_on() else []
        try:
            write_file(self._folder, to_columns(rows, self._find))
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        for span in ended:
            tracing.emit(span)

    def _end_spans(self, rows: Iterable[GroupEvent]) -> Iterator[tracing.EndedSpan]:
        """Yield the spans that end with these events."""
        if self._spans is None:
            self._spans = GroupSpans(self._replay.run_id)
            for row in _read_events(self._folder):  # an earlier trainer exported what ended there
                self._spans.note(row)
        for row in rows:
            yield from self._spans.note(row)

    def _merge(self) -> None:
        try:
            while merge_files(self._folder):
                pass
        except CodecError as error:
            log.warning("files of groups are not merged: %s", error)
        except OSError as error:
            raise cannot_write(self._folder, error) from error


def _read_events(folder: Path) -> Iterator[GroupEvent]:
    """Yield the events in the folder's files, as far as spans need them."""
    for file in list_files(folder):
        try:
            yield from iterate_events(file.path, FIELDS)
        except CodecError as error:
            log.warning("traces lack what came before: %s", error)


def to_columns(rows: Sequence[GroupEvent], find: FindProblem) -> dict[str, Sequence[Any]]:
    """Return the columns of these events, with the prompts of groups that were enqueued."""
    columns: dict[str, Sequence[Any]] = dict(zip(GroupEvent._fields, zip(*rows, strict=True), strict=True))
    columns["time"] = [row.cursor[0] for row in rows]
    told = [dict(_read_prompt(row, find)) if row.what == "enqueued" else {} for row in rows]
    return columns | {name: [each.get(name) for each in told] for name in _PROMPT}


def _read_prompt(row: GroupEvent, find: FindProblem) -> Iterator[tuple[str, Any]]:
    yield "environment", row.environment
    found = find("validation" if row.lane == "validation" else "train", row.order or 0)
    if found is None:
        return  # of a data set that has become shorter since
    problem, epoch = found
    yield "epoch", epoch
    yield "task", problem.task_name
    yield "prompt", write_prompt(problem.messages)[:PROMPT_CHARACTERS]
    messages = json.dumps(problem.messages, ensure_ascii=False, default=repr)
    yield "messages", messages if len(messages) <= PROMPT_CHARACTERS else None
    expected = find_expected(problem.extra_env_info)
    yield "expected", None if expected is None else expected[:PROMPT_CHARACTERS]
    if problem.row is not None:
        yield "file", problem.row[0]
        yield "line", problem.row[1]
