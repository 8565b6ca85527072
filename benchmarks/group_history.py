"""Finding a group among all groups of a long run: in the index, and by reading the Parquet files.

    python -m benchmarks.group_history [--groups 1000000] [--folder FOLDER]

The files are those of a trainer that wrote 2,000 groups at a time and merged 64 files at a time; each group was enqueued, leased, pushed,
scored and trained, with two trajectories, and each of 100,000 problems came up in every epoch. An existing folder is used as it is. Times
are the medians of five calls of `GroupHistory`, each of which opens the index and looks for new files.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from bisect import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from headrace.records.group_event import GroupEvent
from headrace.records.trajectory import Lane
from headrace.run.group_files import list_files, merge_files, read_file, write_file
from headrace.run.group_history import INDEX, GroupHistory
from headrace.run.group_query import DataRow, GroupQuery
from headrace_services.trainer.control.history_writer import to_columns
from headrace_services.trainer.data.sources import Problem

PROBLEMS, FILE, AT_ONCE = 100_000, "/data/problems.jsonl", 2_000


def find_question(lane: Lane, order: int) -> tuple[Problem, int | None]:
    index = order % PROBLEMS
    number = index * 7919 % 1_000_003
    question = f"Question {number}: a train leaves at {number % 24}:{number % 60:02} and travels {number} km. How long does it take?"
    message = {"role": "user", "content": question}
    problem = Problem(index, (message,), {"answer": str(number)}, "math", "trains", row=(FILE, index + 1))
    return problem, order // PROBLEMS


def events_of(order: int, ms: int) -> list[GroupEvent]:
    """Return the events of a group that was enqueued at this time."""
    group, generation = f"e{order // PROBLEMS}-train-{order % PROBLEMS}", 1_000 + order * 7919 % 9_000
    told: list[tuple[int, str, dict[str, object]]] = [
        (0, "enqueued", {"lane": "train", "order": order, "n": 2, "environment": "math"}),
        (100, "leased", {"replica": f"r{order % 8}", "attempt": 1, "version": order // 64}),
        (generation // 2, "pushed", {"index": 0, "tokens": order % 500, "oldest": order // 64, "newest": order // 64}),
        (generation, "pushed", {"index": 1, "tokens": order % 700, "oldest": order // 64, "newest": order // 64}),
        (generation, "scoring", {}),
        (generation + 300, "scored", {"index": 0, "reward": order % 3 / 2, "build": "b1"}),
        (generation + 400, "scored", {"index": 1, "reward": order % 5 / 4, "build": "b1"}),
    ]
    if order % 1000 == 7:
        told.append((generation + 500, "failed", {"reason": "KeyError"}))
    else:
        step: dict[str, object] = {"step": order // 64 + 1}
        told += [(generation + 500, "ready", {}), (12_000, "reserved", step), (14_000, "trained", step)]
    # several groups are told of in a millisecond: the number of an entry tells them apart
    return [
        GroupEvent(f"{ms + later}-{order * 16 + i}", 0, what, group, **fields)  # type: ignore[arg-type]
        for i, (later, what, fields) in enumerate(told)
    ]


def make(folder: Path, groups: int, first_ms: int = 1_764_000_000_000, ms_per_group: int = 10) -> None:
    """Write the files. Groups are enqueued one after the other, and generated side by side."""
    waiting: list[GroupEvent] = []
    for start in range(0, groups, AT_ONCE):
        end = min(groups, start + AT_ONCE)
        waiting += [event for order in range(start, end) for event in events_of(order, first_ms + order * ms_per_group)]
        waiting.sort(key=lambda event: event.cursor)
        until = (first_ms + end * ms_per_group, 0)
        count = bisect(waiting, until, key=lambda event: event.cursor) if end < groups else len(waiting)
        write_file(folder, to_columns(waiting[:count], find_question))
        merge_files(folder)
        del waiting[:count]


def median(call: Callable[[], object]) -> float:
    took = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main(groups: int, folder: Path) -> None:
    console, history = Console(), GroupHistory(folder)
    began = time.perf_counter()
    if not list_files(folder):
        make(folder, groups)
        console.print(f"{groups} groups were written in {time.perf_counter() - began:.1f} s")
    files = list_files(folder)
    (folder / INDEX).unlink(missing_ok=True)
    began = time.perf_counter()
    states = history.states()
    took = time.perf_counter() - began
    size, indexed = (
        sum(path.stat().st_size for path in paths) / 2**20 for paths in ([f.path for f in files], [folder / INDEX])
    )
    console.print(f"{len(files)} files, {size:.0f} MiB; the index, {indexed:.0f} MiB, took {took:.1f} s: {states}")
    order = groups * 2 // 3
    wanted = f"e{order // PROBLEMS}-train-{order % PROBLEMS}"
    number = order % PROBLEMS * 7919 % 1_000_003
    table = Table("question", "groups", "index, ms", "scan of the files, ms")
    for name, query, of_scan in (
        ("id", GroupQuery(text=wanted), ("group", pc.equal, wanted)),
        (
            "text of one prompt",
            GroupQuery(text=f"uestion {number}: a tr"),
            ("prompt", pc.match_substring, f"uestion {number}: a tr"),
        ),
        (
            "row of a data set",
            GroupQuery(row=DataRow("problems.jsonl", order % PROBLEMS + 1)),
            ("line", pc.equal, order % PROBLEMS + 1),
        ),
        ("failed, newest first", GroupQuery(states=["failed"], sort="-ended"), None),
        ("lowest reward", GroupQuery(sort="reward"), None),
        ("text of every prompt", GroupQuery(text="a train leaves"), None),
    ):
        scanned = f"{1000 * scan(folder, *of_scan):.1f}" if of_scan else "-"
        found = history.find(query)[0]
        table.add_row(name, str(found), f"{1000 * median(lambda query=query: history.find(query)):.1f}", scanned)  # type: ignore[misc]
    table.add_row("the story of one", "1", f"{1000 * median(lambda: history.story(wanted)):.1f}", "-")
    table.add_row("counts by state", str(sum(states.values())), f"{1000 * median(history.states):.1f}", "-")
    console.print(table)


def scan(folder: Path, column: str, how: Callable[[Any, Any], Any], value: object) -> float:
    """Return how long it takes to read the column of every file, and to compare it."""
    began = time.perf_counter()
    for file in list_files(folder):
        pc.sum(how(read_file(file.path, [column]).column(column), value))
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.folder is not None:
        main(given.groups, given.folder)
    else:
        made = Path(tempfile.mkdtemp())
        try:
            main(given.groups, made)
        finally:
            shutil.rmtree(made)
