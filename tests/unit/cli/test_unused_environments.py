"""A section under `env` that no data set names is told before a run: its name may be misspelt."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.loading import examine
from headrace.launch import preflight

CONFIG = """
run: {id: r}
data: {train: {dataset_name: arithmetic, env_name: all}}
env:
  all: {type: combine, parts: {math: 1.0, format: 0.5}}
  math: {type: math}
  format: {type: regex, pattern: a}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def test_an_environment_that_another_one_asks_is_used(file: Path) -> None:
    assert preflight._unused(examine(file, environ={})) == []


def test_one_that_nothing_asks_is_named_with_its_place(file: Path) -> None:
    file.write_text(CONFIG + "  colum: {type: math}\n")
    (line,) = preflight._unused(examine(file, environ={}))
    assert "env.colum" in line
    assert f"{file}:8" in line
    (line,) = preflight._unused(
        examine(file, ["env.other.type=math", "env.colum.type=math", "data.train.env_name=colum"], {})
    )[-1:]
    assert "env.other" in line


def test_one_that_a_file_inherits_is_no_mistake(file: Path) -> None:
    file.write_text(CONFIG + "  colum: {type: math}\n")
    heir = file.with_name("heir.yaml")
    heir.write_text("defaults: run.yaml\n")
    assert preflight._unused(examine(heir, environ={})) == []


def test_a_file_is_told_from_one_whose_name_begins_alike(file: Path) -> None:
    file.write_text(CONFIG + "  colum: {type: math}\n")
    heir = file.with_suffix("")
    heir.write_text("defaults: run.yaml\n")
    assert preflight._unused(examine(heir, environ={})) == []
