"""Snapshots between checkpoints: which of them a trainer continues from, and what becomes of the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.config.services import CheckpointingConfig
from headrace.run import snapshots as snapshot_folder
from headrace.run.checkpoints import Start, append_start
from headrace_services.trainer.control.checkpoint import TRAINED, Checkpoints, CheckpointState, Ledger
from headrace_services.trainer.control.rank import LeadRank
from headrace_services.trainer.control.snapshots import Snapshots
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.distributed.sharding import ModelShard
from headrace_services.trainer.learning.optimizer import LearningRate, ModelOptimizer, snapshot_training


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


class Still:
    """An optimizer without moments, of rank 0 of so many."""

    rate = LearningRate(1e-3, [], "policy")

    def __init__(self, ranks: int) -> None:
        self.shard = ModelShard(0, ranks, writes=True)

    def moments(self) -> dict[str, Any]:
        return {}


def take(snapshots: Snapshots, version: int, timeline: str = "a1", first: int = 4, ranks: int = 1) -> None:
    folder = snapshots.begin(version, timeline)
    (folder / "weights").write_text(str(version))
    snapshot_training({}, {"policy": cast(ModelOptimizer, Still(ranks))}, moments=True)(folder / "training")
    steps = {step: [f"g{step}"] for step in range(first, version)}
    snapshots.publish(state(version, timeline), steps, {TRAINED: Ledger(range(version)).encode()})


def adopt(snapshots: Snapshots) -> int | None:
    return LeadRank(Config.model_validate({"grpo": {}}), Ranks(), no_read, snapshots).adopt_snapshot()


def no_read(keys: Sequence[str]) -> list[Any]:
    raise NotImplementedError


def left(snapshots: Snapshots) -> list[str]:
    return sorted(path.name for path in snapshots.folder.iterdir())


def test_the_newest_complete_one_becomes_a_checkpoint(snapshots: Snapshots, checkpoints: Checkpoints) -> None:
    take(snapshots, 5)
    take(snapshots, 6)
    assert left(snapshots) == ["step_6-a1"]
    (snapshots.begin(7, "a1") / "weights").write_text("half of it")
    assert left(snapshots) == [".unfinished-step_7-a1", "step_6-a1"]
    assert adopt(snapshots) == 6
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
    assert adopt(snapshots) == 7
    assert checkpoints.find_published() == [4, 6, 7]


@pytest.mark.parametrize("cut", [4, 5])
def test_none_of_weights_that_a_rewind_abandoned(snapshots: Snapshots, checkpoints: Checkpoints, cut: int) -> None:
    take(snapshots, 6)
    append_start(snapshots.folder.parent / "checkpoints", Start("rewind-1", cut))
    assert adopt(snapshots) is None
    assert left(snapshots) == []
    assert checkpoints.newest() == 4


def test_none_of_which_a_host_that_is_gone_had_a_part(
    snapshots: Snapshots, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    take(snapshots, 6, ranks=2)
    assert adopt(snapshots) is None
    assert left(snapshots) == []
    assert checkpoints.newest() == 4
    assert "rank_1_of_2.safetensors: its host is gone" in caplog.text


def test_none_that_does_not_continue_from_the_newest_checkpoint(snapshots: Snapshots, checkpoints: Checkpoints) -> None:
    take(snapshots, 6, first=3)
    assert adopt(snapshots) is None
    take(snapshots, 6)
    checkpoints.begin(8, "a1")
    checkpoints.publish(state(8), {step: [f"g{step}"] for step in range(4, 8)})
    assert adopt(snapshots) is None
    assert adopt(snapshots) is None, "nor if there is none"
    assert checkpoints.newest() == 8


def test_one_without_a_checkpoint_before_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointingConfig())
    checkpoints.start("a1", 0)
    (tmp_path / "memory").mkdir()
    snapshots = Snapshots(tmp_path / "memory", checkpoints)
    take(snapshots, 3, first=0)
    assert adopt(snapshots) == 3
    assert checkpoints.ledger(3) == {0: ["g0"], 1: ["g1"], 2: ["g2"]}


def test_an_interrupted_adoption_is_made_again(
    snapshots: Snapshots, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(snapshots, 6)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_complete", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adopt(snapshots)
    assert checkpoints.newest() == 4
    assert adopt(snapshots) == 6
    assert [*snapshots.folder.parent.glob("checkpoints/.unfinished-*")] == []


def test_law_4_a_trainer_that_wakes_up_late_removes_nothing(snapshots: Snapshots, checkpoints: Checkpoints) -> None:
    snapshots.begin(6, "a1")
    checkpoints.start("b2", 4)
    take(snapshots, 5, "b2")
    (snapshots.folder / ".unfinished-step_6-a1").mkdir()
    with pytest.raises(ServiceError, match="another trainer has taken over"):
        snapshots.publish(state(6), {4: ["other"], 5: ["others"]}, {})
    assert left(snapshots) == ["step_5-b2", "step_6-a1"]
    assert adopt(snapshots) == 5


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
    snapshot_folder.remove(one)
    assert [*(tmp_path / "memory").iterdir()] == []


def test_a_host_without_rank_0_keeps_the_newest_that_is_complete(
    snapshots: Snapshots, checkpoints: Checkpoints
) -> None:
    """Nobody tells it: the one before is complete when the next begins."""
    for version in (9, 10, 11):
        snapshots.begin(version, "a1").joinpath("part").write_text(str(version))
    assert left(snapshots) == [".unfinished-step_10-a1", ".unfinished-step_11-a1"]
    assert snapshots.newest() is None
    assert snapshots.list_files(10, "a1") == ["part"]
    assert snapshots.list_files(9, "a1") == []
    target = checkpoints.begin(10, "a1")
    snapshots.copy(10, "a1", target)
    assert (target / "part").read_text() == "10"
