"""`headrace rewind` on the folder of a run."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.base.errors import ServiceError
from headrace.config import load
from headrace.config.services import CheckpointingConfig
from headrace.launch import runs
from headrace.run.checkpoints import CHAIN
from headrace.run.journal import JOURNAL, Journal, read_journal, surviving
from headrace_services.trainer.control.checkpoint import Checkpoints, CheckpointState
from tests.support.command import error_of, headrace

CONFIG = "run: {id: adder, dir: elsewhere}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that was up, in a folder of runs that was moved since."""
    path = tmp_path / "runs" / "adder"
    path.mkdir(parents=True)
    (path / runs.SAVED).write_text(CONFIG)
    return path


@pytest.fixture
def checkpoints(folder: Path) -> Checkpoints:
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointingConfig(keep_top_k=None))
    checkpoints.start("t", 0)
    for version in (2, 4, 6, 10):
        (checkpoints.begin(version, "t") / "weights").write_text(f"weights {version}")
        checkpoints.publish(CheckpointState(version=version, timeline="t", cursor=0, run_id="adder"), {})
    return checkpoints


def rewind(folder: Path, run: str, version: int) -> subprocess.CompletedProcess[str]:
    return headrace("rewind", folder.parent / run, version)


def refused(folder: Path, run: str, version: int) -> str:
    return error_of(rewind(folder, run, version))


def everything(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_newer_checkpoints_are_set_aside_and_none_is_lost(folder: Path, checkpoints: Checkpoints) -> None:
    before = {name: data for name, data in everything(folder / "checkpoints").items()}
    (checkpoints.path(8)).mkdir()  # half a copy: it would be in the way when version 8 is published again
    done = rewind(folder, "adder", 4)
    assert done.returncode == 0, done.stderr
    assert "continues from checkpoint 4" in done.stdout
    assert checkpoints.find_published() == [2, 4]
    (aside,) = (folder / "checkpoints").glob("set-aside-*")
    assert sorted(path.name for path in aside.iterdir()) == ["WHY.txt", "step_10", "step_6", "step_8"]
    why = (aside / "WHY.txt").read_text()
    assert "back to checkpoint 4" in why
    assert "6, 8, 10" in why
    after = everything(folder / "checkpoints")
    chain = after.pop(CHAIN)
    assert chain.startswith(before.pop(CHAIN))
    assert {name.removeprefix(f"{aside.name}/"): data for name, data in after.items() if "WHY" not in name} == before
    # the next writer of checkpoints leaves them alone, and may publish those versions again
    checkpoints.start("u", 4)
    checkpoints.begin(6, "u")
    checkpoints.publish(CheckpointState(version=6, timeline="u", cursor=0, run_id="adder"), {})
    assert checkpoints.find_published() == [2, 4, 6]
    assert (aside / "step_6" / "weights").read_text() == "weights 6"


def test_a_rewind_to_the_newest_changes_nothing(folder: Path, checkpoints: Checkpoints) -> None:
    before = everything(folder / "checkpoints")
    done = rewind(folder, "adder", 10)
    assert done.returncode == 0
    assert "is already the newest" in done.stdout
    assert everything(folder / "checkpoints") == before


def test_a_rewind_to_the_newest_abandons_what_was_trained_since(folder: Path, checkpoints: Checkpoints) -> None:
    """There may be a snapshot of it in a machine's memory."""
    Journal(folder / JOURNAL).append("train", 10, "t", {})
    assert "is already the newest" in rewind(folder, "adder", 10).stdout
    with pytest.raises(ServiceError, match=r"newest.*\(timeline rewind-"):
        checkpoints.require_newest("t")
    assert checkpoints.find_published() == [2, 4, 6, 10]


def test_what_can_not_be_done_is_refused_and_nothing_is_moved(folder: Path, checkpoints: Checkpoints) -> None:
    before = everything(folder / "checkpoints")
    assert "version 5; it has 2, 4, 6, 10" in refused(folder, "adder", 5)
    assert "give another run.id" in refused(folder, "adder", 0)
    assert "subtracter is not a run" in refused(folder, "subtracter", 4)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "run adder is already up" in refused(folder, "adder", 4)
    # a trainer that no `up` started
    lock = checkpoints.lock()
    assert f"{folder}/checkpoints (process {os.getpid()} " in refused(folder, "adder", 4)
    lock.release()
    assert everything(folder / "checkpoints") == before


def test_checkpoints_are_where_the_configuration_says(folder: Path, checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.move(folder / "checkpoints", tmp_path / "big disk")
    config = load(folder / runs.SAVED, [f"checkpointing.checkpoint_dir={tmp_path}/big disk"], environ={})
    runs.save(config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder.parent)})}))
    assert rewind(folder, "adder", 2).returncode == 0
    assert Checkpoints(tmp_path / "big disk", CheckpointingConfig()).find_published() == [2]


def test_a_trainer_that_slept_through_the_rewind_publishes_nothing(folder: Path, checkpoints: Checkpoints) -> None:
    checkpoints.begin(12, "t")
    assert rewind(folder, "adder", 4).returncode == 0
    with pytest.raises(ServiceError, match=r"newest.*\(timeline rewind-"):
        checkpoints.publish(CheckpointState(version=12, timeline="t", cursor=0, run_id="adder"), {})
    assert checkpoints.find_published() == [2, 4]


def test_a_run_is_named_as_everywhere(folder: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parents[1])
    renamed = folder.rename(folder.with_name("first"))
    for newest, named in ((6, ("first", 6)), (4, (renamed, 4)), (2, ("first", 2, "--dir", "runs"))):
        done = headrace("rewind", *named)
        assert done.returncode == 0, done.stderr
        assert f"run first continues from checkpoint {newest}; newer ones are in {renamed}/" in done.stdout
        assert Checkpoints(renamed / "checkpoints", CheckpointingConfig()).newest() == newest


def test_what_is_told_of_a_run_is_of_the_weights_that_it_has(folder: Path, checkpoints: Checkpoints) -> None:
    journal = Journal(folder / JOURNAL)
    for step in range(10):
        journal.append("train", step, "t", {"reward": step / 10})
        journal.append("validation", step + 1, "t", {"accuracy": (step + 1) / 10})
    assert rewind(folder, "adder", 4).returncode == 0
    told = headrace("status", folder).stdout
    assert "steps         4 of" in told
    assert "val:accuracy 0.4 at step 4" in told
    assert rewind(folder, "adder", 4).returncode == 0
    assert [line.kind for line in read_journal(folder / JOURNAL)].count("rewind") == 1
    # the trainer that goes on notes its own start
    journal.append("rewind", 4, "u", {})
    journal.append("train", 4, "u", {"reward": 0.9})
    assert [line.step for line in surviving(read_journal(folder / JOURNAL)) if line.kind == "train"] == [0, 1, 2, 3, 4]
