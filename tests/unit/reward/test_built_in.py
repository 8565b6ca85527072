"""The built-in environments: extraction, mathematical equality, and reasoning-gym's own rules."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from headrace import Sample, Score
from headrace.base.tagged_json import from_json, to_json
from headrace.config.environments import (
    KINDS,
    LengthConfig,
    MathConfig,
    MathMultiRewardConfig,
    ReasoningGymConfig,
    RegexConfig,
    SandboxedConfig,
)
from headrace.env.wire import sample_from_wire, sample_to_wire
from headrace.v1.trajectory_pb2 import Trajectory
from headrace_services.reward.environments import make
from headrace_services.reward.environments.base import Extract, extract_answer
from headrace_services.reward.environments.math import Math
from headrace_services.reward.environments.math_multi_reward import MathMultiReward
from headrace_services.reward.environments.reasoning_gym import ReasoningGym
from headrace_services.reward.scoring_worker import score_one


@pytest.mark.parametrize("expected", [132, "132", "-7", "007", 0, "12.0", "1/2"])
def test_a_score_told_at_sight_is_what_math_verify_says(expected: object) -> None:
    environment = Math("math", MathConfig())
    plain = ["132", "-7", "7", "-0", "0", "12", "9" * 18]
    for said in (*plain, "007", "0.5", " 132", "132\n", "1e2", "١٣٢", "9" * 19, ""):
        sample = Sample(said, extra_env_info={"answer": expected})
        found = environment.quick_score(sample)
        assert found in (None, environment.judge(sample)), said
        assert (found is not None) == (str(expected) in plain and said in plain), said


@pytest.mark.parametrize(
    ("completion", "how", "answer"),
    [
        ("  42\n", "none", "42"),
        ("7", "last_number", "7"),
        ("3 + 4 = 7.", "last_number", "7"),
        ("first 1, then -2", "last_number", "-2"),
        ("it is 5-3", "last_number", "3"),
        ("that makes 1,234,567 in all", "last_number", "1234567"),
        ("1,2", "last_number", "2"),
        ("about 3.50", "last_number", "3.50"),
        ("the chance is .5", "last_number", "0.5"),
        ("or even -.25.", "last_number", "-0.25"),
        ("that is ...5", "last_number", "5"),
        ("x2 is 9", "last_number", "9"),
        ("none at all", "last_number", None),
        ("", "last_number", None),
        ("<answer> a </answer> or <ANSWER>b\nc</ANSWER>", "answer_tag", "b\nc"),
        ("<answer>open", "answer_tag", None),
        ("Answer: 3\nAnswer : $\\frac{1}{2}$ \nso it is", "answer_line", "$\\frac{1}{2}$"),
        ("the answer is 3", "answer_line", None),
        ("Answer: 3" + "." * 300, "answer_line", None),
    ],
)
def test_extraction(completion: str, how: Extract, answer: str | None) -> None:
    assert extract_answer(completion, how) == answer


def mathematics(completion: str, answer: Any, **env: Any) -> Score:
    environment = Math("math", MathConfig(**env))
    return score_one(environment, sample_to_wire(Sample(completion, {"answer": answer}, environment="math")))


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("132", "132"),
        ("132", 132),
        ("The answer is 132.", "132"),
        ("so \\boxed{132}, not 7", "132"),
        ("-5", "-5"),
        ("$\\frac{1}{2}$", "0.5"),
        ("0.5", "\\frac{1}{2}"),
        ("\\boxed{x^2+2x+1}", "(x+1)^2"),
        ("\\boxed{7}", "\\boxed{7}"),
    ],
)
def test_math_right_answers_earn_1(completion: str, answer: Any) -> None:
    score = mathematics(completion, answer)
    assert (score.status, score.reward) == ("SCORED", 1.0)
    assert score.build.startswith("math-verify ")


@pytest.mark.parametrize(("completion", "answer"), [("131", "132"), ("", "132"), ("no idea", "132"), ("1", "-1")])
def test_math_wrong_answers_earn_0(completion: str, answer: str) -> None:
    score = mathematics(completion, answer)
    assert (score.status, score.reward) == ("SCORED", 0.0)


def test_math_of_an_answer_line_counts_nothing_else() -> None:
    assert mathematics("7\nAnswer: $42$", "42", extract="answer_line").reward == 1
    assert mathematics("42\nAnswer: 41", "42", extract="answer_line").reward == 0
    assert mathematics("so it is 42", "42", extract="answer_line").reward == 0
    assert mathematics("so it is 42", "42").reward == 1


@pytest.mark.parametrize("answer", [None, "", " ", True, ["1"], {"x": 1}])
def test_math_without_an_answer_to_compare_with_is_invalid(answer: Any) -> None:
    score = mathematics("132", answer)
    assert (score.status, score.reward) == ("INVALID", None)
    assert "extra_env_info.answer" in score.message


def test_a_completion_cut_off_earns_0_where_the_end_is_required() -> None:
    sample = Sample("132", {"answer": "132"}, finish_reason="length", environment="math")
    assert score_one(Math("math", MathConfig(require_stop=True)), sample_to_wire(sample)).reward == 0
    assert score_one(Math("math", MathConfig(require_stop=False)), sample_to_wire(sample)).reward == 1


def entry_of(task: str, **config: Any) -> dict[str, Any]:
    dataset = reasoning_gym.create_dataset(task, size=1, seed=3, **config)
    return {"task": task, "task_config": config, "entry": to_json(dataset[0])}


def gym(completion: str, info: dict[str, Any], **env: Any) -> Score:
    sample = Sample(completion, info, environment="gym")
    return score_one(ReasoningGym("gym", ReasoningGymConfig(**env)), sample_to_wire(sample))


# Text that some rule can't read and raises for.
UNREADABLE = [
    "",
    "no",
    "-",
    "[",
    "null",
    "[null]",
    "[1]",
    "1e400",
    "1,nan",
    "\x00",
    "(" * 2000,
    '{"a":' * 5000 + "}" * 5000,
    "9" * 5000,
]
# Makes nothing without a list of other tasks.
TASKS = sorted(set(DATASETS) - {"composite"})


def test_every_task_scores_an_entry_from_the_wire_as_its_own() -> None:
    environment = ReasoningGym("gym", ReasoningGymConfig())
    for task in TASKS:
        dataset = reasoning_gym.create_dataset(task, size=1, seed=3)
        entry = dataset[0]
        answer = str(entry["answer"])
        info = {"task": task, "entry": to_json(entry)}
        wire = Trajectory.FromString(sample_to_wire(Sample(answer, info, environment="gym")).SerializeToString())
        score = score_one(environment, wire)
        told = sample_from_wire(wire).extra_env_info
        assert told == info, task
        assert from_json(told["entry"])["metadata"] == entry["metadata"], task
        assert (score.status, score.message) == ("SCORED", ""), task
        assert score.reward == pytest.approx(dataset.score_answer(answer.strip(), entry)), task
        for text in UNREADABLE:
            unreadable = score_one(environment, sample_to_wire(Sample(text, info, environment="gym")))
            assert (unreadable.status, unreadable.message) == ("SCORED", ""), (task, text)


def test_problems_with_fractions_come_from_the_wire_as_well() -> None:
    dataset = reasoning_gym.create_dataset("gsm_symbolic", size=20, seed=0)
    entries = [dataset[place] for place in range(20)]
    assert any(isinstance(value, Fraction) for entry in entries for value in entry["metadata"]["variables"].values())
    for entry in entries:
        assert gym(entry["answer"], {"task": "gsm_symbolic", "entry": to_json(entry)}).reward == 1


def test_a_task_scores_by_the_arguments_it_was_made_with() -> None:
    info = entry_of("decimal_arithmetic", max_num_decimal_places=2, min_num_decimal_places=2)
    coarse = str(round(float(info["entry"]["answer"]), 2) + 0.003)
    assert gym(coarse, info).reward == 1
    assert gym(coarse, {**info, "task_config": {"max_num_decimal_places": 6}}).reward == 0


def test_extraction_and_threshold() -> None:
    info = entry_of("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    answer = info["entry"]["answer"]
    wordy = f"I think it is {answer}."
    assert gym(wordy, info, extract="last_number", threshold=1.0).reward == 1
    partial = gym(wordy, info)
    assert partial.reward is not None
    assert 0 < partial.reward < 1
    below = gym(wordy, info, threshold=1.0)
    assert below.reward == 0
    assert below.components == {"score_answer": partial.reward}
    assert gym("no number", info, extract="last_number").reward == 0


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({}, "extra_env_info.task is None"),
        ({"task": "no_such"}, "extra_env_info.task is 'no_such'"),
        ({"task": ["chain_sum"]}, "extra_env_info.task is ['chain_sum']"),
        ({"task": "chain_sum"}, "extra_env_info.entry"),
        ({"task": "chain_sum", "entry": {"question": "1+1"}}, "extra_env_info.entry"),
        ({**entry_of("chain_sum"), "task_config": {"no": 1}}, "extra_env_info.task_config"),
        ({**entry_of("chain_sum"), "task_config": [1]}, "extra_env_info.task_config"),
    ],
)
def test_a_problem_that_cannot_be_scored_is_invalid(info: dict[str, Any], words: str) -> None:
    score = gym("1", info)
    assert (score.status, score.reward) == ("INVALID", None)
    assert words in score.message


def test_an_environment_is_made_by_its_kind_whatever_its_name() -> None:
    assert isinstance(make("sums", MathConfig()), Math)
    assert isinstance(make("math", ReasoningGymConfig()), ReasoningGym)


def test_every_kind_that_scores_in_a_worker_has_its_environment() -> None:
    least = {RegexConfig: {"pattern": "a"}, LengthConfig: {"max_tokens": 4}}
    kinds = [kind for kind in KINDS.values() if issubclass(kind, SandboxedConfig)]
    made = {type(make("mine", kind.model_validate(least.get(kind, {})))) for kind in kinds}
    assert len(made) == len(kinds) > 0


def components(completion: str, answer: Any = "132", finish_reason: str = "stop", **env: Any) -> Score:
    environment = make("sums", MathMultiRewardConfig(**env))
    assert isinstance(environment, MathMultiReward)
    sample = Sample(completion, {"answer": answer}, environment="sums", finish_reason=finish_reason)
    return score_one(environment, sample_to_wire(sample))


@pytest.mark.parametrize(
    ("completion", "correct", "written", "whole"),
    [
        ("<think>47 and 85</think>\n<answer>132</answer>", 1, 1, 1),
        ("<think>47\nand 85</think>\n<answer> 132\n</answer>", 1, 1, 1),
        ("<think></think>\n<answer>13</answer>", 0, 1, 1),
        ("<think></think>\n<answer>about 132</answer>", 0, 1, 0),
        ("<think></think><answer>132</answer>", 1, 0, 1),
        ("<think></think>\n<answer>132</answer> it is", 1, 0, 1),
        ("<think></think>\n<answer>7</answer><answer>132</answer>", 1, 0, 1),
        ("<answer>132", 1, 0, 1),
        ("132", 1, 0, 1),
        ("132.0", 0, 0, 0),
        ("-132", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_math_multi_reward_gives_a_component_for_each_thing_asked(
    completion: str, correct: int, written: int, whole: int
) -> None:
    score = components(completion)
    assert score.components == {"correctness": correct, "format": written, "integer": whole}
    assert (score.status, score.reward) == ("SCORED", correct + written + whole)


def test_math_multi_reward_takes_numbers_and_no_answer_is_invalid() -> None:
    assert components("132", 132).reward == 2
    for answer in (None, "", " ", True, ["132"]):
        assert components("132", answer).status == "INVALID"


def test_what_was_cut_off_has_0_where_an_end_is_required() -> None:
    cut = components("132", finish_reason="length", require_stop=True)
    assert (cut.status, cut.reward) == ("SCORED", 0)
    assert cut.components == {"correctness": 0, "format": 0, "integer": 0}
    assert "cut off" in str(cut.metadata)
    assert components("132", finish_reason="length").reward == 2
