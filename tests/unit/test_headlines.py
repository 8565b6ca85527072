"""What the metrics of a step are said to mean."""

from __future__ import annotations

import pytest

from headrace.run.headlines import accuracy_name, alarms, build_changes, seconds_per_step, waiting

TOTAL = "timing/train/total_step_time"
GENERATION, SCORES = "timing/train/wait_for_generation", "timing/train/wait_for_scores"


def test_accuracy_is_one_only_where_rewards_are_0_or_1() -> None:
    assert accuracy_name({"accuracy": 0.5, "partial_credit": 0.0}) == "accuracy"
    assert accuracy_name({"accuracy": 0.5, "partial_credit": 0.25}) == "mean reward"
    assert accuracy_name({"accuracy": 0.5}) == "accuracy"  # of an earlier build


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({}, None),
        ({TOTAL: 10.0, GENERATION: 2.0, SCORES: 0.9}, None),
        ({TOTAL: 10.0, GENERATION: 9.0, "efficiency/init/total_s": 5.0}, None),
        ({TOTAL: 10.0, GENERATION: 4.0, SCORES: 2.0}, "60 % of the time, mostly for generation"),
        ({TOTAL: 10.0, GENERATION: 1.0, SCORES: 3.0}, "40 % of the time, mostly for scores"),
        (
            {
                TOTAL: 10.0,
                SCORES: 8.0,
                "scoring_wait/a": 3.0,
                "scoring_time/a": 0.5,
                "scoring_wait/b": 0.0,
                "scoring_time/b": 1.0,
            },
            "scores (environment a: 3 s waiting, 0.5 s in it)",
        ),
        ({TOTAL: 10.0, SCORES: 8.0, "scoring_wait/a": 1.0, "scoring_time/a": 5.0}, "5 s in it): a faster environment"),
    ],
    ids=["nothing known", "little", "the first step", "generation", "scores", "a queue", "a slow environment"],
)
def test_what_the_trainer_waited_for_comes_with_the_remedy(metrics: dict[str, float], said: str | None) -> None:
    found = waiting(metrics)
    assert found is None if said is None else said in (found or "")


def test_each_alarm_is_said() -> None:
    assert alarms(3, {"train_inference_alarm": 0.0, "equal_rewards_alarm": 0.0}) == []
    disagree, equal = alarms(
        3, {"train_inference_alarm": 1.0, "token_mult_prob_error": 1.31, "equal_rewards_alarm": 1.0}
    )
    assert "(token_mult_prob_error 1.310)" in disagree
    assert "equal rewards" in equal
    assert len(alarms(3, {"collapse_alarm": 1.0, "equal_rewards_alarm": 1.0})) == 2
    assert alarms(3, {"collapse_alarm": 1.0, "equal_rewards_alarm": 1.0}, ["train_inference"]) == []
    for level, token in ((1.0, "blocking"), (2.0, "gloo")):
        (slow,) = alarms(3, {"weight_channel_alarm": level})
        assert slow.startswith("step 3: ")
        assert token in slow
        assert "NCCL_DEBUG=INFO" in slow


def test_the_time_of_a_step_is_a_median_without_starts() -> None:
    start = {TOTAL: 90.0, "efficiency/init/total_s": 60.0}
    assert seconds_per_step([]) is None
    assert seconds_per_step([{"reward": 1.0}]) is None
    assert seconds_per_step([start]) == 90.0
    assert seconds_per_step([start, {TOTAL: 2.0}, {TOTAL: 50.0}, {TOTAL: 1.0}]) == 2.0


def test_a_build_is_new_in_the_first_step_that_has_groups_of_it() -> None:
    steps = [
        (0, {"exact": ["a"], "math": ["m"]}),
        (1, {"exact": ["a", "b"]}),
        (2, {"math": ["m"]}),
        (3, {"exact": ["b"], "math": [""]}),
        (4, {"exact": ["a"], "judge": ["j"]}),
    ]
    assert build_changes(steps) == [
        (1, "step 1: environment exact scores with build b, after a"),
        (3, "step 3: environment math scores with build unnamed, after m"),
        (4, "step 4: environment exact scores with build a, after b"),
    ]
