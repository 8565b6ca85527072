from __future__ import annotations

import numpy as np
import pytest

from headrace.config import Config
from headrace.weights.probe import choose_token_ids, probe_length, repeat_text, tolerance


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_the_probe_is_a_function_of_its_arguments() -> None:
    ids = choose_token_ids(100, length=32, seed=3)
    assert ids.dtype == np.int32
    assert ids.shape == (32,)
    assert ids.min() >= 0
    assert ids.max() < 100
    assert (ids == choose_token_ids(100, length=32, seed=3)).all()
    assert (ids != choose_token_ids(100, length=32, seed=4)).any()


def test_excluded_ids_do_not_occur() -> None:
    assert set(choose_token_ids(4, length=50, exclude=(0, 2, 9)).tolist()) == {1, 3}


@pytest.mark.parametrize(("vocabulary", "length", "exclude"), [(0, 8, ()), (2, 8, (0, 1)), (10, 1, ())])
def test_a_probe_that_proves_nothing_is_refused(vocabulary: int, length: int, exclude: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="probe"):
        choose_token_ids(vocabulary, length, exclude=exclude)


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
    ("most", "window", "length"),
    [(4096, None, 32), (20, None, 19), (2, None, 2), (4096, 128, 160), (100, 128, 99), (40_000, 4096, 1025)],
)
def test_a_probe_is_longer_than_the_window_and_fits_engine_and_report(
    most: int, window: int | None, length: int
) -> None:
    assert probe_length(most, window) == length
