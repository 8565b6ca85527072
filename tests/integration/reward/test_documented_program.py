"""The section on programs that own their loop in docs/environments.md: its example runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from headrace.config import Config
from headrace.env.environment_file import load
from headrace.testing import sample, served

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


def blocks(language: str) -> list[str]:
    text = PAGE.read_text()
    section = text[text.index("\n## A program that owns its loop") : text.index("\n## Testing an environment")]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def test_the_example_passes_its_tests(tmp_path: Path) -> None:
    program, _, tests = blocks("python")
    (tmp_path / "guess.py").write_text(program)
    (tmp_path / "test_guess.py").write_text(tests)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_grader_scores_what_an_episode_said_and_left(tmp_path: Path) -> None:
    _, grader, _ = blocks("python")
    (tmp_path / "solved.py").write_text(grader)
    said = (
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": ""},
    )
    with served(load(f"{tmp_path}/solved.py:Solved")) as solved:
        made = [sample("", {"solution": [2, 1]}, conversation=said, artifacts=left) for left in ({"board": [2, 1]}, {})]
        right, wrong = solved.score(*made)
    assert (right.reward, right.components, wrong.reward) == (1.0, {"looks": 1.0}, 0.0)


def test_the_configurations_are_configurations() -> None:
    examples = [yaml.safe_load(block) for block in blocks("yaml")]
    assert len(examples) == 3
    environments = [env for example in examples for env in Config.model_validate(example).env.values()]
    assert sum(env.episodes for env in environments) == 3
