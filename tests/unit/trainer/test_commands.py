"""What rank 0 does, the others do: a call of a command reaches them with its arguments."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.base.errors import ServiceError
from headrace.replay import Reservation
from headrace_services.trainer.control.rank import _COMMANDS, LeadRank, dismiss, follow
from headrace_services.trainer.distributed.liveness import Progress
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.learning.batch import BatchRejected
from tests.unit.trainer.loop_cases import reservation

CALLS: dict[str, tuple[Any, ...]] = {
    "load": ("runs/a/checkpoints/step_4",),
    "step": (reservation("a", "b"), [1.0, 0.5], [[0, 2], [1, 3]]),
    "gather_batch": (),
    "probe": ([1, 2, 3],),
    "probe_rounded": ([1, 2, 3],),
    "probe_states": ([1, 2, 3],),
    "weights": (True,),
    "damage": ("runs/a",),
    "save": ("runs/a",),
    "is_saved": (),
    "save_in_memory": (4, "a1"),
    "list_snapshot": (4, "a1"),
    "copy_snapshot": (4, "a1", "runs/a"),
    "clear_snapshots": (),
    "remove_snapshots": (),
    "require_room_for_snapshots": (),
}


class Wire(Ranks):
    """Two ranks: what is sent is there to be received."""

    def __init__(self) -> None:
        super().__init__(progress=Progress())
        self.size = 2
        self.sent: deque[bytes] = deque()

    def send(self, command: bytes) -> None:
        self.sent.append(command)

    def receive(self) -> bytes:
        return self.sent.popleft()


class Follower:
    """Records its calls; `steps` are refused, and weights are a generator that must be run to its end."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.yielded = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name == "step":
                raise BatchRejected({"a": "it can't be read"})
            return self._weights() if name == "weights" else None

        return call

    def _weights(self) -> Iterator[int]:
        for number in range(3):
            self.yielded = number + 1
            yield number


def test_each_command_reaches_the_other_ranks_with_its_arguments() -> None:
    assert CALLS.keys() == _COMMANDS.keys()
    ranks = Wire()
    lead = LeadRank(None, ranks, lambda keys: [])  # type: ignore[arg-type]
    lead._part = SimpleNamespace(done=lambda: True)  # type: ignore[assignment]
    for name, arguments in CALLS.items():
        with contextlib.suppress(Exception):  # it has no model
            getattr(lead, name)(*arguments)
    dismiss(ranks)
    follower = Follower(ranks)
    follow(follower)  # type: ignore[arg-type]
    assert dict(follower.calls) == CALLS
    assert [name for name, _ in follower.calls] == list(CALLS)
    assert isinstance(follower.calls[1][1][0], Reservation)
    assert follower.yielded == 3
    assert not ranks.sent


def test_a_command_of_another_build_is_an_error() -> None:
    ranks = Wire()
    ranks.send(msgspec.msgpack.encode(["extents"]))
    with pytest.raises(ServiceError, match=r"'extents'"):
        follow(Follower(ranks))  # type: ignore[arg-type]
