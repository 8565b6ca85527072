"""How many prompts the buffer gets, and when they end."""

from __future__ import annotations

import pytest
from loop_cases import run_state

from services.trainer.control.feeder import Demand, Feed, next_feed

DEMAND = Demand(ahead=6, total=100, trained=20)


@pytest.mark.parametrize(
    ("enqueued", "counts", "expected"),
    [
        (-1, {}, Feed(0, 6, False)),
        (5, {"queued": 2, "open": 4}, Feed(6, 10, False)),
        (5, {"queued": 9}, Feed(6, 6, False)),
        (17, {"trained": 18}, Feed(18, 20, False)),
        (19, {"trained": 18, "open": 2}, Feed(20, 20, False)),
        (19, {"trained": 18, "failed": 1, "filtered": 2}, Feed(20, 23, False)),
    ],
)
def test_the_feeder_keeps_ahead_and_replaces_what_was_lost(
    enqueued: int, counts: dict[str, int], expected: Feed
) -> None:
    assert next_feed(DEMAND, run_state(enqueued=enqueued, counts=counts)) == expected


def test_the_feeder_closes_after_the_last_prompt_only() -> None:
    demand = Demand(ahead=6, total=10, trained=1000)
    assert next_feed(demand, run_state(enqueued=3, counts={})) == Feed(4, 10, True)
    assert next_feed(demand, run_state(enqueued=9, counts={"queued": 6})) == Feed(10, 10, True)
    assert next_feed(demand, run_state(enqueued=3, counts={"queued": 1})) == Feed(4, 9, False)
