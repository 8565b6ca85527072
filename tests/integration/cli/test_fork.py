"""`headrace runs fork`: a run that continues from a checkpoint of another, which stays as it is."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml

from headrace.config.services import CheckpointingConfig
from headrace.launch import runs
from headrace.replay import BufferRetry, Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace.run import checkpoints as folders
from headrace.run import history
from headrace.run.group_files import FOLDER as GROUPS
from headrace.run.journal import JOURNAL, read_journal
from headrace.run.lineage import FOLDER, LineageFiles
from headrace.run.sample_files import SampleFiles
from headrace_services.trainer.control.checkpoint import ENDED, FAILURES, TRAINED, Checkpoints, CheckpointState, Ledger
from headrace_services.trainer.control.resume import resume
from tests.support.command import headrace, refused, said
from tests.support.page_runs import STEPS, recorded_run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A run of six steps with checkpoints 2, 4 and 6, two retries of which the first is older than checkpoint 4, and a buffer."""
    folder = recorded_run(tmp_path / "runs")
    saved = folder / runs.SAVED
    values = yaml.safe_load(saved.read_text())
    values["run"]["started_in"] = "../.."
    values["replay"] = {"redis_port": 7777}
    values["env"]["mine"] = {"target": f"{folder}/inputs/reward.py:mine"}
    (folder / "inputs").mkdir()
    (folder / "inputs" / "reward.py").write_text("def mine(completions): ...")
    values["security"] = {"credentials": str(folder / "credentials")}
    saved.write_text(yaml.safe_dump(values))
    (folder / "credentials").write_text("reader secret\n")
    (folder / "replay").mkdir()
    (folder / "replay" / "appendonly.aof").write_text("secret")
    written = Checkpoints(folder / "checkpoints", CheckpointingConfig(keep_top_k=None))
    written.start("a", 0)
    for version in (2, 4, 6):
        begin(written, version)
        written.publish(CheckpointState(version=version, timeline="a", cursor=2 * version, run_id="adder"), {})
    return folder


def begin(checkpoints: Checkpoints, version: int) -> None:
    place = checkpoints.begin(version, "a")
    (place / "policy").mkdir()
    (place / "policy" / "config.json").write_text("{}")
    (place / "policy" / "model.safetensors").write_bytes(len(b"{}").to_bytes(8, "little") + b"{}")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fork_has_what_led_to_its_checkpoint_and_no_more(source: Path) -> None:
    unfinished = folders.path_of(source / "checkpoints", 4) / ".metrics-a.json"  # of a trainer that was killed
    unfinished.touch()
    for kind, step in (("train", 3), ("val", 4)):
        SampleFiles(source / "logs", None).write(kind, step, [{}])
    before = everything(source)
    told = said("runs", "fork", f"{source}@4", "other")
    other = source.parent / "other"
    assert f"headrace up {other / runs.SAVED}" in told
    assert everything(source) == before
    config = runs.find(str(other))
    assert (config.run.id, config.run_folder, config.checkpoint_folder) == ("other", other, other / "checkpoints")
    assert folders.find_published(config.checkpoint_folder) == [4]
    assert folders.find_change(folders.path_of(config.checkpoint_folder, 4)) is None
    assert not (folders.path_of(config.checkpoint_folder, 4) / unfinished.name).exists()
    past = history.read(config)
    assert (past.state, past.last_step) == ("stopped", 3)
    assert all(line.kind != "rewind" for line in read_journal(other / JOURNAL))
    assert [step for step, _ in LineageFiles(config.checkpoint_folder / FOLDER).files()] == [0, 1, 2, 3]
    assert [SampleFiles.of(config).steps(kind) for kind in ("train", "val")] == [[3], [4]]
    assert (other / GROUPS).is_dir()
    assert not (other / "replay").exists()
    assert not (other / "credentials").exists()
    values = yaml.safe_load((other / runs.SAVED).read_text())
    assert values["run"]["started_in"] == "../.."
    assert "redis_port" not in values["replay"]
    assert values["env"]["mine"]["target"] == f"{other}/inputs/reward.py:mine"
    (other / "inputs" / "reward.py").write_text("changed")
    assert everything(source) == before
    assert "credentials" not in values["security"]


def test_the_newest_checkpoint_is_forked_by_default_anywhere(source: Path, tmp_path: Path) -> None:
    said("runs", "fork", source, tmp_path / "elsewhere" / "other")
    config = runs.find(str(tmp_path / "elsewhere" / "other"))
    assert folders.find_published(config.checkpoint_folder) == [STEPS]
    assert config.run.dir == str(tmp_path / "elsewhere")


def test_writing_in_a_fork_changes_nothing_of_its_source(source: Path) -> None:
    before = everything(source)
    said("runs", "fork", f"{source}@4", "other")
    fork = Checkpoints(source.parent / "other" / "checkpoints", CheckpointingConfig(keep_top_k=1))
    fork.start("b", 4)
    fork.begin(5, "b")
    fork.publish(CheckpointState(version=5, timeline="b", cursor=10, run_id="other"), {})
    assert headrace("rewind", source.parent / "other", 5).returncode == 0
    assert everything(source) == before


@pytest.mark.parametrize(
    ("name", "new", "told"), [("@3", "other", "it has 2, 4, 6"), ("@0", "other", "RUN@STEP"), ("@4", "adder", "exists")]
)
def test_what_can_not_be_forked_is_refused(source: Path, name: str, new: str, told: str) -> None:
    assert told in refused("runs", "fork", f"{source}{name}", new)
    assert [path.name for path in source.parent.iterdir()] == ["adder"]


async def test_a_trainer_goes_on_from_a_fork_with_a_buffer_of_its_own(
    source: Path, redis_url: str, limits: Limits, replay: ReplayClient
) -> None:
    """What its checkpoint was trained on is not trained again, and the buffer of the source hears of nothing."""
    written = Checkpoints(source / "checkpoints", CheckpointingConfig(keep_top_k=None))
    before, ended = await replay.state(), await replay.read_ended()
    ledger = Ledger()
    ledger.record(7, ["0-0", "0-2"], [0, 2])
    begin(written, 8)
    state = CheckpointState(version=8, timeline="a", incarnation=before.incarnation, cursor=3, run_id="adder")
    files = {TRAINED: ledger.encode(), ENDED: ended.bitmap, FAILURES: ended.failures}
    written.publish(state, ledger.steps, set(), files)
    name = f"{replay.run_id}-fork"
    said("runs", "fork", source, name)
    fork = Checkpoints(source.parent / name / "checkpoints", CheckpointingConfig())
    async with contextlib.aclosing(ReplayClient(open_redis(redis_url), name)) as own:
        await own.open_run(limits)
        found = await resume(own, BufferRetry(10.0), fork, fork.newest(), [], name)
        assert (found.version, list(found.missing())) == (8, [1])
        assert (await own.state()).next_step == 8
    assert await replay.state() == before
    assert fork.newest() == 8
