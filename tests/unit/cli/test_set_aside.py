"""A damaged checkpoint that a trainer set aside is shown where people look: by `headrace up` and `headrace status`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from headrace.cli.display import LineDisplay
from headrace.config import Config
from headrace.launch.pipeline import Pipeline
from headrace.net import credentials
from headrace.run.checkpoints import DAMAGE
from tests.support.command import said
from tests.support.past_run import past_run

WHY = "model.safetensors is not what was written"


def set_aside(checkpoints: Path, version: int) -> Path:
    folder = checkpoints / f"damaged-step_{version}-t2"
    folder.mkdir(parents=True)
    (folder / DAMAGE).write_text(WHY)
    return folder


def test_up_says_once_what_was_set_aside_since_it_started(tmp_path: Path) -> None:
    file = tmp_path / credentials.FILE
    config = Config.model_validate({"run": {"id": "r", "dir": str(tmp_path)}, "security": {"credentials": str(file)}})
    credentials.complete(file, credentials.list_roles(config, redis=True))
    set_aside(config.checkpoint_folder, 2)
    console = Console(file=io.StringIO(), width=300)
    pipeline = Pipeline(config, tmp_path / "config.yaml", None, {}, LineDisplay(console))
    aside = set_aside(config.checkpoint_folder, 6)
    for _ in range(2):
        pipeline._say_set_aside()
    (line,) = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert WHY in line
    assert str(aside) in line


def test_status_shows_what_was_set_aside(tmp_path: Path) -> None:
    run = past_run(tmp_path, "adder", 4)
    set_aside(run / "checkpoints", 10)
    set_aside(run / "checkpoints", 6)
    lines = [line for line in said("status", "--run", run).splitlines() if line.startswith("set aside")]
    assert [line.split()[3] for line in lines] == ["6", "10"]
    assert all(WHY in line for line in lines)
