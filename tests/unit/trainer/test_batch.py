import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trajectory import Span
from services.trainer.batch import (
    Sample,
    mask_old_tokens,
    problem_with,
    split_across_ranks,
)


def sample(prompt: list[int], completion: list[int], mask: list[int] | None = None, multiplier: float = 1.0) -> Sample:
    return Sample(
        np.array(prompt, np.int32),
        np.array(completion, np.int32),
        -np.arange(1, len(completion) + 1, dtype=np.float32),
        np.array(mask if mask is not None else [1] * len(completion), np.uint8),
        2.5,
        multiplier,
    )


@pytest.mark.parametrize(
    ("oldest", "expected"), [(2, [1, 0, 1, 1, 1]), (3, [0, 0, 1, 1, 1]), (4, [0, 0, 0, 1, 1]), (6, [0] * 5)]
)
def test_law_2_tokens_over_age_leave_the_loss_and_its_token_count(oldest: int, expected: list[int]) -> None:
    spans = (Span(2, 0, 2), Span(3, 2, 3), Span(5, 3, 5))
    loss_mask = np.array([1, 0, 1, 1, 1], dtype=np.uint8)
    loss_mask.flags.writeable = False  # as it comes from a payload
    young = mask_old_tokens(loss_mask, spans, oldest)
    assert young.tolist() == expected
    masked = sample([1, 2], [3, 4, 5, 6, 7], expected)
    assert masked.weight == sum(expected)
    assert masked.tokens.policy.tolist() == expected


@given(lengths=st.lists(st.integers(1, 500), max_size=40), ranks=st.integers(1, 5))
def test_split_across_ranks_is_a_partition_of_even_counts(lengths: list[int], ranks: int) -> None:
    shares = split_across_ranks(lengths, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= 2 * max(lengths, default=0)


GOOD = sample([1], [2, 3])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"behaviour_logprobs": np.array([-1, np.nan], np.float32)}, "behaviour log-probability is not finite"),
        ({"behaviour_logprobs": np.array([-1], np.float32)}, "behaviour_logprobs has 1 entries for 2"),
        ({"loss_mask": np.array([1], np.uint8)}, "loss_mask has 1 entries for 2"),
        ({"advantage": float("inf")}, "advantage is inf"),
        ({"loss_multiplier": -1.0}, "multiplier is -1"),
        ({"prompt_token_ids": np.array([], np.int32)}, "prompt of 0"),
    ],
)
def test_problems_are_named(change: dict, says: str) -> None:
    assert problem_with(GOOD) is None
    assert says in (problem_with(dataclasses.replace(GOOD, **change)) or "")
