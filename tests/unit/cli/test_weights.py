"""Weights as the command line names them, and the folder that `headrace export` makes of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError, ServiceError
from headrace.cli import weights
from headrace.cli.export import CARD
from headrace.cli.up import describe_best
from headrace.config import load
from headrace.launch import runs
from headrace.run.checkpoints import Start, append_start, metrics_name
from headrace.run.history import best_weights
from headrace.run.journal import JOURNAL, Journal
from tests.support.command import error_of, headrace

METRICS = {2: {"val:accuracy": 0.8}, 4: {"val:accuracy": 0.7}, 6: {}}


def model(folder: Path) -> Path:
    folder.mkdir(parents=True, mode=0o700)
    for name in ("config.json", "model.safetensors", "chat_template.jinja"):
        (folder / name).write_text(name)
        (folder / name).chmod(0o600)
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with checkpoints 2, 4 and 6, seen from the folder above ./runs."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text("run: {id: adder, dir: runs}\npolicy: {model_name: initial}\n")
    folder = runs.save(load(file, environ={})).parent
    append_start(folder / "checkpoints", Start("t", 0))
    for step, metrics in METRICS.items():
        checkpoint = folder / "checkpoints" / f"step_{step}"
        model(checkpoint / "policy")
        (checkpoint / "state.json").write_text(json.dumps({"version": step, "timeline": "t", "metrics": metrics}))
    # it was validated once more
    later = folder / "checkpoints" / "step_2" / metrics_name("t")
    later.write_text(json.dumps({"val:accuracy": 0.4}))
    return folder


@pytest.mark.parametrize(
    ("name", "step"), [("adder", 6), ("adder@latest", 6), ("adder@best", 4), ("adder@2", 2), ("runs/adder@4", 4)]
)
def test_a_run_and_its_step(run: Path, name: str, step: int) -> None:
    found = weights.find(name)
    assert (found.name, found.run and found.run.step) == (f"adder@{step}", step)
    assert found.model == str(run / "checkpoints" / f"step_{step}" / "policy")


def test_the_best_is_the_initial_model_where_no_checkpoint_is_better(run: Path) -> None:
    journal = Journal(run / JOURNAL)
    for value, step in ((0.7, 4), (0.75, 0)):  # of two equal ones the checkpoint is the best
        journal.append("rewind", 0, "t", {})
        journal.append("validation", 0, "t", {"accuracy": value})
        found = weights.find("adder@best")
        assert (found.name, found.run and found.run.step) == (f"adder@{step}", step)
    config = runs.load_saved(run / runs.SAVED)
    least = config.checkpointing.model_copy(update={"higher_is_better": False})
    assert best_weights(config.model_copy(update={"checkpointing": least})) == (2, "val:accuracy", 0.4)
    assert describe_best(config, 0, "val:accuracy", 0.75).startswith("initial (the initial model, val:accuracy 0.75")


@pytest.mark.parametrize(("validates", "step"), [(True, 4), (False, 2)])
def test_a_run_that_keeps_the_newest_has_a_best_too(run: Path, validates: bool, step: int) -> None:
    """That of its validations; without any, of its rewards."""
    config = runs.load_saved(run / runs.SAVED)
    # which way is better says nothing about metrics that the key does not name
    newest = config.checkpointing.model_copy(update={"metric_name": None, "higher_is_better": False})
    runs.save(config.model_copy(update={"checkpointing": newest}))
    if not validates:
        (run / "checkpoints" / "step_2" / metrics_name("t")).unlink()
        for state in run.glob("checkpoints/*/state.json"):
            known = json.loads(state.read_text())
            reward = 1.0 if known["version"] == 2 else 0.5
            state.write_text(json.dumps({**known, "metrics": {"train:reward": reward}}))
    assert weights.find("adder@best").name == f"adder@{step}"


def test_step_0_is_the_initial_model(run: Path) -> None:
    assert weights.find("adder@0").model == "initial"
    with pytest.raises(ConfigError, match=r"initial \(policy\.model_name\)"):
        weights.find_local("adder@0")
    model(run.parents[1] / "initial")
    assert weights.find_local("adder@0").name == "adder@0"


def test_a_run_that_was_moved_is_found_where_it_is(run: Path, tmp_path: Path) -> None:
    moved = run.rename(tmp_path / "a@b")
    found = weights.find(str(moved))
    assert (found.name, found.model) == ("a@b@6", str(moved / "checkpoints" / "step_6" / "policy"))
    assert weights.find(f"{moved}@2").name == "a@b@2"


def test_a_checkpoint_off_the_chain_is_none_of_the_run(run: Path) -> None:
    append_start(run / "checkpoints", Start("u", 4))
    assert weights.find("adder").name == "adder@4"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("adder@5", r"adder@5: .* it has 2, 4, 6"),
        ("adder@-1", r"'-1' is not a step"),
        ("adder@newest", "'newest' is not a step"),
        ("adder@", "adder@ names no step"),
        ("other@2", "other@2 is not a run"),
        ("runs", "neither the config.yaml"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(run: Path, name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        weights.find(name)


def test_what_there_is_no_best_of(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step_2")
    shutil.rmtree(run / "checkpoints" / "step_4")
    with pytest.raises(ConfigError, match=r"val:accuracy.*one of 6"):
        weights.find("adder@best")
    shutil.rmtree(run / "checkpoints" / "step_6" / "policy")
    with pytest.raises(ServiceError, match=r"policy.*another step"):
        weights.find("adder")
    shutil.rmtree(run / "checkpoints")
    for name in ("adder", "adder@best"):
        with pytest.raises(ConfigError, match=r"adder: .*no checkpoint.*adder@0"):
            weights.find(name)


# -- export


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_an_export_has_the_model_its_origin_and_modes_of_new_files(run: Path, tmp_path: Path) -> None:
    policy = run / "checkpoints" / "step_4" / "policy"
    (policy / "linked.json").symlink_to(run / "config.yaml")
    (policy / "more").mkdir(mode=0o700)
    (policy / "more" / "a").write_text("a")
    output = tmp_path / "out" / "adder"
    done = headrace("export", "adder@best", "-o", output)
    assert (done.returncode, done.stdout) == (0, f"adder@4 in {output}\n"), done.stderr
    for path in (output, output / "more"):
        assert path.stat().st_mode & 0o777 == 0o750
    names = {"config.json", "model.safetensors", "chat_template.jinja", "linked.json", "more", CARD}
    assert {path.name for path in output.iterdir()} == names
    assert all(path.stat().st_mode & 0o777 == 0o640 for path in output.rglob("*") if path.is_file())
    assert not (output / "linked.json").is_symlink()
    card = (output / CARD).read_text()
    for said in ("base_model: initial", "| run | `adder` |", "| step | `4` |", "| val:accuracy | `0.7` |"):
        assert said in card
    assert [path.name for path in output.parent.iterdir()] == ["adder"]


def test_an_export_takes_an_empty_folder_and_no_other(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    assert headrace("export", "adder", "-o", output).returncode == 0
    assert "not empty" in error_of(headrace("export", "adder", "-o", output))
    assert "config.json is a file" in error_of(headrace("export", "adder", "-o", output / "config.json"))
    inside = run / "checkpoints" / "step_6" / "policy" / "copy"
    assert "inside the model" in error_of(headrace("export", "adder", "-o", inside))
    # a folder that was exported is a model like any other, and keeps its card
    assert headrace("export", output, "-o", tmp_path / "again").returncode == 0
    assert (tmp_path / "again" / CARD).read_text() == (output / CARD).read_text()


def test_an_export_that_fails_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    (tmp_path / "out").mkdir()
    assert "No space left" in error_of(headrace("export", "adder", "-o", tmp_path / "out" / "adder"))
    assert list((tmp_path / "out").iterdir()) == []


def test_an_initial_model_completed_by_config_is_not_exported_alone(run: Path, tmp_path: Path) -> None:
    model(tmp_path / "initial")
    saved = run / runs.SAVED
    runs.save(load(saved, ["policy.tokenizer.name=other"], environ={}))
    error = error_of(headrace("export", "adder@0", "-o", tmp_path / "out"))
    assert "policy.tokenizer.name 'other'" in error
    assert headrace("export", "adder@2", "-o", tmp_path / "out").returncode == 0
