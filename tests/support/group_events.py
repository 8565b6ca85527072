"""Files of group events, as a trainer writes them from the buffer's stream."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headrace.records.group_event import GroupEvent
from headrace.records.trajectory import Lane
from headrace.run.group_files import write_file
from headrace_services.trainer.control.history_writer import to_columns
from headrace_services.trainer.data.sources import Problem


def find_sum(lane: Lane, order: int) -> tuple[Problem, int | None]:
    """Problem `order` is the sum of it and 1, in line `order` + 1 of a file."""
    messages = ({"role": "user", "content": f"what is {order}+1?"},)
    info = {"answer": f"sum {order + 1}"}
    return Problem(order, messages, info, "math", "addition", row=("/data/sums.jsonl", order + 1)), 0


def events(*told: tuple[str, str | None, dict[str, object]], start: int = 1_000, step: int = 1) -> list[GroupEvent]:
    """Events in their order, a millisecond apart: what, group and fields of each."""
    return [
        GroupEvent(f"{start + i * step}-0", 0, what, group, **fields)  # type: ignore[arg-type]
        for i, (what, group, fields) in enumerate(told)
    ]


def life(
    group: str, order: int, *end: tuple[str, dict[str, object]], rewards: tuple[float, ...] = (0.0, 1.0)
) -> list[tuple[str, str | None, dict[str, object]]]:
    """A group from the queue to its scores, and then to this end."""
    n = len(rewards)
    told: list[tuple[str, str | None, dict[str, object]]] = [
        ("enqueued", group, {"lane": "train", "order": order, "environment": "math", "n": n}),
        ("leased", group, {"replica": "r1", "attempt": 1, "version": 3}),
    ]
    told += [("pushed", group, {"index": i, "tokens": 4 + i, "oldest": 3, "newest": 4}) for i in range(n)]
    told.append(("scoring", group, {}))
    told += [("scored", group, {"index": i, "reward": reward, "build": "b1"}) for i, reward in enumerate(rewards)]
    return told + [(what, group, fields) for what, fields in end]


def write(folder: Path, rows: Iterable[GroupEvent]) -> Path:
    return write_file(folder, to_columns(list(rows), find_sum))
