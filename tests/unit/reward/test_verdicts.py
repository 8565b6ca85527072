"""What judges' answers are worth together, and which of them are verdicts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.base.repeats import Repeats, alike
from headrace.config.environments import LLMJudgeConfig
from headrace_services.reward.judge.asking import read_seconds
from headrace_services.reward.judge.verdicts import (
    NoVerdict,
    Scale,
    compute_agreement,
    compute_reward,
    read_completion,
    verdict_in,
)


def env_of(**options: Any) -> LLMJudgeConfig:
    judge = {"base_url": "http://127.0.0.1:1/v1", "model": "small", "temperature": 1}
    return LLMJudgeConfig.model_validate({"rubric": "Is it polite?", "judges": [judge]} | options)


def answered(content: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}}]}).encode()


@pytest.mark.parametrize(
    ("options", "reward", "agreement"),
    [
        ({}, 0.5, 0.4),
        ({"vote": "median"}, 0.75, 0.4),
        ({"threshold": 0.7}, 0.6, 0.6),
        ({"threshold": 0.7, "vote": "median"}, 1, 0.6),
        ({"threshold": 0.7, "vote": "majority"}, 1, 0.6),
        ({"threshold": 0.9, "vote": "majority"}, 0, 1),
    ],
)
def test_the_reward_and_the_agreement_of_verdicts(options: dict[str, Any], reward: float, agreement: float) -> None:
    worth = [0.75, 0.0, 0.75, 0.8, 0.2]
    assert compute_reward(worth, env_of(**options)) == pytest.approx(reward)
    found = compute_agreement(worth, env_of(**options))
    assert found["agreement"] == pytest.approx(agreement)
    assert found["spread"] == pytest.approx(0.3331666)


def test_a_single_verdict_has_no_agreement() -> None:
    assert compute_agreement([0.5], env_of()) == {}


@pytest.mark.parametrize(
    ("scale", "score", "worth"),
    [((1, 5), 4, 0.75), ((-1, 1), -1, 0), ((0.0, 1.0), 0.25, 0.25), ((0.0, 1.0), 1, 1), ((-2.5, 2.5), 0, 0.5)],
)
def test_a_score_on_the_scale_becomes_a_number_from_0_to_1(scale: Any, score: float, worth: float) -> None:
    text = json.dumps({"reason": "", "score": score})
    verdict = verdict_in(read_completion(answered(text)), Scale(*scale))
    assert Scale(*scale).worth(verdict.scores[0]) == pytest.approx(worth)


@pytest.mark.parametrize(
    ("scale", "score"),
    [
        ((1, 5), "4.5"),
        ((1, 5), "0"),
        ((0.0, 1.0), "1.01"),
        ((0.0, 1.0), "1e999"),
        ((0.0, 1.0), "NaN"),
        ((1, 5), "null"),
    ],
)
def test_law_7_failure_is_not_zero_a_score_off_the_scale_is_none(scale: Any, score: str) -> None:
    with pytest.raises(NoVerdict):
        verdict_in(read_completion(answered(f'{{"reason": "", "score": {score}}}')), Scale(*scale))


@pytest.mark.parametrize(
    ("header", "seconds"), [("3", 3.0), ("0", 0.0), (None, None), ("soon", None), ("-1", None), ("²", None)]
)
def test_retry_after_in_seconds(header: str | None, seconds: float | None) -> None:
    assert read_seconds(header) == seconds


@pytest.mark.parametrize("keyed", [False, True], ids=["text", "scores of others"])
def test_a_judge_without_verdicts_is_told_once_and_then_counted(*, keyed: bool) -> None:
    repeats, told = Repeats(clock=lambda: 0.0), 0
    for number in range(10_000):
        letters = str(number).translate(str.maketrans("0123456789", "abcdefghij"))
        said = f"The completion is {letters} in my opinion, and more."
        answer = json.dumps({"reason": "", "scores": {said: 1}}) if keyed else said
        with pytest.raises(NoVerdict) as error:
            verdict_in(read_completion(answered(answer)), Scale(1, 5), "group" if keyed else "one", 2)
        told += repeats.due(alike(str(error.value))) is not None
    assert told == 1
