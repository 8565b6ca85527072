"""The files of group events: what is written is read, and of a long run only what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.records.group_event import GroupEvent
from headrace.run import group_files
from headrace.run.group_files import COLUMNS, Coded, find_events, iterate_events, read_coded
from tests.support.group_events import events, life, write


def test_a_file_has_the_fields_of_an_event_and_its_time() -> None:
    assert set(COLUMNS) == {*GroupEvent._fields, "time"}


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    told = events(*life("a", 0, ("failed", {"reason": "KeyError"})), ("rewound", None, {"version": 3}))
    path = write(tmp_path, told)
    read = list(iterate_events(path, GroupEvent._fields))
    assert [event._replace(**dict.fromkeys(OF_PROMPT)) for event in read] == told
    assert read[0].prompt == "user: what is 0+1?"
    assert list(find_events(path, "a")) == read
    assert [event.what for event in find_events(path, "another")] == ["rewound"]
    some = list(iterate_events(path, ["id", "what"]))
    assert [(event.what, event.group) for event in some] == [(event.what, None) for event in told]


OF_PROMPT = ("epoch", "task", "prompt", "messages", "expected", "file", "line")


def test_only_the_parts_of_a_range_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_files, "_PART", 10)
    path = write(tmp_path, events(*[("leased", f"g{i}", {"replica": f"r{i % 3}", "attempt": i}) for i in range(100)]))
    parts = list(read_coded(path, ["time", "group", "replica", "attempt"], (1_025, 1_031)))
    assert [part.num_rows for part in parts] == [10, 10]
    columns = Coded(parts[::-1])
    assert columns.numbers("time").tolist() == list(range(1_020, 1_040))
    names, codes = columns.texts("group")
    assert [names[code] for code in codes] == [f"g{i}" for i in range(20, 40)]
    assert len(columns.texts("replica")[0]) == 3


def test_what_events_lack_is_told_apart_from_zero(tmp_path: Path) -> None:
    path = write(
        tmp_path, events(("lost", None, {"lost": 3}), ("scored", "g", {"index": 0, "reward": 0.0, "build": "b"}))
    )
    columns = Coded(list(read_coded(path, ["group", "index", "reward"], (0, 10_000))))
    assert columns.texts("group")[1].tolist() == [-1, 0]
    assert columns.numbers("index").tolist() == [-1, 0]
    assert str(columns.floats("reward").tolist()) == "[nan, 0.0]"
