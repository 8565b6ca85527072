"""The journal of metrics: what of it survives rewinds, kills and damage, and the curve that is drawn of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ServiceError
from headrace.run import journal as journal_module
from headrace.run.journal import Journal, Line, read_bytes, read_journal, size, surviving
from headrace_services.trainer.telemetry.plots import draw_curve


def line(kind: str, step: int, timeline: str = "a") -> Line:
    return Line(kind, step, timeline, 0.0, {"reward": 0.5, "accuracy": 0.25})  # type: ignore[arg-type]


def test_lines_of_abandoned_steps_are_superseded() -> None:
    first = [line("validation", 0), line("train", 0), line("train", 1), line("validation", 2), line("train", 2)]
    again = [line("rewind", 2, "b"), line("train", 2, "b"), line("validation", 3, "b")]
    kept = surviving([*first, *again])
    assert [(k.kind, k.step, k.timeline) for k in kept] == [
        ("validation", 0, "a"),
        ("train", 0, "a"),
        ("train", 1, "a"),
        ("validation", 2, "a"),
        ("train", 2, "b"),
        ("validation", 3, "b"),
    ]


def test_half_a_line_of_a_killed_trainer_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    Journal(path).append("train", 0, "a", {"reward": 1.0})
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    journal = Journal(path)
    journal.append("train", 1, "a", {"reward": 2.0})
    assert [(entry.step, entry.metrics) for entry in journal.read()] == [(0, {"reward": 1.0}), (1, {"reward": 2.0})]


def test_a_line_names_builds_where_there_are_any(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append("train", 0, "a", {}, builds={"exact": ["1", "2"]})
    journal.append("validation", 1, "a", {})
    assert [entry.builds for entry in journal.read()] == [{"exact": ["1", "2"]}, {}]
    assert "builds" not in journal.path.read_text().splitlines()[1]


@pytest.mark.parametrize("text", ["nonsense", json.dumps({"kind": "train"}), "[]"])
def test_a_line_that_is_not_metrics_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    with pytest.raises(ServiceError, match=r"metrics\.jsonl:1:"):
        Journal(tmp_path / "metrics.jsonl").read()


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_the_curve_is_a_picture_however_long_the_run(tmp_path: Path, steps: int) -> None:
    lines = [line(kind, step) for step in range(steps) for kind in ("train", "validation")]
    draw_curve(lines, tmp_path / "curve.png", "a run")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


@given(limit=st.integers(1, 400), steps=st.integers(0, 12), offset=st.integers(0, 2000))
def test_segments_are_read_through_as_one(limit: int, steps: int, offset: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        for step in range(steps):  # each line by a trainer of its own
            Journal(path, limit).append("train", step, "a", {"reward": step / 2})
        assert [entry.step for entry in read_journal(path)] == list(range(steps))
        whole = b"".join(part.read_bytes() for part in sorted(Path(folder).iterdir()))
        assert (size(path), read_bytes(path, offset)) == (len(whole), whole[offset:])
        full = [part.stat().st_size for part in Path(folder).glob("metrics.0*.jsonl")]
        assert all(nbytes >= limit for nbytes in full)


def test_a_new_segment_takes_no_others_place(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    for step in range(4):
        journal.append("train", step, "a", {})
    (tmp_path / "metrics.000001.jsonl").unlink()  # by a user who needs the space
    journal.append("train", 4, "a", {})
    assert [entry.step for entry in journal.read()] == [1, 2, 3, 4]


def test_a_journal_renamed_while_it_is_read_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, 1)
    for step in range(3):
        journal.append("train", step, "a", {})
    listed = journal_module._older

    def meanwhile(of: Path) -> list[Path]:
        monkeypatch.setattr(journal_module, "_older", listed)
        journal.append("train", 3, "a", {})
        return listed(of)

    monkeypatch.setattr(journal_module, "_older", meanwhile)
    assert [entry.step for entry in read_journal(path)] == [0, 1, 2]
    assert [entry.step for entry in read_journal(path)] == [0, 1, 2, 3]


def test_what_a_superseded_trainer_adds_late_is_abandoned() -> None:
    lines = [
        Line("train", 0, "a", 0.0, {}),
        Line("rewind", 1, "b", 0.0, {}),
        Line("train", 1, "a", 0.0, {}),
        Line("train", 1, "b", 0.0, {}),
    ]
    assert [(entry.step, entry.timeline) for entry in surviving(lines)] == [(0, "a"), (1, "b")]
