"""Problems whose prompts are too long: named, or left out from the start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, ServiceError
from headrace.config import Config
from headrace.run import prompt_counts
from headrace.run.prompt_counts import PromptRecord
from headrace_services.trainer.data import Prompts
from headrace_services.trainer.data.model_tokens import ModelTokens
from headrace_services.trainer.demo_models import tiny, tiny_calculator
from tests.support.model_tokens import TINY


def prompts(
    tmp_path: Path, *questions: str, longest: int = 6, others: dict[str, Any] | None = None, **data: Any
) -> Prompts:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"input": question, "output": "1"}) + "\n" for question in questions))
    source = {"data_path": str(path), "env_name": "math"}
    config = Config.model_validate(
        {
            "data": {"train": source, "shuffle": False, "max_input_seq_length": longest, **data},
            "env": {"math": {}},
            "policy": {"generation": {"max_new_tokens": 6}},
            **(others or {}),
        }
    )
    return Prompts(config, tiny.make_tokenizer(), TINY)


def test_a_prompt_that_is_too_long_ends_the_run_first(tmp_path: Path) -> None:
    said = r"data\.train\[0\]: the prompt of sums problem 1 \(.*sums\.jsonl:2\) has 9 tokens, more than data\.max_input_seq_length 6"
    with pytest.raises(ConfigError, match=said + r"; raise it.*data\.overlong_prompts=leave_out"):
        prompts(tmp_path, "1+1", "47+85+3")
    with pytest.raises(ConfigError, match=r"2 of its 3 prompts"):
        prompts(tmp_path, "1+1", "47+85+3", "47+85+4")


def stop_at(metric: str) -> dict[str, Any]:
    return {"grpo": {"stop_at_validation_metric": metric, "stop_at_validation_threshold": 0.9}}


def best_by(metric: str) -> dict[str, Any]:
    return {"checkpointing": {"metric_name": metric}}


@pytest.mark.parametrize(
    ("tasks", "others", "said"),
    [
        ("", stop_at("accuracy"), "no held-out prompts"),
        ("", best_by("val:accuracy"), None),  # the default
        ("a", stop_at("val:accuracy"), None),
        ("a", stop_at("accuracy/a"), "give one of accuracy$"),  # the only task has no metric of its own
        ("ab", stop_at("accuracy/a"), None),
        ("ab", stop_at("val:accuracy/c"), "give one of accuracy, accuracy/a, accuracy/b$"),
        ("ab", best_by("val:accuracy/c"), r"checkpointing\.metric_name val:accuracy/c"),
        ("ab", best_by("val:accuracy/b"), None),
    ],
)
def test_a_metric_that_no_validation_has_ends_the_run_first(
    tmp_path: Path, tasks: str, others: dict[str, Any], said: str | None
) -> None:
    held_out = []
    for task in tasks:
        path = tmp_path / f"{task}.jsonl"
        path.write_text(json.dumps({"input": f"{ord(task)}", "output": "1"}) + "\n")
        held_out.append({"data_path": str(path), "env_name": "math"})
    if said is None:
        prompts(tmp_path, "1+1", others=others, validation=held_out)
    else:
        with pytest.raises(ConfigError, match=said):
            prompts(tmp_path, "1+1", others=others, validation=held_out)


def test_a_validation_set_that_is_never_reached_is_named(tmp_path: Path) -> None:
    held_out = []
    for task, count in (("first", 3), ("second", 2)):
        path = tmp_path / f"{task}.jsonl"
        path.write_text("".join(json.dumps({"input": f"{count}*{i}", "output": "1"}) + "\n" for i in range(count)))
        held_out.append({"data_path": str(path), "env_name": "math"})
    for most, said in (
        (5, "5 to validate on"),
        (4, "5 to validate on, the first 4 each time (grpo.max_val_samples)"),
        (3, "5 to validate on, the first 3 each time (grpo.max_val_samples), none of second"),
    ):
        made = prompts(tmp_path, "1+1", others={"grpo": {"max_val_samples": most}}, validation=held_out)
        line, _ = made.counts.lines(made._config)
        assert line == f"prompts: 1 to train on, {said}"


def test_the_problem_of_a_group_is_found_by_its_place(tmp_path: Path) -> None:
    """Whoever enqueued it, and in validation too."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"input": "8+8", "output": "16"}\n')
    made = prompts(
        tmp_path, "1+1", "2+2", "1+2", shuffle=True, validation={"data_path": str(held_out), "env_name": "math"}
    )
    for order in (2, 0, 1):
        (group,) = made.train([order])
        found = made.find("train", order)
        assert found is not None
        problem, epoch = found
        assert (problem.messages, f"e{epoch}-train-{problem.index}") == (group.messages, group.id)
        assert problem.row == (str(tmp_path / "sums.jsonl"), problem.index + 1)
    assert made.find("train", made.total) is None
    validated = made.find("validation", 0)
    assert validated is not None
    assert validated[0].messages == made.validation(3)[0].messages
    assert made.find("validation", 1) is None


def test_messages_that_the_template_refuses_end_the_run_first(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chats = [
        [{"role": "user", "content": "1+1"}],
        [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}],
    ]
    path.write_text("".join(json.dumps({"input": chat, "output": "1"}) + "\n" for chat in chats))
    train = {"data_path": str(path), "env_name": "math"}
    settings = Config.model_validate({"data": {"train": train}, "env": {"math": {}}})
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('No system role') if messages[0].role == 'system' }}1"
    with pytest.raises(ConfigError, match=r"refuses.*chats problem 1.*system, user: No"):
        Prompts(settings, tokenizer, TINY)


def test_tool_calls_are_shown_as_vllm_shows_those_of_an_agent(tmp_path: Path) -> None:
    """Parquet and clients have arguments as JSON. Most templates write a value; DeepSeek's write the JSON, and refuse a value."""
    asked, said = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": ""}
    arguments = {"expression": "1+1"}
    as_json, as_value = (
        said | {"tool_calls": [{"function": {"name": "calculator", "arguments": each}}]}
        for each in (json.dumps(arguments), arguments)
    )

    def shown(template: str, answer: dict[str, Any]) -> str:
        path = tmp_path / "chats.jsonl"
        path.write_text(json.dumps({"input": [asked, answer, asked], "output": "1"}))
        train = {"data_path": str(path), "env_name": "math"}
        settings = Config.model_validate({"data": {"train": train}, "env": {"math": {}}})
        tokenizer = tiny_calculator.make_tokenizer()
        tokenizer.chat_template = template
        [group] = Prompts(settings, tokenizer, ModelTokens(TINY.ends, len(tokenizer))).train([0])
        return str(tokenizer.decode(group.prompt_token_ids))

    value = shown(tiny_calculator.CHAT_TEMPLATE, as_json)
    assert tiny_calculator.CALL in value
    assert value == shown(tiny_calculator.CHAT_TEMPLATE, as_value)
    asking = "{% for message in messages %}{{ 1 if 'tool_calls' in message else 0 }}{% endfor %}"
    assert shown(asking, said | {"tool_calls": []}) == "000"
    writing = "{% for call in messages[-2:][0].tool_calls %}{{ '1' + call.function.arguments }}{% endfor %}2"
    assert shown(writing, as_json).startswith("1")


def test_a_tool_call_that_the_template_refuses_ends_the_run_first(tmp_path: Path) -> None:
    """Another problem has the same roles, and is not refused."""
    path = tmp_path / "chats.jsonl"
    asked, call = {"role": "user", "content": "1"}, {"function": {"name": "add", "arguments": {}}}
    chats = [[asked, {"role": "assistant", "content": "", "tool_calls": [call] * n}, asked] for n in (2, 1)]
    path.write_text("".join(json.dumps({"input": chat, "output": "1"}) + "\n" for chat in chats))
    settings = Config.model_validate(
        {"data": {"train": {"data_path": str(path), "env_name": "math"}}, "env": {"math": {}}}
    )
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}1{% if message.tool_calls and message.tool_calls|length > 1 %}"
        "{{ raise_exception('A single call at once') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"refuses.*chats problem 0.*A single call at once"):
        Prompts(settings, tokenizer, TINY)


def test_a_token_that_the_model_does_not_know_ends_the_run_first(tmp_path: Path) -> None:
    """In whatever prompt it is."""
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"input": text, "output": "1"}) + "\n" for text in ("1+1", "1=1", "1+2")))
    settings = Config.model_validate(
        {"data": {"train": {"data_path": str(path), "env_name": "math"}}, "env": {"math": {}}}
    )
    tokenizer = tiny.make_tokenizer()
    equals = tokenizer.convert_tokens_to_ids("=")
    with pytest.raises(ConfigError, match=rf"sums problem 1 .*has token {equals} \('='\)"):
        Prompts(settings, tokenizer, ModelTokens(TINY.ends, equals))
    path.write_text(path.read_text().replace("1=1", "1+3"))
    assert Prompts(settings, tokenizer, ModelTokens(TINY.ends, equals)).total == 3


def test_such_problems_are_left_out_where_that_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = prompts(tmp_path, "47+85+3", "1+1", "2+2", "47+85", overlong_prompts="leave_out")
    assert made.total == 2
    assert [group.dataset_index for group in made.train(range(2))] == [1, 2]
    assert "2 of 4 problems" in caplog.text
    assert (made.counts.train, made.counts.too_long) == (2, 2)


def test_where_none_is_left_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train: .*none.*1 prompts.*data\.max_input_seq_length"):
        prompts(tmp_path, "47+85+3", overlong_prompts="leave_out")


def test_an_evaluation_asks_every_set_by_name_and_trains_nothing(tmp_path: Path) -> None:
    evaluate = {"validation": None, "sums": {"data_path": str(tmp_path / "sums.jsonl"), "env_name": "math"}}
    validation = {"dataset_name": "arithmetic", "env_name": "math", "size": 300}
    made = prompts(tmp_path, "1+1", "2+2", "1+1", longest=20, evaluate=evaluate, validation=validation)
    groups = made.validation(0)
    names = [f"v0-validation-{i}" for i in range(300)] + ["v0-sums-0", "v0-sums-1"]
    assert [group.id for group in groups] == names
    assert [group.order for group in groups] == [*range(302)]
    assert (made.total, made.can_validate) == (0, True)
    assert made.left_out == []
    assert made.counts.duplicates_validation == 1


def test_an_evaluation_says_which_prompts_were_too_long_to_be_asked(tmp_path: Path) -> None:
    evaluate = {"sums": {"data_path": str(tmp_path / "sums.jsonl"), "env_name": "math"}}
    made = prompts(tmp_path, "1+1", "47+85+3", evaluate=evaluate, overlong_prompts="leave_out")
    assert [group.id for group in made.validation(0)] == ["v0-sums-0"]
    ((id_, problem, reason),) = made.left_out
    assert (id_, problem.index) == ("v0-sums-1", 1)
    assert "has 9 tokens, more than data.max_input_seq_length 6" in reason


def test_what_is_left_out_and_what_ends_the_run_is_said(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"input": "2+2", "output": "4"}\n' * 3)
    made = prompts(tmp_path, "1+1", "1+1", "2+2", "3+3", validation={"data_path": str(held), "env_name": "math"})
    assert made.counts.lines(config(tmp_path, max_num_epochs=3, num_prompts_per_step=2)) == [
        "prompts: 2 to train on (left out: 1 duplicates, 1 held out for validation), 1 to validate on (left out: 2 "
        "duplicates)",
        "steps: at most 1, when the prompts are used up (grpo.max_num_epochs 3), of grpo.max_num_steps 1000000",
    ]
    two = config(tmp_path, max_num_steps=1, num_prompts_per_step=2)
    assert made.counts.lines(two)[1].startswith("steps: 1 (grpo.max_num_steps)")
    made.counts.check(two)
    with pytest.raises(
        ConfigError, match=r"2 prompts, 2 over .*num_prompts_per_step 3: nothing would be trained.* 1 duplicates"
    ):
        made.counts.check(config(tmp_path, num_prompts_per_step=3))


def config(tmp_path: Path, **grpo: Any) -> Config:
    return Config.model_validate({"run": {"id": "r", "dir": str(tmp_path)}, "grpo": grpo})


def test_the_digest_is_of_the_prompts_and_not_of_their_file(tmp_path: Path) -> None:
    digest = prompts(tmp_path, "1+1", "2+2").counts.digest
    (tmp_path / "elsewhere").mkdir()
    assert prompts(tmp_path / "elsewhere", "1+1", "2+2").counts.digest == digest
    assert prompts(tmp_path, "2+2", "1+1").counts.digest != digest
    assert prompts(tmp_path, "1+1", "2+3").counts.digest != digest


def test_groups_of_another_config_or_of_other_prompts_are_foreign(tmp_path: Path) -> None:
    counts = prompts(tmp_path, "1+1", "2+2").counts
    record = PromptRecord.of(config(tmp_path), counts)
    assert prompt_counts.read(tmp_path) is None
    assert not record.differs(None)
    prompt_counts.write(tmp_path, record)
    assert not record.differs(prompt_counts.read(tmp_path))
    assert not PromptRecord.of(config(tmp_path, max_num_steps=7), counts).differs(record)
    assert PromptRecord.of(config(tmp_path, seed=7), counts).differs(record)
    assert PromptRecord.of(config(tmp_path), prompts(tmp_path, "1+1").counts).differs(record)
    (tmp_path / prompt_counts.FILE).write_text("{")
    with pytest.raises(ServiceError, match=r"prompts\.json.*remove"):
        prompt_counts.read(tmp_path)
