"""What is measured of a batch, and what gauges show of it."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headrace_services.trainer.telemetry.http import Gauges
from headrace_services.trainer.telemetry.metric_names import unknown
from headrace_services.trainer.telemetry.metrics import (
    LONGEST_NAME,
    MOST_COMPONENTS,
    Scored,
    batch_metrics,
    sampling_metrics,
    score_metrics,
    total_lengths,
)
from tests.unit.trainer.loop_cases import group, reservation


def test_batch_metrics_say_what_the_batch_was_like() -> None:
    batch, groups = reservation("a", "b"), [group("a", task="sums"), group("b", task="words")]
    metrics = batch_metrics(batch, groups, truncated=1.0)
    assert metrics["environment_reward"] == 0.5
    assert metrics["environment_reward/sums"] == 0.5
    assert (metrics["avg_trajectory_age"], metrics["max_trajectory_age"]) == (1.0, 1.0)
    prompt = groups[0].prompt_token_ids.size
    assert metrics["mean_prompt_length"] == prompt
    assert metrics["total_num_tokens"] == 1 + 2 + 11 + 12 + 4 * prompt == sum(total_lengths(batch, groups))
    assert (metrics["min_gen_tokens_per_sample"], metrics["max_gen_tokens_per_sample"]) == (1, 12)
    assert metrics["truncation_rate"] == 0.25


def test_dynamic_sampling_says_how_many_batches_were_generated_for_one() -> None:
    batch = msgspec.structs.replace(reservation("a", "b"), scored=9, filtered=7)
    assert sampling_metrics(batch, generation_batch=3.0) == {
        "dynamic_sampling_num_gen_batches": 3.0,
        "dynamic_sampling_scored_groups": 9,
        "dynamic_sampling_filtered_groups": 7,
    }


def test_gauges_hold_the_newest_value_of_each_metric() -> None:
    gauges = Gauges()
    gauges.update("train", 3, {"reward": 0.5, "environment_reward/sums": 1.0})
    gauges.update("train", 4, {"reward": 0.75})
    gauges.update("validation", 4, {"accuracy": 1.0})
    found = {family.name: family.samples[0].value for family in gauges.collect()}
    assert found == {
        "headrace_trainer_step": 4,
        "headrace_trainer_reward": 0.75,
        "headrace_trainer_environment_reward_sums": 1.0,
        "headrace_trainer_validation_step": 4,
        "headrace_trainer_validation_accuracy": 1.0,
    }


def test_components_and_environments_are_labels_and_those_that_are_gone_are_not_shown() -> None:
    gauges, registry = Gauges(), CollectorRegistry()
    gauges.update("train", 3, {"reward": 0.5, "reward/gone": 1.0})
    gauges.update("train", 4, {"reward": 0.5, 'reward/a"b': 1.0, "reward_std/std": 0.25, "scoring_wait/math": 2.0})
    gauges.update("validation", 4, {"accuracy": 1.0, "reward/std": 0.5})
    with gauges.registered(registry):
        shown = [line for line in generate_latest(registry).decode().splitlines() if "{" in line]
    assert shown == [
        'headrace_trainer_reward_component{component="a\\"b"} 1.0',
        'headrace_trainer_reward_component_std{component="std"} 0.25',
        'headrace_trainer_scoring_wait{environment="math"} 2.0',
        'headrace_trainer_validation_reward_component{component="std"} 0.5',
    ]


def test_components_have_mean_and_spread_over_those_that_have_them_and_scores_their_times() -> None:
    scores = [
        Scored({"format": 1.0, "correct": 0.0}, {"waiting": 1.0, "environment": 0.5}),
        Scored({"format": 1.0, "correct": 1.0}, {"waiting": 2.0, "environment": 1.5}),
        Scored({"format": 0.0}, {"waiting": 4.0, "environment": 0.0}),
        Scored({}, {}),  # of an earlier build
    ]
    metrics = score_metrics(["math", "math", "code", "code"], scores)
    assert metrics == {
        "reward/correct": 0.5,
        "reward_std/correct": 0.5,
        "reward/format": pytest.approx(2 / 3),
        "reward_std/format": pytest.approx(2**0.5 / 3),
        "scoring_wait/code": 4.0,
        "scoring_time/code": 0.0,
        "scoring_wait/math": 1.5,
        "scoring_time/math": 1.0,
    }
    assert unknown(metrics) == []


def test_names_that_an_environment_makes_up_are_bounded() -> None:
    names = ["../up", "a\n" + "b" * 200, "", ".", *(f"c{number:03}" for number in range(100))]
    metrics = score_metrics(["math"], [Scored(dict.fromkeys(names, 1.0), {})])
    assert len(metrics) == 2 * MOST_COMPONENTS
    parts = {name.partition("/")[2] for name in metrics}
    assert all(0 < len(part) <= LONGEST_NAME and "/" not in part and "\n" not in part for part in parts)
    assert {"_up", "_"} <= parts
