"""Every model that a run starts from is looked for before anything else, and refused by the key that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace_services.trainer.control.context import Dependencies
from headrace_services.trainer.demo_models.tiny import CHAT_TEMPLATE, make_tokenizer
from headrace_services.trainer.main import main
from headrace_services.trainer.network.policy_model import load_named_tokenizer

OPD = {"adv_estimator": {"name": "opd", "teacher_model_name": "./no-such-teacher"}}


async def buffer(url: str, run: str | None, patience_s: float) -> Any:
    raise ServiceError("the run went on to the buffer")


def complaint(tmp_path: Path, **sections: Any) -> str:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    make_tokenizer().save_pretrained(model)
    run = {"id": "r", "dir": str(tmp_path)}
    data = {"train": {"dataset_name": "arithmetic", "env_name": "math", "size": 100}}
    given = {
        "run": run,
        "trainer": {"port": 0},
        "policy": {"model_name": str(model)},
        "data": data,
        "env": {"math": {}},
    }
    sections = given | sections
    with pytest.raises(ServiceError) as caught:
        main(Config.model_validate(sections), Dependencies(replay=buffer))
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "key", "name"),
    [
        ({"policy": {"model_name": "./no-such-policy"}}, "policy.model_name", "./no-such-policy"),
        ({"grpo": OPD}, "grpo.adv_estimator.teacher_model_name", "./no-such-teacher"),
        ({"ppo": {}, "value": {"model_name": "./no-such-value"}}, "value.model_name", "./no-such-value"),
    ],
    ids=["policy", "teacher", "value"],
)
def test_a_model_that_is_not_there_is_refused_by_its_key_first(
    tmp_path: Path, sections: dict[str, Any], key: str, name: str
) -> None:
    assert complaint(tmp_path, **sections).startswith(f"{key}: the directory {name} does not exist;")


@pytest.mark.parametrize(
    "sections",
    [
        {"grpo": {}, "value": {"model_name": "./no-such-value"}},
        {"ppo": {"adv_estimator": {"name": "raw_reward"}}, "value": {"model_name": "./no-such-value"}},
        {"ppo": {}},
    ],
    ids=["grpo", "raw-reward", "the-policy-s-own"],
)
def test_a_value_model_that_nothing_loads_is_not_looked_for(tmp_path: Path, sections: dict[str, Any]) -> None:
    assert complaint(tmp_path, **sections) == "the run went on to the buffer"


def test_mistrals_own_files_beside_a_tokenizer_are_not_read(tmp_path: Path) -> None:
    """transformers takes them where mistral-common is installed, which vLLM needs: their tokenizer has no chat template."""
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "tekken.json").write_text("{}")
    tokenizer = load_named_tokenizer("policy.model_name", str(tmp_path))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    asked = [{"role": "user", "content": "1+1"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(asked, return_dict=False)) == "<user>1+1"
