"""Problems whose prompts are too long: named, or left out from the start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config
from headrace.errors import ConfigError
from headrace_services.trainer.data import Prompts
from headrace_services.trainer.demo_models import tiny


def prompts(tmp_path: Path, *questions: str, longest: int = 6, **data: Any) -> Prompts:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"input": question, "output": "1"}) + "\n" for question in questions))
    source = {"data_path": str(path), "env_name": "math"}
    config = Config.model_validate(
        {
            "data": {"train": source, "shuffle": False, "max_input_seq_length": longest, **data},
            "env": {"math": {}},
            "policy": {"generation": {"max_new_tokens": 6}},
        }
    )
    return Prompts(config, tiny.make_tokenizer())


def test_a_prompt_that_is_too_long_ends_the_run_by_its_name(tmp_path: Path) -> None:
    made = prompts(tmp_path, "1+1", "47+85+3")
    assert made.total == 2
    assert len(made.train([0])) == 1
    with pytest.raises(ConfigError, match=r"sums problem 1 has 9 tokens.*data\.overlong_prompts=leave_out"):
        made.train([1])


def test_such_problems_are_left_out_where_that_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = prompts(tmp_path, "47+85+3", "1+1", "2+2", "47+85", overlong_prompts="leave_out")
    assert made.total == 2
    assert [group.dataset_index for group in made.train(range(2))] == [1, 2]
    assert "data.train: 2 of 4 problems are left out" in caplog.text


def test_where_none_is_left_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train: none of its 1 prompts fits; raise data\.max_input_seq_length"):
        prompts(tmp_path, "47+85+3", overlong_prompts="leave_out")
