"""What the metrics of a step are said to mean."""

from __future__ import annotations

from headrace.run.headlines import accuracy_name, alarms, build_changes, seconds_left, seconds_per_step

TOTAL = "timing/train/total_step_time"


def test_accuracy_is_one_only_where_rewards_are_0_or_1() -> None:
    assert accuracy_name({"accuracy": 0.5, "partial_credit": 0.0}) == "accuracy"
    assert accuracy_name({"accuracy": 0.5, "partial_credit": 0.25}) == "mean reward"
    assert accuracy_name({"accuracy": 0.5}) == "accuracy"  # of an earlier build


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


def test_the_time_left_is_that_of_the_newest_steps() -> None:
    steps = [{TOTAL: 100.0}] * 20 + [{TOTAL: 2.0}] * 10
    assert seconds_left(steps, 5) == 10.0
    assert seconds_left(steps, 0) is None
    assert seconds_left([], 5) is None
    assert seconds_left([{"reward": 1.0}], 5) is None
