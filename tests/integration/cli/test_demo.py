"""`headrace demo` in an empty folder."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest

from tests.support.command import refused

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_the_demo_brings_its_examples_and_overwrites_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)  # made already
    assert "grpo.max_steps" in refused("demo", "grpo.max_steps=3")
    wanted = {path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    copied = {path.relative_to(tmp_path / "examples") for path in (tmp_path / "examples").rglob("*") if path.is_file()}
    assert copied == wanted
    assert all(filecmp.cmp(EXAMPLES / name, tmp_path / "examples" / name, shallow=False) for name in wanted)

    own = tmp_path / "examples" / "arithmetic_tiny.yaml"
    own.write_text("grpo: {max_number_of_steps: 4}")
    assert "grpo.max_number_of_steps" in refused("demo")
    assert own.read_text() == "grpo: {max_number_of_steps: 4}"
