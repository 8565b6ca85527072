from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_services.trainer.data.prompts import PromptOrder


@given(count=st.integers(1, 50), seed=st.integers(0, 5), epochs=st.integers(1, 4), shuffle=st.booleans())
def test_every_epoch_has_every_problem_once(count: int, seed: int, epochs: int, shuffle: bool) -> None:
    order = PromptOrder(count, seed, shuffle, epochs)
    places = [order[k] for k in range(len(order))]
    assert len(places) == count * epochs
    for epoch in range(epochs):
        part = places[epoch * count : (epoch + 1) * count]
        assert {e for e, _ in part} == {epoch}
        assert sorted(index for _, index in part) == list(range(count))


@given(count=st.integers(1, 50), seed=st.integers(0, 5), picks=st.lists(st.integers(0, 99), max_size=20))
def test_law_5_a_place_is_the_same_however_reached(count: int, seed: int, picks: list[int]) -> None:
    walked = PromptOrder(count, seed, True, 2)
    line = [walked[k] for k in range(len(walked))]
    jumping = PromptOrder(count, seed, True, 2)
    longer = PromptOrder(count, seed, True, 5)
    for pick in picks:
        k = pick % len(line)
        assert jumping[k] == longer[k] == line[k]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def indices(seed: int, epoch: int) -> list[int]:
        order = PromptOrder(100, seed, True, 2)
        return [order[epoch * 100 + k][1] for k in range(100)]

    orders = [indices(0, 0), indices(0, 1), indices(1, 0), list(range(100))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    # fixed across processes and releases: a restarted trainer must find the order it left
    assert indices(42, 0)[:5] == [89, 0, 5, 56, 80]


def test_without_shuffle_the_order_is_the_data_sets() -> None:
    order = PromptOrder(3, 0, False, 2)
    assert [order[k] for k in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("place", [-1, 6])
def test_there_is_no_place_outside(place: int) -> None:
    with pytest.raises(IndexError, match=f"place {place} of 6"):
        PromptOrder(3, 0, True, 2)[place]
