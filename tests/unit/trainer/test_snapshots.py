"""Snapshots between checkpoints: which of them a trainer continues from, and what becomes of the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.config.services import CheckpointingConfig
from headrace.run import snapshots as snapshot_folder
from headrace.run.checkpoints import Start, append_start
from headrace_services.trainer.control.checkpoint import TRAINED, Checkpoints, CheckpointState, Ledger
from headrace_services.trainer.control.snapshots import Snapshots


def state(version: int, timeline: str = "a1") -> CheckpointState:
    return CheckpointState(version=version, timeline=timeline, cursor=2 * version, run_id="r")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """With one of version 4."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointingConfig(keep_top_k=None))
    checkpoints.start("a1", 0)
    (checkpoints.begin(4, "a1") / "weights").write_text("4")
    checkpoints.publish(state(4), {step: [f"g{step}"] for step in range(4)})
    return checkpoints


@pytest.fixture
def snapshots(tmp_path: Path, checkpoints: Checkpoints) -> Snapshots:
    (tmp_path / "memory").mkdir()
    return Snapshots(tmp_path / "memory", checkpoints)


def take(snapshots: Snapshots, version: int, timeline: str = "a1", first: int = 4) -> None:
    (snapshots.begin(version, timeline) / "weights").write_text(str(version))
    steps = {step: [f"g{step}"] for step in range(first, version)}
    snapshots.publish(state(version, timeline), steps, {TRAINED: Ledger(range(version)).encode()})


def left(snapshots: Snapshots) -> list[str]:
    return sorted(path.name for path in snapshots.folder.iterdir())


def test_the_newest_complete_one_becomes_a_checkpoint(snapshots: Snapshots, checkpoints: Checkpoints) -> None:
    take(snapshots, 5)
    take(snapshots, 6)
    assert left(snapshots) == ["step_6-a1"]
    (snapshots.begin(7, "a1") / "weights").write_text("half of it")
    assert left(snapshots) == [".unfinished-step_7-a1", "step_6-a1"]
    assert snapshots.adopt() == 6
    assert left(snapshots) == []
    assert checkpoints.newest() == 6
    assert checkpoints.state(6) == state(6)
    assert checkpoints.ledger(6) == {4: ["g4"], 5: ["g5"]}
    assert Ledger.decode(checkpoints.file(6, TRAINED)).last == 5
    assert (checkpoints.path(6) / "weights").read_text() == "6"
    assert (checkpoints.path(6) / "SHA256SUMS").exists()
    # law 4: the trainer that made it may have been frozen
    with pytest.raises(ServiceError, match="not the newest"):
        snapshots.begin(8, "a1")
    with pytest.raises(ServiceError, match="not the newest"):
        checkpoints.begin(8, "a1")
    checkpoints.start("b2", 6)
    take(snapshots, 7, "b2", first=6)
    assert snapshots.adopt() == 7
    assert checkpoints.find_published() == [4, 6, 7]


@pytest.mark.parametrize("cut", [4, 5])
def test_none_of_weights_that_a_rewind_abandoned(snapshots: Snapshots, checkpoints: Checkpoints, cut: int) -> None:
    take(snapshots, 6)
    append_start(snapshots.folder.parent / "checkpoints", Start("rewind-1", cut))
    assert snapshots.adopt() is None
    assert left(snapshots) == []
    assert checkpoints.newest() == 4


def test_none_that_does_not_continue_from_the_newest_checkpoint(snapshots: Snapshots, checkpoints: Checkpoints) -> None:
    take(snapshots, 6, first=3)
    assert snapshots.adopt() is None
    take(snapshots, 6)
    checkpoints.begin(8, "a1")
    checkpoints.publish(state(8), {step: [f"g{step}"] for step in range(4, 8)})
    assert snapshots.adopt() is None
    assert snapshots.adopt() is None, "nor if there is none"
    assert checkpoints.newest() == 8


def test_one_without_a_checkpoint_before_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointingConfig())
    checkpoints.start("a1", 0)
    (tmp_path / "memory").mkdir()
    snapshots = Snapshots(tmp_path / "memory", checkpoints)
    take(snapshots, 3, first=0)
    assert snapshots.adopt() == 3
    assert checkpoints.ledger(3) == {0: ["g0"], 1: ["g1"], 2: ["g2"]}


def test_an_interrupted_adoption_is_made_again(
    snapshots: Snapshots, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(snapshots, 6)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_complete", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            snapshots.adopt()
    assert checkpoints.newest() == 4
    assert snapshots.adopt() == 6
    assert [*snapshots.folder.parent.glob("checkpoints/.unfinished-*")] == []


def test_law_4_a_trainer_that_wakes_up_late_removes_nothing(snapshots: Snapshots, checkpoints: Checkpoints) -> None:
    snapshots.begin(6, "a1")
    checkpoints.start("b2", 4)
    take(snapshots, 5, "b2")
    (snapshots.folder / ".unfinished-step_6-a1").mkdir()
    with pytest.raises(ServiceError, match="another trainer has taken over"):
        snapshots.publish(state(6), {4: ["other"], 5: ["others"]}, {})
    assert left(snapshots) == ["step_5-b2", "step_6-a1"]
    assert snapshots.adopt() == 5


def test_the_folder_is_of_one_run_and_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(run: str, **checkpointing: object) -> Config:
        return Config.model_validate(
            {"run": {"id": run, "dir": str(tmp_path)}, "grpo": {}, "checkpointing": checkpointing}
        )

    memory = str(tmp_path / "memory")
    assert snapshot_folder.locate(config("a")) is None
    assert snapshot_folder.locate(config("a", snapshot_dir=memory, enabled=False)) is None
    one, two = (config(run, snapshot_dir=memory) for run in "ab")
    assert snapshot_folder.locate(one) != snapshot_folder.locate(two)
    checkpoints = Checkpoints(one.checkpoint_folder, one.checkpointing)
    with pytest.raises(ServiceError, match=r"memory/headrace-.*No such file.*snapshot_dir"):
        Snapshots.of(one, checkpoints)
    (tmp_path / "memory").mkdir()
    snapshots = Snapshots.of(one, checkpoints)
    assert snapshots is not None
    assert snapshots.folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ServiceError, match="belongs to another user"):
        Snapshots.of(one, checkpoints)
    monkeypatch.undo()
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ServiceError, match="on several hosts"):
        Snapshots.of(one, checkpoints)
    snapshot_folder.remove(one)
    assert [*(tmp_path / "memory").iterdir()] == []
