"""The stream `history`: what happened to every group, until the trainer has written it to the run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from headrace.records.group_event import GroupEvent, What

# Field of an entry (`tell` in _run.lua) -> field of a row.
_TEXTS = {"r": "replica", "t": "timeline", "b": "build", "c": "cause", "m": "reason", "l": "lane", "e": "environment"}
_NUMBERS = {"a": "attempt", "i": "index", "s": "step", "v": "version", "o": "order", "n": "n"}


def expand_entry(entry: str, fields: Mapping[bytes, bytes]) -> Iterator[GroupEvent]:
    """Yield a row for each group, or for each trajectory, of an entry."""
    values = {name.decode(): value.decode() for name, value in fields.items()}
    shared: dict[str, str | int] = {name: values[field] for field, name in _TEXTS.items() if field in values}
    shared |= {name: int(values[field]) for field, name in _NUMBERS.items() if field in values}
    first = GroupEvent(entry, 0, cast(What, values["w"]), **shared)  # type: ignore[arg-type]
    groups: Sequence[str | None] = values["g"].split("\n") if values["g"] else [None]
    for part, group in enumerate(groups):
        row = first._replace(part=part, group=group)
        if "p" not in values:
            yield row
            continue
        # an entry with trajectories is of one group
        for number, trajectory in enumerate(values["p"].split(",")):
            index, *of_it = trajectory.split(" ")
            if first.what == "scored":
                yield row._replace(part=number, index=int(index), reward=float(of_it[0]))
            else:
                tokens, oldest, newest = map(int, of_it)
                yield row._replace(part=number, index=int(index), tokens=tokens, oldest=oldest, newest=newest)
