from __future__ import annotations

import numpy as np
import pytest

from headrace.weights.probe import choose_token_ids


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
