"""A group of nccl whose calls block, as real ones do when a peer never comes or hangs: what is given up, and who says so; and how torch is
asked for one."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.base.errors import Restartable, WeightChannelTimeout
from headrace.config import Config
from headrace_services.refit import nccl
from headrace_services.refit.backends import Backend
from headrace_services.refit.channel import Channel, Channels, GroupRank, RendezvousStore
from headrace_services.refit.sender import WeightSender

PATIENCE_S = 60.0


class Group:
    """Connecting waits for a peer that never comes, until the group is aborted; or, if it `connects`, the first broadcast does. Aborting
    waits for `let_go`."""

    def __init__(self) -> None:
        self.connects = False
        self.let_go, self.aborted = threading.Event(), threading.Event()
        self.connecting = threading.Event()
        self.failure: Exception | None = None  # of the abort

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connecting.set()
        if not self.connects:
            self.wait()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Group:
        return self

    def wait(self) -> None:
        assert self.aborted.wait(PATIENCE_S)

    def abort(self) -> None:
        assert self.let_go.wait(PATIENCE_S)
        self.aborted.set()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    group = Group()
    monkeypatch.setattr(Channel, "_process_group", lambda self, seconds: group)
    yield group
    group.let_go.set()


def place(store: RendezvousStore, backend: Backend = "nccl") -> GroupRank:
    return GroupRank("g", backend, "127.0.0.1", store.port, 0, 1, torch.device("cpu"), bytes(32))


def lead(timeout_s: float) -> Channel:
    """The channel, which was given up in a call that hangs. If the machine stood still before that call, another one is."""
    while True:
        store = RendezvousStore("127.0.0.1", 0)
        opened: list[Channel] = []
        with pytest.raises(WeightChannelTimeout) as late:
            Channel.lead(place(store), store, time.monotonic() + timeout_s, opened.append)
        if re.search("peers to connect|a broadcast", str(late.value)):
            return opened[0]


def test_a_peer_that_never_comes_is_given_up_and_leaves_no_thread(group: Group) -> None:
    group.let_go.set()
    channel = lead(0.5)
    assert group.connecting.is_set()
    assert channel.join(PATIENCE_S)
    assert group.aborted.is_set()
    channels = Channels()
    channels.open = channel
    channels.close()
    channels.check()


def test_an_abort_that_blocks_holds_nobody_up(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    group.connects = True
    channel, channels = lead(0.5), Channels()  # which would wait for ever if the abort were waited for
    channels.open = channel
    channels.close()
    channels.check()  # it still has time
    monkeypatch.setattr(channel, "_over_by", time.monotonic())
    with pytest.raises(Restartable, match=r"group g.*abandoned call"):
        channels.check()
    group.let_go.set()
    assert channel.join(PATIENCE_S)
    channels.check()


async def test_no_refit_begins_beside_a_call_that_hangs(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    group.connects = True
    monkeypatch.setattr("headrace_services.refit.channel.ABORT_S", 0.0)
    sender = WeightSender(Config(), SimpleNamespace())  # type: ignore[arg-type]
    sender._channels.open = await asyncio.to_thread(lead, 0.5)
    sender._channels.close()  # on the event loop
    source = SimpleNamespace(metadata=lambda: [("a", "float32", (1,))])
    with pytest.raises(Restartable, match="only a new process"):
        await sender.refit(0, "t", source, torch.zeros(2).numpy(), torch.zeros(1).numpy())  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", [None, RuntimeError("NCCL timeout in: NCCLUtils.cpp")])
def test_a_group_that_never_connected_holds_no_device(
    group: Group, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    """So the process goes on, and the weights can travel another way."""
    monkeypatch.setattr("headrace_services.refit.channel.ABORT_S", 0.0)
    group.failure = failure
    channel, channels = lead(0.5), Channels()
    channels.open = channel
    channels.close()
    channels.check()
    group.let_go.set()
    assert channel.join(PATIENCE_S)
    channels.check()


def test_a_group_that_was_not_aborted_ends_the_process(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    group.connects, group.failure = True, RuntimeError("NCCL timeout in: NCCLUtils.cpp")
    group.let_go.set()
    channel, channels = lead(0.5), Channels()
    channels.open = channel
    channels.close()
    assert channel.join(PATIENCE_S)
    assert "could not be aborted" in caplog.text
    store = RendezvousStore("127.0.0.1", 0)
    channels.open = Channel(place(store), store.connect())  # another does not make it forgotten
    channels.close()
    with pytest.raises(Restartable, match=r"group g.*aborted.*NCCL timeout"):
        channels.check()


class TorchsGroup:
    """`ProcessGroupNCCL`, which a build of torch for the CPU lacks."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)  # what NCCL calls undefined
            self._timeout: timedelta | None = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.options, self.environment = options, dict(os.environ)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TorchsGroup]:
    """Has a group made in a process that `headrace_services.refit.nccl` has prepared."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", TorchsGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def made(backend: Backend = "nccl") -> TorchsGroup:
        nccl.prepare_environment(60.0)
        before = dict(os.environ)
        store = RendezvousStore("127.0.0.1", 0)
        group = Channel(place(store, backend), store.connect())._process_group(0.5)
        assert os.environ == before
        assert group.environment.keys() == before.keys()  # a thread may be reading it
        return group

    return made


def test_torch_neither_ends_the_process_nor_gives_a_broadcast_up(made: Callable[..., TorchsGroup]) -> None:
    group = made()
    assert group.environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert group.environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert group.options._timeout is not None
    assert group.options._timeout > timedelta(days=30)  # a group serves many refits, each with a deadline of its own


@pytest.mark.parametrize(("backend", "blocking"), [("nccl", 0), ("nccl-blocking", 1)])
def test_whether_a_group_blocks_is_said_whatever_torchs_switch_says(
    made: Callable[..., TorchsGroup], backend: Backend, blocking: int
) -> None:
    for switch in ("0", "1"):
        os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] = switch
        assert made(backend).options.config.blocking == blocking
        assert nccl.may_be_nonblocking() == (switch == "1")
