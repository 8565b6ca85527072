"""Where a step's time went, and its rates."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from headrace.config import Config
from headrace.run.metric_names import unknown
from headrace_services.trainer.network.packing import Work
from headrace_services.trainer.telemetry.throughput import (
    Architecture,
    Peak,
    StepTimes,
    ThroughputMeter,
    efficiency_metrics,
)

SECONDS = st.floats(0, 1e4)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_the_shares_of_a_step_add_up_to_the_whole(
    training: float, waited: float, refit: float, validation: float, checkpoint: float, rest: float
) -> None:
    total = training + waited + refit + validation + checkpoint + rest
    metrics = efficiency_metrics(StepTimes(total, training, {}, waited, refit, validation, checkpoint))
    shares = [value for name, value in metrics.items() if name.endswith("_pct")]
    assert sum(shares) == pytest.approx(100 if total > 0 else 0)
    seconds = [value for name, value in metrics.items() if name.endswith("_s")]
    assert sum(seconds) == pytest.approx(total)
    assert all(value >= 0 for value in metrics.values())


def metrics_of(
    learner: dict[str, float],
    lengths: list[list[int]],
    training: int,
    generation: int,
    architecture: Architecture | None = None,
    work: Work | None = None,
) -> dict[str, float]:
    """Of a step of 10 s, of which 2 s were waited for a batch and 1 s for a refit."""
    times = StepTimes(10.0, 6.0, learner, buffer_starvation=2.0, refit_bubble=1.0, validation=0.0, checkpoint=0.0)
    meter = ThroughputMeter(architecture, Peak(0.5, "a data sheet"))
    return meter.metrics(times, lengths, work, training_devices=training, generating_devices=generation)


def test_rates_are_those_of_nemo_rl() -> None:
    learner = {"policy_training": 4.0, "policy_and_reference_logprobs": 2.0}
    metrics = metrics_of(learner, [[3000], [2050, 1000]], 8, 8)
    rates = {name.removeprefix("performance/"): value for name, value in metrics.items()}
    assert rates["tokens_per_sec_per_gpu"] == pytest.approx(6050 / 10 / 16)
    assert rates["samples_per_sec_per_gpu"] == pytest.approx(2 / 10 / 16)
    assert rates["policy_training_tokens_per_sec_per_gpu"] == pytest.approx(6050 / 4 / 8)
    assert rates["policy_and_reference_logprobs_tokens_per_sec_per_gpu"] == pytest.approx(6050 / 2 / 8)
    assert rates["training_worker_group_tokens_per_sec_per_gpu"] == pytest.approx(6050 / 6 / 8)
    assert rates["generation_tokens_per_sec_per_gpu"] == pytest.approx(6050 / (2 + 2 + 4) / 8)
    assert rates["training_worker_idle_time_ratio"] == pytest.approx(2 / (4 + 2 + 2 + 1))
    assert "train_flops_per_gpu" not in rates
    assert unknown(metrics) == []


MODEL = Architecture(layer_weights=10**9, vocabulary_weights=10**8, layers=1, query_width=0)


def test_utilisation_is_what_was_done_of_what_the_device_can_do() -> None:
    metrics = metrics_of({"policy_training": 4.0}, [[100], [200]], 2, 1, MODEL, Work(300, 200))
    done = 6 * (1e9 * 300 + 1e8 * 200) / 4 / 2 / 1e12
    assert metrics["performance/train_flops_per_gpu"] == pytest.approx(done)
    assert metrics["performance/train_fp_utilization"] == pytest.approx(done / 0.5)


def test_a_step_of_the_value_model_alone_has_no_policy_utilisation() -> None:
    metrics = metrics_of({"value_training": 4.0, "policy_and_reference_logprobs": 1.0}, [[100]], 1, 1, MODEL, None)
    assert (
        not {"performance/train_flops_per_gpu", "performance/policy_training_tokens_per_sec_per_gpu"} & metrics.keys()
    )
    assert metrics["timing/train/value_training"] == 4.0
    assert unknown(metrics) == []


def test_with_no_replica_left_there_is_no_rate_of_generation_per_gpu() -> None:
    metrics = metrics_of({"policy_training": 1.0}, [[1]], 1, 0)
    assert "performance/generation_tokens_per_sec_per_gpu" not in metrics
    assert "performance/generation_tokens_per_sec" in metrics


def test_the_meter_is_of_the_model_that_is_trained(tiny_model: Path) -> None:
    policy = {"precision": "float32", "activation_checkpointing": True, "logprob_chunk_size": 5}
    config = Config.model_validate({"policy": policy, "trainer": {"device": "cpu"}})

    def weights(**overrides: int) -> int:
        meter = ThroughputMeter.of(config, AutoConfig.from_pretrained(tiny_model, **overrides))
        assert meter.peak.tflops > 0
        assert (meter.recompute, meter.chunked) == (True, True)
        assert meter.architecture is not None
        return meter.architecture.layer_weights

    assert weights(num_hidden_layers=1) * 2 == weights()
