"""What `config check` accepts of sampling, vLLM accepts, and samples as it says."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config import Config
from headrace.config.policy import COLDEST, HOTTEST
from headrace_services.rollout.generate import sampling_params
from headrace_services.trainer.data.prompts import GroupBuilder
from headrace_services.trainer.data.sources import Problem
from headrace_services.trainer.demo_models import tiny
from tests.support.model_tokens import TINY

PROBLEM = Problem(7, ({"role": "user", "content": "47+85"},), {"answer": "132"}, "math", "arithmetic")


def config(**generation: Any) -> Config:
    return Config.model_validate({"policy": {"generation": generation}})


@pytest.mark.parametrize(
    "generation",
    [
        {},
        {"temperature": HOTTEST},
        {"temperature": COLDEST},
        {"val_temperature": 0.0},
        {"val_temperature": HOTTEST},
        {"val_temperature": COLDEST},
        {"top_p": 1e-9, "top_k": 1, "val_top_k": -1},
        {"top_k": 10**6, "val_top_p": 1.0, "val_top_k": 0},
        {"stop_strings": ["="], "stop_token_ids": [0]},
        {"max_new_tokens": 1},
    ],
)
def test_every_accepted_extreme_is_a_request_that_the_engine_takes(generation: dict[str, Any]) -> None:
    made = GroupBuilder(config(**generation), tiny.make_tokenizer(), TINY)
    for group in (made.train_group(PROBLEM, 0, 0), made.validation_group(PROBLEM, 1, 0)):
        params = sampling_params(group.sampling, 0)
        assert params.temperature == group.sampling.temperature


@pytest.mark.parametrize(
    ("generation", "key"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": 0.009}, "temperature"),
        ({"temperature": 0.0}, "temperature"),
        ({"val_temperature": 2.01}, "val_temperature"),
        ({"val_temperature": 0.005}, "val_temperature"),
        ({"stop_strings": [""]}, "stop_strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_what_the_engine_refuses_for_any_prompt_is_a_config_error(generation: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        config(**generation)
