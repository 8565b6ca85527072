"""How many prompts the buffer gets, and when they end."""

from __future__ import annotations

import pytest

from headrace_services.trainer.control.feeder import next_orders
from tests.unit.trainer.loop_cases import run_state

DEMAND = {"ahead": 6, "total": 100, "to_train": 20}


@pytest.mark.parametrize(
    ("enqueued", "counts", "expected"),
    [
        (-1, {}, (range(0, 6), False)),
        (5, {"queued": 2, "open": 4}, (range(6, 10), False)),
        (5, {"queued": 9}, (range(6, 6), False)),
        (17, {"trained": 18}, (range(18, 20), False)),
        (19, {"trained": 18, "open": 2}, (range(20, 20), False)),
        (19, {"trained": 18, "failed": 1, "filtered": 2}, (range(20, 23), False)),
    ],
)
def test_the_feeder_keeps_ahead_and_replaces_what_was_lost(
    enqueued: int, counts: dict[str, int], expected: tuple[range, bool]
) -> None:
    assert next_orders(run_state(enqueued=enqueued, counts=counts), **DEMAND) == expected


def test_the_feeder_closes_after_the_last_prompt_only() -> None:
    demand = {"ahead": 6, "total": 10, "to_train": 1000}
    assert next_orders(run_state(enqueued=3, counts={}), **demand) == (range(4, 10), True)
    assert next_orders(run_state(enqueued=9, counts={"queued": 6}), **demand) == (range(10, 10), True)
    assert next_orders(run_state(enqueued=3, counts={"queued": 1}), **demand) == (range(4, 9), False)
