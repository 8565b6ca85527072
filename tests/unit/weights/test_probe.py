from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.config import Config
from headrace_services.refit.probe import (
    Differences,
    choose_token_ids,
    differences,
    is_bounded_by_rounding,
    probe_length,
    repeat_text,
    tolerance,
    unseen_window,
)


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_the_probe_is_a_function_of_its_arguments() -> None:
    ids = choose_token_ids(100, length=32)
    assert ids.dtype == np.int32
    assert ids.shape == (32,)
    assert ids.min() >= 0
    assert ids.max() < 100
    assert (ids == choose_token_ids(100, length=32)).all()


def test_text_is_that_of_the_first_prompts_again_and_again() -> None:
    assert repeat_text(iter([[5, 6], [7], [8, 9]]), 4).tolist() == [5, 6, 7, 8]
    assert repeat_text([[5, 6], [7]], 7).tolist() == [5, 6, 7, 5, 6, 7, 5]
    with pytest.raises(ValueError, match="a probe without prompts"):
        repeat_text([[]], 4)


@pytest.mark.parametrize(
    ("trainer", "rollout", "channel", "expected"),
    [
        ("float32", None, {}, (1e-3, 1e-3)),
        ("float32", None, {"verify_tolerance": 1e-4}, (1e-4, 1e-4)),
        ("bfloat16", None, {}, (2.0, 0.2)),
        ("float32", "bfloat16", {}, (2.0, 0.2)),
        ("bfloat16", "float32", {}, (2.0, 0.2)),
        ("bfloat16", None, {"verify_tolerance": 0.1}, (0.1, 0.1)),
        ("bfloat16", None, {"verify_mean_tolerance": 0.01}, (2.0, 0.01)),
    ],
)
def test_the_tolerance_suits_the_dtype(
    trainer: str, rollout: str | None, channel: dict[str, float], expected: tuple[float, float]
) -> None:
    policy = {"precision": trainer, "generation": {"vllm_cfg": {"precision": rollout}}}
    assert tolerance(Config.model_validate({"policy": policy, "weight_channel": channel})) == expected


@pytest.mark.parametrize(
    ("channel", "rounding", "expected"),
    [
        ({}, (0.02, 0.005), (0.08, 0.02)),
        ({}, (0.4, 0.08), (1.6, 0.2)),
        ({}, (9.0, 9.0), (2.0, 0.2)),
        ({}, (0.0, 0.0), (1e-3, 1e-3)),
        ({"verify_tolerance": 1.5}, (0.02, 0.005), (1.5, 0.02)),
        ({"verify_mean_tolerance": 0.3}, (0.02, 0.005), (0.08, 0.3)),
    ],
    ids=["four times", "each", "never more than usual", "at least that of float32", "a key", "the other key"],
)
def test_bfloat16_allows_what_rounding_changes_in_this_model(
    channel: dict[str, float], rounding: tuple[float, float], expected: tuple[float, float]
) -> None:
    config = Config.model_validate({"policy": {"precision": "bfloat16"}, "weight_channel": channel})
    assert is_bounded_by_rounding(config)
    assert tolerance(config, Differences(*rounding)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("policy", "channel"),
    [
        ({"precision": "float32"}, {}),
        ({"precision": "bfloat16", "generation": {"vllm_cfg": {"kv_cache_dtype": "fp8"}}}, {}),
        ({"precision": "bfloat16"}, {"verify_tolerance": 1.0, "verify_mean_tolerance": 0.1}),
    ],
    ids=["nothing is rounded", "more is rounded", "the keys say it"],
)
def test_other_bounds_need_no_rounding(policy: dict[str, Any], channel: dict[str, float]) -> None:
    assert not is_bounded_by_rounding(Config.model_validate({"policy": policy, "weight_channel": channel}))


@pytest.mark.parametrize(("kv_cache_dtype", "warned"), [("auto", False), ("bfloat16", False), ("fp8", True)])
def test_what_no_bound_follows_is_warned_of(kv_cache_dtype: str, warned: bool) -> None:
    vllm_cfg = {"kv_cache_dtype": kv_cache_dtype}
    config = Config.model_validate({"policy": {"precision": "bfloat16", "generation": {"vllm_cfg": vllm_cfg}}})
    assert any("policy.generation.vllm_cfg.kv_cache_dtype fp8" in line for line in config.warnings) is warned
    assert is_bounded_by_rounding(config) is not warned
    if warned:
        corrected = config.model_copy(
            update={"loss_fn": config.loss_fn.model_copy(update={"use_importance_sampling_correction": True})}
        )
        assert "importance_sampling" in config.warnings[0]
        assert "importance_sampling" not in corrected.warnings[0]


def test_differences_are_the_largest_and_the_mean() -> None:
    assert differences(row(-1, -2, -3), row(-1.5, -2, -2)) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("most", "vocabulary", "window", "length"),
    [
        (4096, 32_000, None, 32),
        (20, 32_000, None, 19),
        (2, 32_000, None, 2),
        (4096, 32_000, 128, 160),
        (100, 32_000, 128, 99),
        (40_000, 32_000, 4096, 4128),
        (40_000, 2**18, 4096, 1024),
        (40_000, 1000, 32_768, 8193),
        (40_000, 2**30, 4096, 32),
    ],
)
def test_a_probe_exceeds_the_window_and_fits_engine_and_report(
    most: int, vocabulary: int, window: int | None, length: int
) -> None:
    assert probe_length(most, vocabulary, window) == length


@pytest.mark.parametrize(
    ("most", "length", "window", "unseen"),
    [
        (40_000, 4128, 4096, False),
        (40_000, 1024, 4096, True),
        (40_000, 4097, 4096, True),
        (40_000, 4098, 4096, False),
        (4097, 4096, 4096, False),
        (4098, 1024, 4096, True),
        (40_000, 32, None, False),
    ],
)
def test_a_window_beyond_the_probe_is_named(most: int, length: int, window: int | None, unseen: bool) -> None:
    said = unseen_window(most, length, window)
    assert (said is not None) is unseen
    if said:
        assert f"window of {window} tokens" in said
