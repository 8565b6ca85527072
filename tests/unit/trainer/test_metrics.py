"""What is measured of a batch, and what gauges show of it."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory
from headrace.run.metric_names import MOST_COMPONENTS, unknown
from headrace_services.trainer.network.packing import Work
from headrace_services.trainer.telemetry.http import Gauges
from headrace_services.trainer.telemetry.metrics import (
    LONGEST_NAME,
    Extent,
    batch_metrics,
    episode_metrics,
    sampling_metrics,
    score_metrics,
)
from headrace_services.trainer.telemetry.throughput import Architecture, Peak, StepTimes, ThroughputMeter
from tests.support.episodes import call, episode
from tests.support.trainer import trajectory
from tests.unit.trainer.loop_cases import group, reservation


def score_of(components: dict[str, float], timings: dict[str, float]) -> Score:
    return Score("SCORED", 1.0, components, timings=timings)


def extent(record: AnyTrajectory) -> Extent:
    return Extent.of(record, record.paths())


# two prompts of three tokens; the first is answered three times, the second conversation goes on once, after two tokens of its program
BRANCHES = episode(
    [call(-1, [1, 2, 3], [4]), call(-1, [1, 2, 3], [4, 5]), call(1, [6, 7], [8], trained=False), call(2, [9], [10, 11])]
)


def test_batch_metrics_say_what_the_batch_was_like() -> None:
    batch, groups = reservation("a", "b"), [group("a", task="sums"), group("b", task="words")]
    prompt = groups[0].prompt_token_ids.tolist()
    extents = [extent(trajectory(prompt, [2] * one.length)) for one in batch.trajectories]
    metrics = batch_metrics(batch, groups, extents, truncated=1.0)
    assert metrics["environment_reward"] == 0.5
    assert metrics["environment_reward/sums"] == 0.5
    assert (metrics["avg_trajectory_age"], metrics["max_trajectory_age"]) == (1.0, 1.0)
    assert metrics["mean_prompt_length"] == len(prompt)
    assert (
        metrics["total_num_tokens"] == 1 + 2 + 11 + 12 + 4 * len(prompt) == 4 * metrics["mean_total_tokens_per_sample"]
    )
    assert (metrics["min_gen_tokens_per_sample"], metrics["max_gen_tokens_per_sample"]) == (1, 12)
    assert metrics["truncation_rate"] == 0.25


@pytest.mark.parametrize(
    ("completions", "share"),
    [
        ([[1, 2, 3, 4, 5]], 0.0),
        ([[7] * 10], 6 / 7),
        ([[1, 2, 3, 4, 1, 2, 3, 4], [5, 6, 7, 8]], 1 / 6),
        ([[1, 2, 3]], None),
        ([[2**31 - 1] * 5], 1 / 2),
    ],
)
def test_repetition_is_the_share_of_runs_had_before(completions: list[list[int]], share: float | None) -> None:
    batch, groups = reservation("a"), [group("a")]
    metrics = batch_metrics(batch, groups, [extent(trajectory([9], each)) for each in completions], truncated=0)
    assert metrics.get("repetition") == (None if share is None else pytest.approx(share))


def test_calls_are_looked_at_for_repetition_one_by_one() -> None:
    again = episode([call(-1, [1], [4, 5, 6, 7]), call(0, [2], [4, 5, 6, 7]), call(1, [3], [8] * 5, trained=False)])
    assert (extent(again).runs, extent(again).repeated) == (2, 0)


def test_an_episode_takes_its_calls_contexts_and_shared_parts_once() -> None:
    assert extent(BRANCHES) == Extent(
        prompt=3, wrote=5, paths=[4, 3 + 2 + 2 + 1 + 1 + 2], calls=3, roots=2, rendered_again=3, runs=0, repeated=0
    )
    batch, groups = reservation("a"), [group("a")]
    extents = [extent(BRANCHES), extent(trajectory([1], [2]))]
    metrics = batch_metrics(batch, groups, extents, truncated=0.0)
    assert (metrics["total_num_tokens"], metrics["mean_total_tokens_per_sample"]) == (4 + 11 + 2, 17 / 2)
    assert (metrics["mean_prompt_length"], metrics["mean_gen_tokens_per_sample"]) == (2, 3)
    architecture = Architecture(layer_weights=1, vocabulary_weights=0, layers=1, query_width=1)
    meter = ThroughputMeter(architecture, Peak(1.0, "a data sheet"))
    times = StepTimes(1.0, 1.0, {"policy_training": 1.0}, 0, 0, 0, 0)
    work = Work(17, 0, (4**2 + 11**2 + 2**2) / 2)
    rates = meter.metrics(times, [one.paths for one in extents], work, training_devices=1, generating_devices=1)
    assert (rates["performance/samples_per_sec"], rates["performance/tokens_per_sec"]) == (2, 17)
    assert rates["performance/train_flops_per_gpu"] * 1e12 == pytest.approx(6 * 17 + 6 * (4**2 + 11**2 + 2**2))


def test_environments_with_programs_say_what_an_episode_came_to() -> None:
    extents = [extent(BRANCHES), extent(trajectory([1], [2])), extent(trajectory([1], [2, 3]))]
    metrics = episode_metrics(["ga/me", "ga/me", "math"], extents, {"ga/me"})
    means = {"calls": 2, "tokens": 3, "roots": 1.5, "rendered_again": 1.5}
    assert metrics == {f"episode_{name}/ga_me": mean for name, mean in means.items()}
    assert unknown(metrics) == []


def test_dynamic_sampling_says_how_many_batches_made_one() -> None:
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


def test_components_and_environments_that_are_gone_are_not_shown() -> None:
    gauges, registry = Gauges(), CollectorRegistry()
    gauges.update("train", 3, {"reward": 0.5, "reward/gone": 1.0})
    gauges.update("train", 4, {"reward": 0.5, 'reward/a"b': 1.0, "reward_std/std": 0.25, "scoring_wait/math": 2.0})
    gauges.update("validation", 4, {"accuracy": 1.0, "reward/std": 0.5})
    registry.register(gauges)
    shown = [line for line in generate_latest(registry).decode().splitlines() if "{" in line]
    assert shown == [
        'headrace_trainer_reward_component{component="a\\"b"} 1.0',
        'headrace_trainer_reward_component_std{component="std"} 0.25',
        'headrace_trainer_scoring_wait{environment="math"} 2.0',
        'headrace_trainer_validation_reward_component{component="std"} 0.5',
    ]


def test_components_have_mean_and_spread_and_scores_have_times() -> None:
    scores = [
        score_of({"format": 1.0, "correct": 0.0}, {"waiting": 1.0, "environment": 0.5}),
        score_of({"format": 1.0, "correct": 1.0}, {"waiting": 2.0, "environment": 1.5}),
        score_of({"format": 0.0}, {"waiting": 4.0, "environment": 0.0}),
        score_of({}, {}),  # of an earlier build
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
    metrics = score_metrics(["math"], [score_of(dict.fromkeys(names, 1.0), {})])
    assert len(metrics) == 2 * MOST_COMPONENTS
    parts = {name.partition("/")[2] for name in metrics}
    assert all(0 < len(part) <= LONGEST_NAME and "/" not in part and "\n" not in part for part in parts)
    assert {"_up", "_"} <= parts
