"""FILE.py:FUNCTION: reward functions as TRL and verl call them, and which functions are refused before anything runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import Environment, Sample
from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace.env import environment_file
from headrace.env.reward_function import TRL, VERL
from headrace.env.server import BatchScorer
from headrace.env.wire import score_from_wire, score_to_wire
from headrace.launch import environment_processes
from headrace.records.score import NOT_APPLICABLE, Score


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", [*sys.path])  # it is added to
    return tmp_path / "rewards.py"


def loaded(file: Path, text: str, name: str = "reward") -> Environment:
    file.write_text(text)
    return environment_file.load(f"{file}:{name}")


def scored(environment: Environment, samples: Sequence[Sample]) -> list[Score]:
    """The scores of one call. Each crosses the wire."""
    scores = asyncio.run(BatchScorer(environment).score(samples, 20.0))
    return [score_from_wire(score_to_wire(score)) for score in scores]


def ask(text: str, **columns: Any) -> Sample:
    return Sample(text, columns, messages=({"role": "user", "content": "2+2?"},), completion_token_ids=(7, 8))


WAYS = [("def", ""), ("async def", "await asyncio.sleep(0)"), ("def", "pass")]


@pytest.mark.parametrize(("way", "first"), WAYS)
def test_a_function_of_trl_gets_lists_and_returns_one(file: Path, way: str, first: str) -> None:
    text = f"""
import asyncio
{way} reward(prompts, completions, completion_ids, answer, **kwargs):
    {first or "pass"}
    assert [p[-1]["content"] for p in prompts] == ["2+2?"] * 2 and completion_ids == [[7, 8]] * 2
    assert kwargs["level"] == [1, None]
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]
"""
    first_, second = scored(loaded(file, text), [ask("4", answer="4", level=1), ask("5", answer="4")])
    assert (first_.status, first_.reward, second.reward) == ("SCORED", 1.0, 0.0)
    assert (first_.environment, len(first_.build)) == ("reward", 12)


def test_where_the_prompt_is_text_prompts_and_completions_are(file: Path) -> None:
    text = "def reward(completions, prompts):\n    return [float(c == '4' and p == '2+2') for c, p in zip(completions, prompts)]"
    as_text, as_messages = scored(loaded(file, text), [ask("4", prompt="2+2"), ask("4")])
    assert (as_text.reward, as_messages.reward) == (1.0, 0.0)


def test_of_a_multi_turn_conversation_the_completion_is_what_followed(file: Path) -> None:
    said = (
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "5"},
        {"role": "tool", "content": "no"},
    )
    text = "def reward(completions, **kwargs):\n    return [len(c) for c in completions]"
    (score,) = scored(loaded(file, text), [Sample("5", {}, messages=said[:1], conversation=said)])
    assert score.reward == 2


@pytest.mark.parametrize("way", ["def", "async def"])
def test_what_raises_fails_its_sample_alone_with_its_line(file: Path, way: str) -> None:
    text = f"{way} reward(completions, **kwargs):\n    return [1 / int(c[0]['content']) for c in completions]\n"
    half, zero, none = scored(loaded(file, text), [ask("2"), ask("0"), ask("x")])
    assert (half.status, half.reward) == ("SCORED", 0.5)
    assert (zero.status, zero.reward, none.status) == ("FAILED", None, "FAILED")
    assert zero.message.startswith("ZeroDivisionError: ")
    assert f"{file}:2" in zero.message
    assert none.message.startswith("ValueError: ")
    assert zero.traceback.splitlines()[1].lstrip().startswith(f'File "{file}"')


@pytest.mark.parametrize("raised", ["SystemExit", "asyncio.CancelledError", "GeneratorExit"])
@pytest.mark.parametrize("way", ["def", "async def", "in a task"])
def test_whatever_is_raised_ends_one_sample(file: Path, way: str, raised: str) -> None:
    text = (
        f"import asyncio\n{'async def' if way == 'in a task' else way} judge(completions, **kwargs):\n"
        f"    if any(c[0]['content'] == 'bad' for c in completions):\n        raise {raised}\n    return [1.0] * len(completions)\n"
    )
    text += {
        "in a task": "async def reward(completions):\n    return await asyncio.create_task(judge(completions))\n"
    }.get(way, "reward = judge\n")
    good, bad = scored(loaded(file, text), [ask("good"), ask("bad")])
    assert (good.status, good.reward, bad.status) == ("SCORED", 1.0, "FAILED")
    assert bad.message.startswith(raised.rpartition(".")[2])


def test_none_is_not_applicable_and_never_a_zero(file: Path) -> None:
    text = "def reward(completions, task, **kwargs):\n    return [None if t == 'code' else 1.0 for t in task]"
    math, code = scored(loaded(file, text), [ask("", task="math"), ask("", task="code")])
    assert math.reward == 1.0
    assert (code.status, code.reward, code.metadata) == ("INVALID", None, {NOT_APPLICABLE: True})
    assert "reward returned None" in code.message


@pytest.mark.parametrize("returned", ["[1.0]", "[1.0] * 3", "None", "[float('nan')] * 2", "['1'] * 2", "1.0"])
def test_law_7_failure_is_not_zero_any_other_return_fails(file: Path, returned: str) -> None:
    scores = scored(loaded(file, f"def reward(completions, **kwargs):\n    return {returned}"), [ask("a"), ask("b")])
    assert {(score.status, score.reward) for score in scores} == {("FAILED", None)}


def test_what_trl_offers_to_log_is_stored_with_the_score(file: Path) -> None:
    text = """
def reward(completions, log_metric, log_extra, trainer_state=None, **kwargs):
    assert trainer_state is None
    log_metric("share", 0.5)
    log_extra("first", [c[0]["content"][:1] for c in completions])
    return [1.0] * len(completions)
"""
    first, second = scored(loaded(file, text), [ask("ab"), ask("cd")])
    assert (first.components, first.metadata, second.metadata) == ({"share": 0.5}, {"first": "a"}, {"first": "c"})


def test_the_trainers_state_is_refused_in_words_where_it_is_read(file: Path) -> None:
    text = (
        "def reward(completions, trainer_state, **kwargs):\n    return [trainer_state.global_step] * len(completions)"
    )
    (score,) = scored(loaded(file, text), [ask("")])
    assert score.status == "FAILED"
    assert "trainer_state.global_step" in score.message


def test_a_column_that_the_data_lacks_is_named(file: Path) -> None:
    text = "def reward(completions, solution):\n    return [1.0]"
    (score,) = scored(loaded(file, text), [ask("", answer="4", level=1)])
    assert score.status == "FAILED"
    assert "solution" in score.message
    assert "answer, level" in score.message


ROW = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7}}


@pytest.mark.parametrize(("way", "first"), WAYS)
def test_a_function_of_verl_gets_one_completion(file: Path, way: str, first: str) -> None:
    text = f"""
import asyncio
{way} reward(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    {first or "pass"}
    assert (data_source, extra_info, kwargs) == ("gsm8k", {{"index": 7}}, {{}})
    return {{"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}}
"""
    right, wrong = scored(loaded(file, text), [ask("4", **ROW), ask("5", **ROW)])
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert (right.components, right.metadata) == ({"acc": 1.0}, {"pred": "4"})


def test_verl_takes_a_number_too_and_the_answer_of_other_data(file: Path) -> None:
    text = "def reward(solution_str, ground_truth):\n    return solution_str == ground_truth"
    assert [score.reward for score in scored(loaded(file, text), [ask("4", answer="4")])] == [1.0]


@pytest.mark.parametrize(
    "returned", ["{'acc': 1}", "{'score': None}", "{'score': float('nan')}", "None", "{'score': 1, 'x': 1e999}"]
)
def test_law_7_failure_is_not_zero_for_verl_too(file: Path, returned: str) -> None:
    (score,) = scored(loaded(file, f"def reward(solution_str, **kwargs):\n    return {returned}"), [ask("", **ROW)])
    assert (score.status, score.reward) == ("FAILED", None)


@pytest.mark.parametrize(
    "function",
    [
        "def reward(sample): ...",
        "def reward(completion, **kwargs): ...",
        "async def reward(self, e): ...",
        "def reward(completions, solution_str): ...",
        "def reward(completions, /, **kwargs): ...",
        "def reward(*completions): ...",
    ],
)
def test_another_signature_is_refused_with_those_that_are_known(file: Path, function: str) -> None:
    file.write_text(function)
    config = Config.model_validate({"env": {"mine": {"target": f"{file}:reward"}}})
    with pytest.raises(ConfigError) as refused:
        environment_processes.check(config)
    said = str(refused.value)
    assert said.startswith(f"env.mine.target {file}:reward: reward(")
    assert all(token in said for token in ("completions", "solution_str", "headrace.Environment"))


def test_what_only_running_shows_is_refused_when_it_is_loaded(file: Path) -> None:
    for text in ("import functools\nreward = functools.partial(max, 1)", "reward = lambda sample: 1.0"):
        with pytest.raises(ConfigError, match="solution_str"):
            loaded(file, text)
    made = loaded(
        file,
        "def make(least):\n    def inner(completions, **kwargs):\n        return [least]\n    return inner\nreward = make(2)",
    )
    assert [score.reward for score in scored(made, [ask("")])] == [2.0]


def test_config_check_tells_whose_function_it_is(file: Path) -> None:
    file.write_text("def a(completions, **kwargs): ...\ndef b(solution_str, ground_truth): ...")
    config = Config.model_validate({"env": {name: {"target": f"{file}:{name}"} for name in "ab"}})
    environment_processes.check(config)
    for line, whose in zip(environment_processes.describe(config), (TRL, VERL), strict=True):
        assert line.endswith(f"as for {whose}")


def test_the_one_reward_function_of_a_file_needs_no_name(file: Path) -> None:
    file.write_text("def helper(text): ...\nasync def reward(completions, **kwargs): ...")
    assert environment_file.complete_target(str(file)) == f"{file}:reward"
    file.write_text("def one(completions): ...\ndef two(solution_str): ...")
    with pytest.raises(ConfigError, match="one, two"):
        environment_file.complete_target(str(file))


def test_an_edit_of_the_file_is_another_build(file: Path) -> None:
    text = "HELP = 1\ndef reward(completions, **kwargs):\n    return [HELP]"
    first = loaded(file, text).build
    assert loaded(file, text).build == first != loaded(file, text.replace("1", "2")).build


def test_a_function_of_trl_runs_in_one_call_at_a_time(file: Path) -> None:
    assert loaded(file, "def reward(completions): ...").concurrency == 1
    assert loaded(file, "async def reward(completions): ...").concurrency == 16
    assert loaded(file, "def reward(solution_str): ...").concurrency == 16
