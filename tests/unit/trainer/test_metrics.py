"""What is measured of a batch, and what gauges show of it."""

from __future__ import annotations

import msgspec

from headrace_services.trainer.telemetry.http import Gauges
from headrace_services.trainer.telemetry.metrics import batch_metrics, sampling_metrics, total_lengths
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
    gauges.update("train", 3, {"reward": 0.5, "reward/sums": 1.0})
    gauges.update("train", 4, {"reward": 0.75})
    gauges.update("validation", 4, {"accuracy": 1.0})
    found = {family.name: family.samples[0].value for family in gauges.collect()}
    assert found == {
        "headrace_trainer_step": 4,
        "headrace_trainer_reward": 0.75,
        "headrace_trainer_reward_sums": 1.0,
        "headrace_trainer_validation_step": 4,
        "headrace_trainer_validation_accuracy": 1.0,
    }
