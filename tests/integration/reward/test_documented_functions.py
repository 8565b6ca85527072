"""The section on reward functions in docs/environments.md: its example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from headrace.config import Config
from headrace.config.environments import CombineConfig
from headrace.env import environment_file
from headrace.testing import sample, served

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


def block(language: str) -> str:
    text = PAGE.read_text()
    section = text[
        text.index("\n## Reward functions of TRL and verl") : text.index("\n## A program that owns its loop")
    ]
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("accuracy", (1.0, 0.0, 0.0)), ("written", (1.0, 0.0, None)), ("compute_score", (1.0, 0.0, 0.0))],
)
def test_the_functions_score(tmp_path: Path, name: str, rewards: tuple[float | None, ...]) -> None:
    (tmp_path / "rewards.py").write_text(block("python"))
    with served(environment_file.load(f"{tmp_path}/rewards.py:{name}")) as environment:
        scores = environment.score(*(sample(text, {"answer": "4"}) for text in ("4", "four", "")))
    assert tuple(score.reward for score in scores) == rewards


def test_the_configuration_is_one() -> None:
    env = Config.model_validate(yaml.safe_load(block("yaml"))).env
    assert isinstance(env["reward"], CombineConfig)
    assert set(env["reward"].parts) < set(env)
