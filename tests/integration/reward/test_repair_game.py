"""The game of two turns in `examples/`: what its program asks, and what it earns; the configuration that plays it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import load
from headrace.env import environment_file
from headrace.env.environment import Environment
from headrace.testing import Served
from headrace_services.trainer.demo_models import tiny

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def game(serve_environment: Callable[[Environment], Served]) -> Served:
    return serve_environment(environment_file.load(f"{EXAMPLES / 'repair_game.py'}:Repair"))


@pytest.mark.parametrize(
    ("answers", "reward", "components"),
    [
        (["132"], 1.0, {"first": 1.0}),
        (["22", "132"], 0.5, {"first": 0.0, "second": 1.0}),
        (["22", "22"], 0.0, {"first": 0.0, "second": 0.0}),
    ],
)
def test_the_first_answer_earns_more_than_the_second(
    game: Served, answers: list[str], reward: float, components: dict[str, float]
) -> None:
    played = game.episode(answers, prompt="47+85", public={"answer": "132"})
    assert played.reward == reward
    assert played.outcome.score is not None
    assert played.outcome.score.components == components
    assert len(played.calls) == len(answers)


def test_a_wrong_answer_is_told_as_the_two_turn_model_has_seen_it(game: Served) -> None:
    played = game.episode(["22", "132"], prompt="47+85", public={"answer": "132"})
    assert [message["content"] for message in played.calls[1].messages] == ["47+85", "22", tiny.again((47, 85))]


def test_its_configuration_names_it() -> None:
    config = load(EXAMPLES / "repair_game.yaml", [], {})
    assert config.has_episodes
    assert config.env["repair"].public == ["answer"]
    assert config.policy.model_name == "models/tiny_two_turns"
