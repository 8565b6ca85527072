"""A group of nccl whose calls block, as real ones do when a peer never comes or hangs: what is given up, and who says so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from headrace.config import Config
from headrace.errors import Restartable, WeightChannelTimeout
from headrace_services.trainer.control.weight_sender import WeightSender
from headrace_services.weight_channel import transport
from headrace_services.weight_channel.transport import Channel, ClosedChannels, GroupRank, RendezvousStore

PATIENCE_S = 60.0


class Group:
    """Connecting waits for a peer that never comes, until the group is aborted; aborting waits for `let_go`."""

    def __init__(self) -> None:
        self.let_go, self.aborted = threading.Event(), threading.Event()
        self.connecting = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connecting.set()
        assert self.aborted.wait(PATIENCE_S)

    def abort(self) -> None:
        assert self.let_go.wait(PATIENCE_S)
        self.aborted.set()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    group = Group()
    monkeypatch.setattr(Channel, "_process_group", lambda self, seconds: group)
    yield group
    group.let_go.set()


def lead(timeout_s: float) -> Channel:
    """The channel, which was given up."""
    store = RendezvousStore("127.0.0.1", 0)
    place = GroupRank("g", "nccl", "127.0.0.1", store.port, 0, 1, torch.device("cpu"), bytes(32))
    opened: list[Channel] = []
    with pytest.raises(WeightChannelTimeout, match="peers to connect"):
        Channel.lead(place, store, time.monotonic() + timeout_s, opened.append)
    return opened[0]


def test_a_peer_that_never_comes_is_given_up_and_leaves_no_thread(group: Group) -> None:
    group.let_go.set()
    channel = lead(0.5)
    assert group.connecting.is_set()
    assert channel.join(PATIENCE_S)
    assert group.aborted.is_set()
    closed = ClosedChannels()
    closed.add(channel)
    closed.check()


def test_an_abort_that_blocks_holds_nobody_up_and_the_process_says_that_it_must_end(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, closed = lead(0.5), ClosedChannels()  # which would wait for ever if the abort were waited for
    closed.add(channel)
    closed.check()  # it still has time
    monkeypatch.setattr(channel, "_over_by", time.monotonic())
    with pytest.raises(Restartable, match=r"a call of nccl in group g.* only a new process"):
        closed.check()
    group.let_go.set()
    assert channel.join(PATIENCE_S)
    closed.check()


async def test_no_refit_begins_beside_a_call_that_hangs(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ABORT_S", 0.0)
    sender = WeightSender(Config(), SimpleNamespace())  # type: ignore[arg-type]
    sender._opened(await asyncio.to_thread(lead, 0.5))
    sender._close_channel()  # on the event loop
    source = SimpleNamespace(metadata=lambda: [("a", "float32", (1,))])
    with pytest.raises(Restartable, match="only a new process"):
        await sender.refit(0, "t", source, torch.zeros(2).numpy(), torch.zeros(1).numpy())  # type: ignore[arg-type]
