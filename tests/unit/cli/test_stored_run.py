"""What the command line does with a run that is in an object store."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.base.errors import ConfigError
from headrace.cli.up import fetch_newest
from headrace.config.loading import examine
from headrace.config.yaml_text import dump_value
from headrace.launch import preflight, runs
from headrace.run.folder import SAVED
from headrace.run.history import RECORD, RunRecord
from tests.support.command import said
from tests.support.stored_runs import RUN, Machine


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a store that has a run with the checkpoints 10 and 20."""
    url = f"file://{tmp_path}/store"
    first = Machine(tmp_path / "first", url)
    first.start("t1")
    (first.folder / RECORD).write_bytes(msgspec.json.encode(RunRecord(1.0, "running", 1.0)))
    for version in (10, 20):
        first.send(version)
    first.uploads.close()
    return url


def test_up_continues_what_it_fetches_under_its_own_keys(url: str, tmp_path: Path) -> None:
    given = Machine(tmp_path / "second", url).config.model_dump(exclude_unset=True, mode="json")
    file = tmp_path / "run.yaml"
    file.write_text(dump_value(given))
    config = examine(file, []).config
    fetch_newest(config)
    assert [path.name for path in config.checkpoint_folder.glob("step_*")] == ["step_20"]
    _, changes = runs.prepare(file, ["checkpointing.save_period=7"])
    assert any("save_period" in change for change in changes)
    with pytest.raises(ConfigError, match="seed"):
        runs.prepare(file, ["grpo.seed=7"])


def test_a_second_run_of_a_name_is_refused_though_it_has_begun_here(url: str, tmp_path: Path) -> None:
    """As when it was refused while the first was at work."""
    second = Machine(tmp_path / "second", url)
    file = tmp_path / "run.yaml"
    file.write_text(dump_value(second.config.model_dump(exclude_unset=True, mode="json") | {"grpo": {"seed": 7}}))
    runs.save(examine(file, []).config)
    fetch_newest(examine(file, []).config)
    with pytest.raises(ConfigError, match=r"run adder has checkpoint 20.*another run\.id[\s\S]*seed"):
        runs.prepare(file, [])


def test_a_fetched_run_is_looked_at_like_any_other(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "laptop" / RUN
    fetched = said("runs", "fetch", f"{url}/{RUN}@10", folder)
    assert "checkpoint 10" in fetched
    status = said("status", "--run", folder)
    found = {line.split()[0]: line.split()[1] for line in status.splitlines()}
    assert (found["checkpoints"], found["state"]) == ("10", "stopped")
    assert "elsewhere" not in (folder / SAVED).read_text()


def test_config_check_names_the_pip_command_of_a_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_value(Machine(tmp_path / "second", url).config.model_dump(exclude_unset=True, mode="json")))
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"run\.yaml:\d+") as refused:
        preflight.look(examine(file, []))
    assert "pip install 'headrace[store]'" in str(refused.value)


def test_config_check_names_the_pip_command_of_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("logger: {wandb_enabled: true}\n")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[wandb\]'.*run\.yaml:1\)"):
        preflight.look(examine(file, []))


def test_config_check_warns_of_a_store_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    given = Machine(tmp_path / "second", f"file://{tmp_path}/store").config.model_dump(exclude_unset=True, mode="json")
    given["checkpointing"]["store"] = f"file://{tmp_path}/file/store"
    file = tmp_path / "run.yaml"
    file.write_text(dump_value(given))
    assert any("/file/store" in warning for warning in preflight.look(examine(file, [])))
