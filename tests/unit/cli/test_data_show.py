"""`headrace data show`: prompts in the order of the run, as the model will see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config import load
from headrace_services.trainer.data import Prompts
from headrace_services.trainer.demo_models import tiny
from tests.support.command import refused, said
from tests.support.model_tokens import TINY


def run(tmp_path: Path, *lines: dict[str, Any], **data: Any) -> Path:
    """The YAML of a run that trains on these lines, with the tokenizer of the demo and of its model the configuration alone."""
    model = tmp_path / "model"
    tiny.make_tokenizer().save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": TINY.vocabulary}))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {
        "data": {"train": {"data_path": "sums.jsonl"}, "default": {"env_name": "math"}, **data},
        "env": {"math": {}},
        "policy": {"model_name": str(model), "generation": {"max_new_tokens": 6}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    return path


SUMS = [{"input": f"{i}+1", "output": str(i + 1), "level": i} for i in range(20)]


def test_the_first_prompts_of_the_runs_own_order(tmp_path: Path) -> None:
    path = run(tmp_path, *SUMS)
    shown = said("data", "show", path, "-n", "2")
    first, second = Prompts(load(path), tiny.make_tokenizer(), TINY).train(range(2))
    at = [first.dataset_index, second.dataset_index]
    assert shown.count("── ") == 2
    for order, (group, index) in enumerate(zip((first, second), at, strict=True)):
        assert f"── {order}: {group.id}, sums, scored by math, {len(group.prompt_token_ids)} tokens" in shown
        assert f"\n<user>{index}+1<asst>\n" in shown
        assert f'environment: {{"level": {index}, "answer": "{index + 1}"}}\n' in shown
    assert at != [0, 1], "it is shuffled"
    assert "prompts: 20 to train on" in shown
    assert "<user>0+1<asst>" in said("data", "show", path, "data.shuffle=false", "-n", "1")


def test_a_prompt_that_the_model_does_not_know_is_refused_as_in_a_run(tmp_path: Path) -> None:
    path = run(tmp_path, *SUMS)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 6}')
    assert "has 6 rows" in refused("data", "show", path)


def test_token_by_token(tmp_path: Path) -> None:
    shown = said("data", "show", run(tmp_path, *SUMS), "data.shuffle=false", "-n", "1", "--tokens")
    tokenizer = tiny.make_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<user>", "0", "+", "1", "<asst>")]
    rows = [line.split() for line in shown.splitlines()]
    for place, (id_, token) in enumerate(zip(ids, ("<user>", "0", "+", "1", "<asst>"), strict=True)):
        assert [str(place), str(id_), token] in rows


def test_the_validation_prompts_with_their_system_prompt(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"input": "2+2", "output": "4"}\n')
    path = run(tmp_path, *SUMS, validation={"data_path": "held.jsonl", "system_prompt": "1"})
    shown = said("data", "show", path, "--split", "validation")
    assert "<sys>1<user>2+2<asst>" in shown
    assert shown.count("── ") == 1
    assert "data.validation has no prompts" in refused("data", "show", run(tmp_path, *SUMS), "--split", "validation")


def test_what_a_data_set_holds_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    hostile = "\x1b]0;mine\x07\x1b[2J[bold]\x9b1m\0\u202e"
    path = run(tmp_path, {"input": "1+1", "output": "2", hostile: hostile})
    shown = said("data", "show", path)
    assert r"\u001b]0;mine\u0007\u001b[2J[bold]\x9b1m\u0000\u202e" in shown
    assert not any(character in shown for character in "\x1b\x07\x9b\0\u202e")


@pytest.mark.parametrize("flags", [[], ["--tokens"]])
def test_a_tokens_text_does_nothing_to_the_terminal(tmp_path: Path, flags: list[str]) -> None:
    path = run(tmp_path, {"input": "1+1", "output": "2"})
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["\x1b[2J"])
    tokenizer.chat_template = "{{ messages[0].content }}\x1b[2J"
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": len(tokenizer)}))
    shown = said("data", "show", path, *flags)
    assert r"\x1b[2J" in shown
    assert "\x1b" not in shown


def test_a_line_that_cant_be_used_is_named(tmp_path: Path) -> None:
    path = run(tmp_path, {"input": "1+1", "output": "2"}, {"input": "1+2"})
    assert "sums.jsonl:2: no field 'output'" in refused("data", "show", path)
