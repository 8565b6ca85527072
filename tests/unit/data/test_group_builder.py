from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, ServiceError
from headrace.config import Config
from headrace.records.trajectory import Group
from headrace_services.trainer.data.model_tokens import ModelTokens
from headrace_services.trainer.data.prompts import GroupBuilder
from headrace_services.trainer.data.sources import Problem
from headrace_services.trainer.demo_models import tiny
from tests.support.model_tokens import TINY

PROBLEM = Problem(7, ({"role": "user", "content": "47+85"},), {"answer": "132"}, "math", "arithmetic")


def builder(tokenizer: Any = None, **sections: Any) -> GroupBuilder:
    config = Config.model_validate({"policy": {"generation": {"max_new_tokens": 6}}, **sections})
    return GroupBuilder(config, tokenizer or tiny.make_tokenizer(), TINY)


def test_a_group_asks_in_the_models_own_words() -> None:
    group = builder(grpo={"num_generations_per_prompt": 4}).train_group(PROBLEM, order=19, epoch=1)
    tokenizer = tiny.make_tokenizer()
    assert tokenizer.decode(group.prompt_token_ids) == "<user>47+85<asst>"
    assert (group.id, group.lane, group.order, group.n, group.dataset_index) == ("e1-train-7", "train", 19, 4, 7)
    assert (group.env_name, group.task_name) == ("math", "arithmetic")
    assert group.extra_env_info == {"answer": "132"}
    assert group.sampling.stop_token_ids == (tokenizer.eos_token_id,)
    assert (group.sampling.temperature, group.sampling.max_new_tokens) == (1.0, 6)
    assert Group.decode(group.encode()).sampling == group.sampling


def test_validation_asks_once_at_its_own_temperature() -> None:
    generation = {"max_new_tokens": 6, "temperature": 0.7, "val_temperature": 0}
    made = builder(policy={"generation": generation})
    group = made.validation_group(PROBLEM, version=3, position=2)
    assert (group.lane, group.n, group.order, group.sampling.temperature) == ("validation", 1, 2, 0)
    assert group.id != made.validation_group(PROBLEM, version=4, position=2).id
    assert made.train_group(PROBLEM, 0, 0).sampling.temperature == 0.7
    several = builder(grpo={"val_num_generations_per_prompt": 4})
    assert several.validation_group(PROBLEM, version=3, position=2).n == 4
    unset = builder(policy={"generation": {"max_new_tokens": 6, "temperature": 0.7}})
    assert unset.validation_group(PROBLEM, 3, 2).sampling.temperature == 0.7


@pytest.mark.parametrize(
    ("keys", "train", "validation"),
    [
        ({}, (None, 1.0), (None, 1.0)),
        ({"top_k": -1, "val_top_p": 0.5}, (None, 1.0), (None, 0.5)),
        ({"top_k": 20, "top_p": 0.9}, (20, 0.9), (20, 0.9)),
        ({"top_k": 20, "top_p": 0.9, "val_top_k": -1, "val_top_p": 1.0}, (20, 0.9), (None, 1.0)),
        ({"top_k": 20, "val_top_k": 3}, (20, 1.0), (3, 1.0)),
    ],
)
def test_both_lanes_filter_as_configured(keys: dict[str, Any], train: Any, validation: Any) -> None:
    made = builder(policy={"generation": {"max_new_tokens": 6, **keys}})
    found = [made.train_group(PROBLEM, 0, 0), made.validation_group(PROBLEM, 3, 2)]
    assert [(g.sampling.top_k, g.sampling.top_p) for g in found] == [train, validation]
    assert [Group.decode(g.encode()).sampling for g in found] == [g.sampling for g in found]


def model(folder: Path, *, ends: object = 1, vocabulary: int = 20) -> dict[str, Any]:
    """The `policy` of a model of which there are these files alone."""
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": vocabulary, "eos_token_id": 3})
    )
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return {"model_name": str(folder)}


@pytest.mark.parametrize(
    ("ends", "found"), [([1, 6], (1, 6, 9)), (7, (1, 7, 9)), (0, (1, 0, 9)), ([], (1, 9)), (None, (1, 3, 9))]
)
def test_the_end_tokens_are_those_that_an_engine_stops_at(tmp_path: Path, ends: object, found: tuple[int, ...]) -> None:
    tokenizer, generation = tiny.make_tokenizer(), {"stop_token_ids": [9, 1], "stop_strings": ["="]}
    config = Config.model_validate({"policy": {**model(tmp_path, ends=ends), "generation": generation}})
    tokens = ModelTokens.load(config, tokenizer)
    assert tokens.ends == found
    sampling = GroupBuilder(config, tokenizer, tokens).train_group(PROBLEM, 0, 0).sampling
    assert (sampling.stop_token_ids, sampling.stop_strings) == (found, ("=",))


def test_bad_words_are_tokens_that_neither_lane_samples(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer()
    config = Config.model_validate({"policy": {**model(tmp_path), "generation": {"bad_words": ["7", "+"]}}})
    tokens = ModelTokens.load(config, tokenizer)
    assert tokens.excluded == tuple(tokenizer.convert_tokens_to_ids(["7", "+"]))
    made = GroupBuilder(config, tokenizer, tokens)
    for group in (made.train_group(PROBLEM, 0, 0), made.validation_group(PROBLEM, 3, 2)):
        assert Group.decode(group.encode()).sampling.bad_words == ("7", "+")


@pytest.mark.parametrize("word", ["47", tiny.make_tokenizer().eos_token])
def test_a_bad_word_that_cant_be_left_out_is_refused(tmp_path: Path, word: str) -> None:
    """Of several tokens, or the end of an answer."""
    config = Config.model_validate({"policy": {**model(tmp_path), "generation": {"bad_words": [word]}}})
    with pytest.raises(ConfigError, match=r"^policy\.generation\.bad_words has "):
        ModelTokens.load(config, tiny.make_tokenizer())


def test_a_run_in_which_nothing_ends_an_answer_is_refused(tmp_path: Path) -> None:
    tokenizer, policy = tiny.make_tokenizer(), model(tmp_path, ends=[])
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"end token.*stop_token_ids.*stop_strings"):
        ModelTokens.load(Config.model_validate({"policy": policy}), tokenizer)
    for generation, found in (({"stop_token_ids": [9]}, (9,)), ({"stop_strings": ["="]}, ())):
        config = Config.model_validate({"policy": {**policy, "generation": generation}})
        assert ModelTokens.load(config, tokenizer).ends == found


@pytest.mark.parametrize("ends", [-1, 20, [1, 20], "</s>", ["</s>"], [None], 1.5])
def test_an_end_token_that_the_model_does_not_know_is_refused(tmp_path: Path, ends: object) -> None:
    """vLLM refuses every request that has such a token."""
    config = Config.model_validate({"policy": model(tmp_path, ends=ends)})
    with pytest.raises(ConfigError, match=r"end tokens .*policy\.model_name.*generation_config"):
        ModelTokens.load(config, tiny.make_tokenizer())


@pytest.mark.parametrize("text", [b"", b'{"eos_token_id": [1, 6', b"[]", b"\xff"])
def test_a_damaged_file_is_not_taken_for_a_missing_one(tmp_path: Path, text: bytes) -> None:
    config = Config.model_validate({"policy": model(tmp_path)})
    (tmp_path / "generation_config.json").write_bytes(text)
    with pytest.raises(ServiceError, match=r"policy\.model_name.*generation_config\.json"):
        ModelTokens.load(config, tiny.make_tokenizer())


def test_a_prompt_with_an_unknown_token_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer()
    ids = tokenizer.encode("47+85")
    config = Config.model_validate({"policy": model(tmp_path, vocabulary=max(ids))})
    known = ModelTokens((1,), vocabulary=max(ids) + 1)
    GroupBuilder(config, tokenizer, known).encode(PROBLEM)
    with pytest.raises(ConfigError, match=rf"problem 7 .*token {max(ids)} \('.'\).*{max(ids)} rows"):
        GroupBuilder(config, tokenizer, ModelTokens.load(config, tokenizer)).encode(PROBLEM)


def test_a_template_without_a_mark_of_the_answer_is_known() -> None:
    tokenizer = tiny.make_tokenizer()
    assert builder(tokenizer).generation_is_prompted
    tokenizer.chat_template = "{% for message in messages %}<user>{{ message.content }}{% endfor %}"
    assert not builder(tokenizer).generation_is_prompted


def test_a_prompt_that_fits_exactly_is_taken() -> None:
    policy = {"max_total_sequence_length": 13, "generation": {"max_new_tokens": 6}}
    assert (
        builder(policy=policy, data={"max_input_seq_length": 7}).train_group(PROBLEM, 0, 0).prompt_token_ids.size == 7
    )


@pytest.mark.parametrize(("context", "new"), [(13, 6), (12, 5), (8, 1), (600, 6)])
def test_prompt_and_completion_end_with_the_context(context: int, new: int) -> None:
    made = builder(policy={"max_total_sequence_length": context, "generation": {"max_new_tokens": 6}})
    assert made.train_group(PROBLEM, 0, 0).sampling.max_new_tokens == new


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    made = builder(policy={"max_total_sequence_length": 7, "generation": {"max_new_tokens": 6}})
    with pytest.raises(ConfigError, match=r"problem 7 has 7 tokens.*policy\.max_total_sequence_length 7"):
        made.train_group(PROBLEM, 0, 0)


def test_a_prompt_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"problem 7 has 7 tokens.*data\.max_input_seq_length 6"):
        builder(data={"max_input_seq_length": 6}).validation_group(PROBLEM, 0, 0)


def test_messages_that_the_chat_template_has_no_form_for_are_named() -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}"
    messages = ({"role": "system", "content": "1"}, {"role": "user", "content": "2"})
    said = (
        r"\(policy\.model_name\) refuses the prompt of math problem 7, with messages of system, user: System role not"
    )
    with pytest.raises(ConfigError, match=said):
        builder(tokenizer).train_group(dataclasses.replace(PROBLEM, messages=messages, task_name="math"), 0, 0)
    tokenizer.chat_template = "{{ messages[0].content + none }}"
    with pytest.raises(ConfigError, match=r"refuses.*problem 7.*user"):
        builder(tokenizer).train_group(PROBLEM, 0, 0)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"template.*policy\.tokenizer\.name"):
        builder(tokenizer)
