"""`headrace runs`, `headrace runs compare`, and `headrace status` of a run that is down: from its folder alone."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.cli.run_list import SHOWN_STEPS
from headrace.run.history import recorded
from headrace.run.journal import JOURNAL
from tests.support.command import refused, said
from tests.support.past_run import Stopped, past_run

HOSTILE = "\x1b]0;mine\x07[bold]<script>'\u202e"
SHOWN = "\\x1b]0;mine\\x07[bold]<script>'\\u202e"


def test_runs_are_listed_with_how_they_stand_and_why(tmp_path: Path) -> None:
    assert "holds no run" in refused("runs", "--dir", tmp_path)
    past_run(tmp_path, "adder", 4)
    past_run(tmp_path, "first", 2).rename(tmp_path / "renamed")
    failed = past_run(tmp_path, "broken", 0)
    with pytest.raises(ValueError, match="trainer"), recorded(failed, Stopped):
        raise ValueError(f"the trainer can't continue; its log:\n  line\n  error: {HOSTILE}")
    (past_run(tmp_path, "damaged", 1) / JOURNAL).write_text("{}\n")
    rows = {line.split()[0]: line for line in said("runs", "--dir", tmp_path).splitlines()}
    assert rows["adder"].split()[1] == "finished"
    assert "4 of 1000000" in rows["adder"]
    assert "val:accuracy 0.5 at step 4" in rows["adder"]
    assert "2 of 1000000" in rows["renamed"]
    assert "failed" in rows["broken"]
    assert f"error: {SHOWN}" in rows["broken:"]
    assert "unreadable" in rows["damaged"]
    assert "not a line of metrics" in rows["damaged:"]


def test_two_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    past_run(tmp_path, "old", 40, replay="{redis_url: 'redis://me:secret@10.0.0.1:6379/0'}")
    past_run(tmp_path, "new", 30, 0.25, grpo="{seed: 7}", trainer="{port: 1234}")
    text = said("runs", "compare", "old", "new")
    rows = [line.split() for line in text.splitlines()]
    assert ["step", "train:reward", "old", "train:reward", "new", "val:accuracy", "old", "val:accuracy", "new"] in rows
    assert ["0", "0", "0.25", "-", "-"] in rows
    assert ["29", "0.29", "0.54", "-", "-"] in rows, "the last step that both have"
    assert len([row for row in rows if row and row[0].isdecimal() and len(row) == 5]) == SHOWN_STEPS
    assert ["time", "of", "the", "steps", "1", "min", "0", "s", "0", "min", "45", "s"] in rows
    assert "grpo.seed: 42 -> 7" in text
    assert "redis_url: 'redis://me:***@10.0.0.1:6379/0' -> null" in text
    assert "secret" not in text
    assert not any(own in text for own in ("run.id", "trainer.port"))
    assert "train:reward" not in said("runs", "compare", "old", "new", "--metric", "accuracy")
    assert "--metric val:nothing" in refused("runs", "compare", "old", "new", "--metric", "val:nothing")
    assert "are the same run" in refused("runs", "compare", "old", "old")
    assert "is not a run" in refused("runs", "compare", "old", "third")


def test_the_page_of_a_comparison_has_both_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    past_run(tmp_path, "old", 4, more={HOSTILE: 1.0})
    past_run(tmp_path, "new", 4, 0.25)
    page = tmp_path / "both.html"
    assert f"curves: {page}" in said("runs", "compare", "old", "new", "--html", page)
    drawn = page.read_text()
    ElementTree.fromstring(drawn.partition(">")[2].replace('<meta charset="utf-8">', ""))
    assert drawn.count("<title>step 3: ") == 3 * 2, "rewards, times and KL penalties of both"
    assert "old <b>0.03</b>" in drawn
    assert "new <b>0.28</b>" in drawn
    said("runs", "compare", "old", "new", "--metric", HOSTILE, "--html", page)
    drawn = page.read_text()
    assert "<script>" not in drawn
    assert "&lt;script&gt;" in drawn
    assert "--html" in refused("runs", "compare", "old", "new", "--html", tmp_path / "no" / "both.html")


def test_the_status_of_a_run_that_is_down_comes_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = past_run(tmp_path, "adder", 4, replay="{redis_port: 1}")
    with pytest.raises(ValueError, match="out"), recorded(folder, Stopped):
        raise ValueError(f"out of {HOSTILE}")
    for args in ((folder,), ("--run", folder)):
        text = said("status", *args)
        for part in (
            "state         failed since",
            f"reason        out of {SHOWN}",
            "steps         4 of",
            "reward 0.030",
        ):
            assert part in text
        assert "best          val:accuracy 0.5 at step 4" in text
        assert f"headrace samples {folder}" in text
        assert f"headrace up {folder / 'config.yaml'}" in text
    assert "is not a run" in refused("status", tmp_path / "nothing")
    text = said("status", folder.rename(tmp_path / "first"))
    assert "run           first" in text
    assert "rename the folder to adder" in text
