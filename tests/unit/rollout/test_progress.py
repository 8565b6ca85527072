"""What a replica reports of its leases: a lease progresses with what it waits for, and with nothing else."""

from __future__ import annotations

import msgspec

from headrace.replay import Lease
from headrace_services.rollout.progress import Progress
from tests.support.buffer import make_group

FIRST, SECOND, THIRD = (
    Lease(make_group(order), f"token-{order}", 1, order, 0, "t", "i", 15.0, 2, (0, 1)) for order in range(3)
)


class Engine:
    """What it has sampled, by group and index."""

    def __init__(self) -> None:
        self.sampled: dict[tuple[str, int], int] = {}

    def __call__(self, lease: Lease, index: int) -> int:
        return self.sampled.get((lease.group.id, index), 0)


def test_tokens_of_a_lease_count_for_it_and_for_later_ones() -> None:
    progress, engine = Progress(), Engine()
    assert progress.count([FIRST, SECOND, THIRD], engine) == {"token-0": 0, "token-1": 0, "token-2": 0}
    engine.sampled |= {(SECOND.group.id, 0): 3, (SECOND.group.id, 1): 4}
    assert progress.count([FIRST, SECOND, THIRD], engine) == {"token-0": 0, "token-1": 7, "token-2": 7}
    assert progress.count([FIRST, SECOND, THIRD], engine) == {"token-0": 0, "token-1": 7, "token-2": 7}


def test_a_trajectory_that_ends_takes_nothing_back() -> None:
    progress, engine = Progress(), Engine()
    engine.sampled = {(FIRST.group.id, 0): 5, (FIRST.group.id, 1): 2}
    assert progress.count([FIRST], engine) == {"token-0": 7}
    engine.sampled = {(FIRST.group.id, 1): 3}
    assert progress.count([FIRST], engine) == {"token-0": 8}


def test_only_what_a_lease_misses_is_counted_from_where_it_begins() -> None:
    progress, engine = Progress(), Engine()
    engine.sampled = {(FIRST.group.id, 0): 5}
    assert progress.count([msgspec.structs.replace(FIRST, missing=(1,))], engine) == {"token-0": 0}


def test_a_lease_that_is_over_is_forgotten() -> None:
    progress, engine = Progress(), Engine()
    engine.sampled = {(FIRST.group.id, 0): 5}
    progress.count([FIRST, SECOND], engine)
    assert progress.count([SECOND], engine) == {"token-1": 5}
    assert progress.count([FIRST, SECOND], engine) == {"token-0": 5, "token-1": 10}
