"""The files of group events: what is written is read, and of a long run only what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.records.group_event import GroupEvent
from headrace.run import group_files
from headrace.run.group_files import COLUMNS, EventColumns, find_events, iterate_events
from tests.support.group_events import events, life, write


def test_a_file_has_the_fields_of_an_event_and_its_time() -> None:
    assert set(COLUMNS) == {*GroupEvent._fields, "time"}


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    told = events(*life("a", 0, ("failed", {"reason": "KeyError"})), ("rewound", None, {"version": 3}))
    path = write(tmp_path, told)
    read = list(iterate_events(path, GroupEvent._fields))
    assert [event._replace(**dict.fromkeys(OF_PROMPT)) for event in read] == told
    assert read[0].prompt == "user: what is 0+1?"
    assert list(find_events(path, "a", (0, 10_000))) == read
    assert [event.what for event in find_events(path, "another", (0, 10_000))] == ["rewound"]
    assert list(find_events(path, "a", (1_001, 1_003))) == read[1:4]
    some = list(iterate_events(path, ["id", "what"]))
    assert [(event.what, event.group) for event in some] == [(event.what, None) for event in told]


def test_a_deleted_run_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "run" / "groups", events(*life("a", 0)))
    assert not [*tmp_path.iterdir()]


OF_PROMPT = ("epoch", "task", "prompt", "messages", "expected", "file", "line")


def test_only_the_parts_of_a_range_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_files, "_PART", 10)
    told = [("leased", f"g{i}", {"replica": f"r{i % 3}", "attempt": i}) for i in range(100)]
    paths = [write(tmp_path, events(*told[:50])), write(tmp_path, events(*told[50:], start=1_050))]
    columns = EventColumns(["time", "group", "replica", "attempt"])
    assert [columns.read(path, (1_045, 1_051), 1_000) for path in paths[::-1]] == [True, True]
    assert columns.count == 20
    assert columns.numbers("time").tolist() == list(range(1_040, 1_060))
    assert columns.numbers("attempt").tolist() == list(range(40, 60))
    names, codes = columns.texts("group")
    assert [names[code] for code in codes] == [f"g{i}" for i in range(40, 60)]
    names, codes = columns.texts("replica")
    assert [names[code] for code in codes] == [f"r{i % 3}" for i in range(40, 60)]
    assert len(names) == 3


def test_of_too_many_events_the_newest_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_files, "_PART", 10)
    path = write(tmp_path, events(*[("leased", f"g{i}", {}) for i in range(100)]))
    columns = EventColumns(["time"])
    assert not columns.read(path, (0, 10_000), 25)
    assert columns.numbers("time").tolist() == list(range(1_070, 1_100))


def test_what_events_lack_is_told_apart_from_zero(tmp_path: Path) -> None:
    told = ("lost", None, {"lost": 3}), ("scored", "g", {"index": 0, "reward": 0.0, "build": "b"})
    columns = EventColumns(["group", "index", "reward"])
    columns.read(write(tmp_path, events(*told)), (0, 10_000), 10)
    names, codes = columns.texts("group")
    assert (names, codes.tolist()) == (["g"], [-1, 0])
    assert columns.numbers("index").tolist() == [-1, 0]
    assert str(columns.floats("reward").tolist()) == "[nan, 0.0]"
