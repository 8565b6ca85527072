"""What a configuration may say of a verifiers environment and of its tasks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace.config.environments import VerifiersConfig
from headrace.launch import environment_processes

ECHO = {"type": "verifiers", "python": "p", "verifiers": {"taskset": {"id": "echo-v1"}}}
TASKS = {"dataset_name": "verifiers", "env_name": "echo"}


def config(env: dict[str, Any], *train: dict[str, Any]) -> Config:
    return Config.model_validate({"env": {"echo": env}, "data": {"train": list(train)}})


def test_it_runs_episodes_and_gets_the_task_without_being_told() -> None:
    env = config(ECHO, TASKS).env["echo"]
    assert isinstance(env, VerifiersConfig)
    assert (env.runs_episodes, env.public) == (True, ["task"])


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"python": None}, r"env.echo.python\n.*required"),
        ({"verifiers": {}}, r"{} names no environment; give taskset: {id: NAME}"),
        ({"verifiers": {"taskset": "echo-v1"}}, "names no environment"),
        ({"episodes": False, "public": []}, "false, but this type runs episodes"),
        ({"public": ["task", "answer"]}, r"\['task', 'answer'\]: a verifiers environment gets only the task"),
        ({"function": "a:b"}, r"env.echo.function\n.*'a:b' is an option of function, not of type verifiers"),
        ({"type": "math", "verifiers": {}}, r"env.echo.python\n.*'p' is an option of verifiers, not of type math"),
    ],
)
def test_what_it_lacks_is_named(env: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config({**ECHO, **env})


@pytest.mark.parametrize(
    ("env", "source", "said"),
    [
        (ECHO, {"dataset_name": "arithmetic"}, r"train.0.env_name\n.*'echo' is of type verifiers"),
        ({"type": "math"}, {}, r"train.0.dataset_name\n.*verifiers with env_name 'echo'"),
        (ECHO, {"system_prompt": "Be brief."}, r"train.0.system_prompt\n.*dataset_name is verifiers"),
        (ECHO, {"prompt_file": "p.txt"}, r"train.0.prompt_file\n.*dataset_name is verifiers"),
    ],
)
def test_its_tasks_are_its_own(env: dict[str, Any], source: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(env, {**TASKS, **source})


def test_what_decides_rewards_is_configuration_and_not_where_it_runs() -> None:
    env = config(ECHO).env["echo"]
    assert isinstance(env, VerifiersConfig)
    decisive = env.decisive_options()
    assert decisive["verifiers"] == {"taskset": {"id": "echo-v1"}}
    assert "python" not in decisive


def test_a_python_without_verifiers_is_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"env\.echo\.verifiers:.*import"):
        environment_processes.check(config({**ECHO, "python": sys.executable}))
