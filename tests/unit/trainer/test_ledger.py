"""The ledger of what was trained: exact, small, and damaged."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from headrace.base.errors import ServiceError
from headrace.replay import Ended
from headrace_services.trainer.control.checkpoint import Ledger, ended_orders


@given(st.sets(st.integers(0, 60)), st.randoms())
def test_the_ledger_holds_exactly_what_was_put_in(places: set[int], rng: object) -> None:
    ledger = Ledger()
    shuffled = sorted(places, key=lambda _: rng.random())  # type: ignore[attr-defined]
    for place in shuffled:
        ledger.record(place, [], [place])
    assert {place for place in range(62) if place in ledger.trained} == places
    assert len(ledger.trained) == len(places)
    assert ledger.last == max(places, default=-1)
    assert list(ledger.missing(62, BitMap([3, 61]))) == sorted(set(range(63)) - places - {3, 61})
    assert list(Ledger.decode(ledger.encode()).trained) == sorted(places)


@given(st.sets(st.integers(0, 60)))
def test_the_ended_are_read_from_the_buffer_s_bitmap(places: set[int]) -> None:
    bitmap = bytearray(8)
    for place in places:
        bitmap[place // 8] |= 128 >> place % 8
    assert list(ended_orders(Ended(len(places), 0, bytes(bitmap)))) == sorted(places)
    with pytest.raises(ServiceError, match=f"has the places of {len(places)}"):
        ended_orders(Ended(len(places), 1, bytes(bitmap)))


def test_the_ledger_of_prompts_trained_in_any_order_stays_small() -> None:
    """A bit a place at the most, where half of them are trained."""
    places = sorted(random.Random(1).sample(range(1_000_000), 500_000))
    assert len(Ledger(places).encode()) < 1_000_000 / 8 * 1.1
    assert len(Ledger(range(1_000_000)).encode()) < 1000


def test_law_1_the_ledger_refuses_a_prompt_that_comes_again() -> None:
    ledger = Ledger(range(4))
    ledger.record(2, ["a", "b"], [4, 6])
    with pytest.raises(ServiceError, match=r"prompt 4 .*second time"):
        ledger.record(3, ["c"], [4])


@pytest.mark.parametrize("data", [b"", b"x", Ledger(range(0, 90, 7)).encode()[:-3]])
def test_a_ledger_that_is_damaged_is_refused(data: bytes) -> None:
    with pytest.raises(ServiceError, match="ledger can't be read"):
        Ledger.decode(data)


def test_steps_trained_during_a_write_belong_to_the_next_checkpoint() -> None:
    ledger = Ledger()
    ledger.record(0, ["a"], [0])
    first = ledger.cut()
    ledger.record(1, ["b"], [1])
    assert (first, ledger.cut(), ledger.cut()) == ({0: ["a"]}, {1: ["b"]}, {})
    assert list(ledger.trained) == [0, 1]
