"""docs/agents.md: its programs play as they stand, and its configurations are configurations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import Config
from headrace.env import environment_file
from headrace.env.environment import Environment
from headrace.testing import Served

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
CALL = {"id": "call-0", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "17+25"}'}}
UNREADABLE = {**CALL, "function": {"name": "calculator", "arguments": "{}"}}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def programs(tmp_path: Path, serve_environment: Callable[[Environment], Served]) -> Callable[[int, str], Served]:
    """The program in a block of the page, served."""

    def serve(place: int, name: str) -> Served:
        (tmp_path / "program.py").write_text(blocks("python")[place])
        return serve_environment(environment_file.load(f"{tmp_path / 'program.py'}:{name}"))

    return serve


@pytest.mark.parametrize(("answers", "reward"), [(["42"], 1.0), (["32", " 42 "], 0.5), (["32", "32"], 0.0)])
def test_the_first_program(programs: Callable[[int, str], Served], answers: list[str], reward: float) -> None:
    played = programs(0, "Repair").episode(answers, prompt="17+25", public={"answer": "42"})
    assert played.reward == reward
    assert len(played.calls) == len(answers)


@pytest.mark.parametrize(
    ("answers", "reward", "told"),
    [
        (["42"], 1.0, []),
        ([{"tool_calls": [CALL]}, "42"], 1.0, ["42"]),
        ([{"tool_calls": [UNREADABLE]}, "41"], 0.0, ["error: KeyError('expression')"]),
        ([{"tool_calls": [CALL]}] * 3, 0.0, ["42", "42"]),
    ],
)
def test_the_program_with_a_tool(
    programs: Callable[[int, str], Served], answers: list[Any], reward: float, told: list[str]
) -> None:
    played = programs(1, "Calculator").episode(answers, prompt="17+25", public={"answer": "42"})
    assert played.reward == reward
    last = played.calls[-1].messages
    assert [message["content"] for message in last if message["role"] == "tool"] == told


def test_the_configurations_are_configurations() -> None:
    configs = [Config.model_validate(yaml.safe_load(block)) for block in blocks("yaml")]
    assert [config.has_episodes for config in configs] == [True] * 5


def test_the_commands_name_what_there_is() -> None:
    """They run in tests/e2e/test_calculator.py."""
    commands = [line.split() for line in blocks("sh")[0].splitlines()]
    assert commands == [
        ["headrace", "model", "tiny-calculator", "models/tiny_calculator"],
        ["headrace", "up", "examples/calculator.yaml"],
    ]
