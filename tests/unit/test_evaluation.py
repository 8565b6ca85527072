"""What an evaluation says of the trajectories and failures that a validation left."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from headrace.run.evaluation import data_set_of, pass_at_k, report, validation_id


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_in_which_one_passes(n: int) -> None:
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_stays_exact_for_many_completions() -> None:
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@3 of 2 completions"):
        pass_at_k(2, 1, 3)


@pytest.mark.parametrize("name", ["validation", "gsm8k-test-2", "a.b_c"])
def test_the_data_set_of_a_group_is_read_from_its_id(name: str) -> None:
    assert data_set_of(validation_id(12, name, 7)) == name


def lines(data_set: str, *prompts: tuple[float, ...]) -> list[dict[str, Any]]:
    """A record for each completion of each prompt, by its reward; the last completion of a prompt was cut off."""
    return [
        {
            "group": validation_id(0, data_set, number),
            "rewards": reward,
            "components": {"format": 0.5} if index == 0 else {},
            "finish_reason": "length" if index == len(rewards) - 1 else "stop",
            "token_ids": [1] * (index + 1),
        }
        for number, rewards in enumerate(prompts)
        for index, reward in enumerate(rewards)
    ]


def test_a_reward_passes_that_is_too_low_by_rounding_alone() -> None:
    whole = 0.7 + 0.2 + 0.1
    assert whole < 1
    (found,) = report(lines("sums", (whole,), (0.999,)), []).values()
    assert found.pass_at == {1: 0.5}


def failed(data_set: str, *reasons: str) -> list[dict[str, str]]:
    return [{"group": validation_id(0, data_set, 90 + i), "reason": reason} for i, reason in enumerate(reasons)]


def test_each_data_set_is_reported_by_itself() -> None:
    sums, words = report(
        [*lines("sums", (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)), *lines("words", (0.25, 2.0))], []
    ).values()
    assert (sums.evaluated, sums.samples, sums.failed) == (3, 2, 0)
    assert sums.pass_at == pytest.approx({1: 0.5, 2: 2 / 3})
    assert sums.reward == pytest.approx(0.5)
    # of prompts: two completions of one say little more than one
    assert sums.reward_stderr == pytest.approx(np.std([0.5, 1.0, 0.0], ddof=1) / 3**0.5)
    assert (sums.components, sums.length, sums.truncated) == ({"format": 0.5}, 1.5, 0.5)
    assert (words.pass_at[1], words.pass_at[2], words.reward_stderr) == (0.5, 1.0, None)


def test_a_completion_passes_from_the_threshold_on() -> None:
    records = lines("sums", (0.5, 0.49))
    assert report(records, [], threshold=0.5)["sums"].pass_at == {1: 0.5, 2: 1.0}
    assert report(records, [])["sums"].pass_at == {1: 0.0, 2: 0.0}


def test_law_7_a_failed_prompt_is_counted_and_enters_no_mean() -> None:
    found = report(lines("sums", (1.0,)), [*failed("sums", "late", "broken", "late"), *failed("words", "broken")])
    assert found["sums"].pass_at == {1: 1.0}
    assert (found["sums"].failed, found["sums"].failures) == (3, {"late": 2, "broken": 1})
    assert (found["words"].evaluated, found["words"].failed, found["words"].reward, found["words"].pass_at) == (
        0,
        1,
        None,
        {},
    )
