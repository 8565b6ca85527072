"""The agent with a calculator in `examples/`: what its program asks, what its tool answers, and what it earns; its configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config import load
from headrace.env import environment_file
from headrace.env.environment import Environment
from headrace.testing import Served

EXAMPLES = Path(__file__).parents[3] / "examples"
PUBLIC = {"answer": "132"}


@pytest.fixture
def agent(serve_environment: Callable[[Environment], Served]) -> Served:
    return serve_environment(environment_file.load(f"{EXAMPLES / 'calculator.py'}:Calculator"))


def calling(*arguments: str, name: str = "calculator") -> dict[str, Any]:
    calls = [
        {"id": f"call-{place}", "type": "function", "function": {"name": name, "arguments": each}}
        for place, each in enumerate(arguments)
    ]
    return {"content": None, "tool_calls": calls}


SUM = calling('{"expression": "47+85"}')


@pytest.mark.parametrize(
    ("answers", "reward", "components"),
    [
        (["132"], 1.0, {"called": 0.0, "guessed": 1.0}),
        (["130"], 0.0, {"called": 0.0, "guessed": 0.0}),
        ([SUM, "132"], 1.0, {"called": 1.0, "told": 1.0}),
        ([SUM, "130"], 0.0, {"called": 1.0, "told": 0.0}),
        ([SUM, SUM, "132"], 1.0, {"called": 1.0, "told": 1.0}),
        ([SUM, SUM, SUM], 0.0, {"called": 1.0, "told": 0.0}),
    ],
)
def test_only_the_right_sum_earns_anything_however_it_was_come_by(
    agent: Served, answers: list[Any], reward: float, components: dict[str, float]
) -> None:
    played = agent.episode(answers, prompt="47+85", public=PUBLIC)
    assert played.reward == reward
    assert played.outcome.score is not None
    assert played.outcome.score.components == components
    assert len(played.calls) == len(answers)
    tools = [call.options["tools"] for call in played.calls]
    assert [[tool["function"]["name"] for tool in each] for each in tools] == [["calculator"]] * len(answers)


def test_each_call_of_a_tool_is_answered_under_its_id(agent: Served) -> None:
    two = calling('{"expression": "47+85"}', '{"expression": "1+2+3"}')
    played = agent.episode([two, "132"], prompt="47+85", public=PUBLIC)
    *before, first, second = played.calls[1].messages
    assert [message["role"] for message in before] == ["user", "assistant"]
    assert first == {"role": "tool", "tool_call_id": "call-0", "content": "132"}
    assert second == {"role": "tool", "tool_call_id": "call-1", "content": "6"}


@pytest.mark.parametrize(
    "arguments",
    ["{}", "[]", "7", "null", "", "{", json.dumps({"expression": 7}), json.dumps({"expression": "47**85"}), "9" * 5000],
)
def test_what_is_no_sum_is_told_so_and_costs_no_episode(agent: Served, arguments: str) -> None:
    played = agent.episode([calling(arguments), "132"], prompt="47+85", public=PUBLIC)
    assert played.reward == 1
    assert played.calls[1].messages[-1]["content"].startswith(f"can't compute {arguments}: ")


def test_a_tool_that_is_not_there_is_told_so(agent: Served) -> None:
    played = agent.episode([calling("{}", name="oracle"), "132"], prompt="47+85", public=PUBLIC)
    assert played.calls[1].messages[-1]["content"] == "there is no tool oracle"


def test_its_configuration_names_it_and_the_parser_of_its_calls() -> None:
    config = load(EXAMPLES / "calculator.yaml", [], {})
    assert config.has_episodes
    assert config.env["calculator"].public == ["answer"]
    assert config.policy.model_name == "models/tiny_calculator"
    assert config.policy.generation.vllm_cfg.tool_parser == "hermes"
