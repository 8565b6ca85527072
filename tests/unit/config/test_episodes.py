"""What a configuration may say of programs that own their loop."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace.config.environments import AttachedConfig, FunctionConfig
from headrace.launch import environment_processes

PROGRAM = {"attached": True, "episodes": True}


def config(env: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate({"env": env, **sections})


def test_a_program_with_a_grader_and_public_fields() -> None:
    env = config({"game": {**PROGRAM, "public": ["board"], "grader": "judge"}, "judge": {"target": "h:1"}}).env["game"]
    assert isinstance(env, AttachedConfig)
    assert (env.runs_episodes, env.public, env.grader) == (True, ["board"], "judge")
    assert not config({"judge": {"target": "h:1"}}).env["judge"].runs_episodes


def test_a_function_runs_episodes_without_being_told() -> None:
    env = config({"game": {"type": "function", "function": "games.chess:play"}}).env["game"]
    assert (env.runs_episodes, type(env)) == (True, FunctionConfig)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"game": {"attached": True, "public": ["board"]}}, r"public \[board\]"),
        ({"game": {"attached": True, "grader": "math"}, "math": {}}, "grader 'math'"),
        ({"game": {**PROGRAM, "grader": "math"}}, r"env.game.grader 'math' is not under env"),
        ({"game": {**PROGRAM, "grader": "game"}, "math": {}}, r"'game' runs episodes itself"),
        ({"game": {**PROGRAM, "grader": "other"}, "other": PROGRAM}, "'other' runs episodes itself"),
        ({"math": {"episodes": True}}, "true is an option of function, verifiers, .*, not of type math"),
        ({"game": {"type": "function"}}, r"env.game.function\n.*required"),
        ({"game": {"type": "function", "function": "games.chess.play"}}, "should match pattern"),
        ({"game": {"type": "function", "function": "games.py:play"}}, None),
        (
            {"game": {"type": "function", "function": "g:p", "episodes": False}},
            r"env.game.episodes\n.*false, but this type runs episodes",
        ),
        (
            {"game": {**PROGRAM, "function": "g:p"}},
            r"env.game.function\n.*'g:p' is an option of function, not of an environment with attached",
        ),
        ({"game": PROGRAM, "all": {"type": "combine", "parts": {"game": 1.0}}}, "env.all.parts.game runs episodes"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_remedy(env: dict[str, Any], said: str | None) -> None:
    if said is None:  # it looks like a file, and is the function of a module `py`
        config(env)
        return
    with pytest.raises(ValidationError, match=said):
        config(env)


def test_replicas_that_validate_beside_training_answer_no_calls() -> None:
    config({"game": {"type": "math"}}, trainer={"validation_replicas": 1})
    with pytest.raises(
        ValidationError, match=r"trainer\.validation_replicas 1 with an environment that has episodes \(game\).*to 0"
    ):
        config({"game": PROGRAM}, trainer={"validation_replicas": 1})


@pytest.mark.parametrize(
    ("wanted", "replicas", "said"), [(1, 2, None), (1, 1, "all validate, and refits wait"), (3, 3, "2 validate")]
)
def test_one_replica_at_least_is_left_for_training(wanted: int, replicas: int, said: str | None) -> None:
    warnings = config({}, trainer={"validation_replicas": wanted}, rollout={"replicas": replicas}).warnings
    found = [warning for warning in warnings if f"trainer.validation_replicas {wanted}" in warning]
    assert len(found) == (said is not None)
    assert all(said is not None and said in warning for warning in found)


def test_drop_refuses_episodes_and_the_others_take_them() -> None:
    for policy in ("ordered", "mask"):
        config({"game": PROGRAM}, grpo={"async_grpo": {"enabled": True, "staleness_policy": policy}})
    with pytest.raises(ValidationError, match=r"env\.game\.episodes true.*staleness_policy drop"):
        config({"game": PROGRAM}, grpo={"async_grpo": {"enabled": True, "staleness_policy": "drop"}})


def test_a_function_that_cant_be_imported_is_named_before_any_start() -> None:
    right = {"type": "function", "function": "tests.support.odd_program:play"}
    environment_processes.check(config({"game": right}))
    with pytest.raises(ConfigError, match=r"env\.game\.function nowhere:play"):
        environment_processes.check(config({"game": {**right, "function": "nowhere:play"}}))
