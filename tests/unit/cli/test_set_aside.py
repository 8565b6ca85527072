"""A damaged checkpoint that a trainer set aside, and one that does not reach the store, are shown where people look: by `headrace up` and
`headrace status`."""

from __future__ import annotations

import io
from pathlib import Path

from headrace.run.checkpoints import DAMAGE
from headrace.run.object_store import StoreStatus, write_status
from tests.support.command import said
from tests.support.idle_pipeline import idle_pipeline
from tests.support.past_run import past_run

PROBLEM = "checkpoint 6 is not in s3://b/r"
WHY = "model.safetensors is not what was written"


def set_aside(checkpoints: Path, version: int) -> Path:
    folder = checkpoints / f"damaged-step_{version}-t2"
    folder.mkdir(parents=True)
    (folder / DAMAGE).write_text(WHY)
    return folder


def test_up_says_once_what_was_set_aside_since_it_started(tmp_path: Path) -> None:
    checkpoints = tmp_path / "r" / "checkpoints"
    set_aside(checkpoints, 2)
    printed = io.StringIO()
    with idle_pipeline(tmp_path, printed) as pipeline:
        aside = set_aside(checkpoints, 6)
        write_status(checkpoints, StoreStatus("s3://b/r", 2, PROBLEM))
        for _ in range(2):
            pipeline._say_of_checkpoints()
    damaged, not_stored = printed.getvalue().splitlines()
    assert WHY in damaged
    assert str(aside) in damaged
    assert not_stored == PROBLEM


def test_status_shows_what_was_set_aside(tmp_path: Path) -> None:
    run = past_run(tmp_path, "adder", 4)
    set_aside(run / "checkpoints", 10)
    set_aside(run / "checkpoints", 6)
    write_status(run / "checkpoints", StoreStatus("s3://b/r", 2, PROBLEM))
    status = said("status", "--run", run).splitlines()
    lines = [line for line in status if line.startswith("set aside")]
    assert [line.split()[3] for line in lines] == ["6", "10"]
    assert all(WHY in line for line in lines)
    assert [line.split(maxsplit=1)[1] for line in status if line.startswith("store")] == [PROBLEM]
