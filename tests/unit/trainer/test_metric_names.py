"""docs/metrics.md has every metric that the code can emit."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config.loss import LossConfig, ValueLossConfig
from headrace.run.metric_names import METRIC_SECTIONS, tracked_name, unknown
from headrace_services.trainer.learning.losses import policy_loss, value_loss
from headrace_services.trainer.telemetry.http import Gauges
from headrace_services.trainer.telemetry.throughput import StepTimes, efficiency_metrics
from tests.unit.trainer import loss_cases

ROOT = Path(__file__).resolve().parents[3]


def test_the_tables_are_current(tmp_path: Path) -> None:
    fresh = tmp_path / "metrics.md"
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_metrics.py", fresh], check=True)
    assert fresh.read_text() == (ROOT / "docs" / "metrics.md").read_text(), "run `make docs`"


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(),
        LossConfig(
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type="tis",
            truncated_importance_sampling_ratio=2.0,
            probability_difference_mask=0.2,
        ),
    ],
    ids=["plain", "everything"],
)
def test_every_metric_of_the_losses_is_there(config: LossConfig) -> None:
    case = loss_cases.made([2, 3], seed=0)
    values = case.flat(case.rewards[:, None].expand_as(case.mask))
    tokens = dataclasses.replace(case.tokens(), values=values, returns=values)
    policy = policy_loss(config, case.output(), tokens, case.counts)
    value = value_loss(ValueLossConfig(), values, tokens, case.counts)
    assert unknown([*policy.sums, *policy.minima, *policy.maxima]) == []
    assert unknown(f"critic/{name}" for name in (*value.sums, *value.minima, *value.maxima)) == []


def test_no_metric_is_there_twice_and_none_without_a_meaning() -> None:
    metrics = [metric for section in METRIC_SECTIONS for metric in section.metrics]
    assert len({metric.name for metric in metrics}) == len(metrics)
    assert all(metric.meaning for metric in metrics)


def test_names_of_tasks_are_known_and_others_are_not() -> None:
    assert unknown(["environment_reward/chain sum".replace(" ", "_"), "gpu/0/util", "rewards", "loss "]) == [
        "loss ",
        "rewards",
    ]


def test_a_tracker_has_nemo_rls_names() -> None:
    assert tracked_name("train", "loss") == "train/loss"
    assert tracked_name("validation", "accuracy") == "validation/accuracy"
    assert tracked_name("train", "critic/loss") == "train/critic/loss"
    for own in ("timing/train/policy_training", "performance/tokens_per_sec", "efficiency/idle/refit_bubble_s"):
        assert tracked_name("train", own) == own


def test_goodput_is_one_table_from_which_all_other_names_come() -> None:
    (section,) = [each for each in METRIC_SECTIONS if "efficiency/efficiency_pct" in {one.name for one in each.metrics}]
    times = StepTimes(10.0, 1.0, {}, 1.0, 1.0, 1.0, 1.0)
    emitted = efficiency_metrics(times) | {"efficiency/init/total_s": 1.0}
    assert {metric.name for metric in section.metrics} == emitted.keys()
    for category in ("idle/buffer_starvation", "idle/refit_bubble", "idle/validation", "overhead/checkpoint"):
        assert emitted[f"efficiency/{category}_s"] == 1.0
        assert emitted[f"efficiency/{category}_pct"] == 10.0
    gauges = Gauges()
    gauges.update("train", 0, emitted)
    shown = {gauge.name for gauge in gauges.collect()}
    assert {"headrace_trainer_" + name.replace("/", "_") for name in emitted} <= shown
    assert {tracked_name("train", name) for name in emitted} == emitted.keys()
