"""`headrace demo` in an empty folder."""

from __future__ import annotations

import filecmp
import functools
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cli import demo
from tests.support.command import headrace, refused

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_the_demo_brings_its_examples_and_overwrites_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")  # made already
    assert "grpo.max_steps" in refused("demo", "grpo.max_steps=3")
    wanted = {path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    copied = {path.relative_to(tmp_path / "examples") for path in (tmp_path / "examples").rglob("*") if path.is_file()}
    assert copied == wanted
    assert all(filecmp.cmp(EXAMPLES / name, tmp_path / "examples" / name, shallow=False) for name in wanted)

    own = tmp_path / "examples" / "arithmetic_tiny.yaml"
    own.write_text("grpo: {max_number_of_steps: 4}")
    assert "grpo.max_number_of_steps" in refused("demo")
    assert own.read_text() == "grpo: {max_number_of_steps: 4}"


def test_a_demo_that_is_stopped_while_it_copies_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    copied = 0

    def copy(one: str, other: str) -> str:
        nonlocal copied
        copied += 1
        if copied == 5:
            raise KeyboardInterrupt
        return shutil.copy2(one, other)

    copytree = functools.partial(shutil.copytree, copy_function=copy)
    monkeypatch.setattr(demo, "shutil", SimpleNamespace(copytree=copytree, ignore_patterns=shutil.ignore_patterns))
    assert headrace("demo", "grpo.max_steps=3").returncode != 0
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    assert "grpo.max_steps" in refused("demo", "grpo.max_steps=3")  # by `up`: the examples are there
    assert copied > 5
    assert (tmp_path / "examples" / "arithmetic_tiny.yaml").exists()


def test_a_folder_of_that_name_that_has_other_things_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "mine.txt").touch()
    assert "examples exists and has no arithmetic_tiny.yaml" in refused("demo")
    assert [path.name for path in tmp_path.rglob("*")] == ["examples", "mine.txt"]
