"""docs/from-trl.md and docs/from-verl.md: their first runs migrate as they stand, and their tables are those of the code."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.config import load
from headrace.env import environment_file
from headrace.launch import environment_processes
from headrace_services.trainer.data.problems import load_problems

ROOT = Path(__file__).parents[3]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_commands(page: str) -> None:
    """Run the commands of the page that start nothing, in the working directory."""
    (shown,) = (block for block in blocks(page, "sh") if block.startswith("headrace model"))
    commands = [line.split()[1:] for line in shown.splitlines()]
    assert [command[:2] for command in commands] == [
        ["model", "tiny"],
        ["migrate", page.removeprefix("from-").removesuffix(".md")],
        ["config", "check"],
        ["up", "run.yaml"],
    ]
    done = CliRunner().invoke(app, commands[1])
    assert done.exit_code == 0, done.output
    assert "0 without a counterpart, 0 to add" in done.output


def check(environments: set[str]) -> None:
    config = load("run.yaml", [], {})
    assert set(config.env) == environments
    environment_processes.check(config)
    training, validation = load_problems(config.data)
    assert [len(training), len(validation)] == [1, len(config.data.validation)]
    assert training[0].extra_env_info["answer"] == "132"


def test_the_script_of_trl_becomes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])  # it is added to
    (script,), (row,) = blocks("from-trl.md", "python"), blocks("from-trl.md", "json")
    Path("train.py").write_text(script)
    Path("sums.jsonl").write_text(row)
    run_commands("from-trl.md")
    check({"correct", "short", "reward"})
    assert environment_file.load("train_rewards.py:correct").label == "correct"


def test_the_script_of_verl_becomes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    script, (score,), (row,) = (
        blocks("from-verl.md", "sh")[0],
        blocks("from-verl.md", "python"),
        blocks("from-verl.md", "json"),
    )
    Path("run.sh").write_text(script)
    Path("score.py").write_text(score)
    other = json.loads(row) | {"prompt": [{"role": "user", "content": "1+1"}]}
    for name, rows in (("sums.parquet", [json.loads(row)]), ("held_out.parquet", [other])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    run_commands("from-verl.md")
    check({"reward"})


def test_the_tables_are_those_of_the_code(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "scripts" / "generate_migration.py"))["write"](tmp_path)
    for page in ("from-trl.md", "from-verl.md"):
        text = (ROOT / "docs" / page).read_text()
        assert (tmp_path / page).read_text() == text, "run `make docs`"
        assert text.count("### Used") == 1
