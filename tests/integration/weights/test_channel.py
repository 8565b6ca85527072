"""Real gloo groups between processes: what arrives, and that every step ends when a peer dies or hangs in the middle."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.base.errors import ServiceError, WeightChannelAborted, WeightChannelError, WeightChannelTimeout
from headrace_services.refit.channel import Channel, Channels, GroupRank, RendezvousStore, SignedStore
from headrace_services.refit.checksum import checksum
from headrace_services.refit.manifest import Manifest
from headrace_services.refit.transfer import copy, receive, send
from tests.chaos import runs
from tests.support import weight_peer
from tests.support.forks import fork

SECRET = bytes(range(32))
PATIENCE_S = 60.0  # for what must happen and is not what the test is about
# told by the sender, or by a lost connection: never its own deadline
ENDED = ("WeightChannelAborted", "WeightChannelError")


class Peer:
    """A receiver process and what it said so far."""

    def __init__(self, spec: dict[str, object]) -> None:
        self._talk, theirs = socket.socketpair()
        with theirs:
            self.process = fork(weight_peer.main, spec, talk=theirs)
        self.said: queue.Queue[dict] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with self._talk, self._talk.makefile() as lines:
            for line in lines:
                self.said.put(json.loads(line))

    def expect(self, event: str) -> dict:
        while True:
            said = self.said.get(timeout=PATIENCE_S)
            if said["event"] == event:
                return said
            assert said["event"] in ("joined", "bucket", "received"), said

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Fleet:
    def __init__(self) -> None:
        self.store = RendezvousStore("127.0.0.1", 0)
        self.peers: list[Peer] = []
        self.group = "g"
        self.channel: Channel | None = None

    def start(
        self, manifest: Manifest, size: int, timeout_s: float = PATIENCE_S, transfers: int = 1, secret: bytes = SECRET
    ) -> None:
        for rank in range(1, size + 1):
            self.peers.append(
                Peer(
                    {
                        "group_id": self.group,
                        "port": self.store.port,
                        "secret": secret.hex(),
                        "rank": rank,
                        "world_size": size + 1,
                        "timeout_s": timeout_s,
                        "transfers": transfers,
                        "manifest": manifest.encode(),
                    }
                )
            )

    def lead(self, size: int, timeout_s: float = PATIENCE_S) -> Channel:
        place = GroupRank(self.group, "gloo", "127.0.0.1", self.store.port, 0, size + 1, torch.device("cpu"), SECRET)
        return Channel.lead(place, self.store, time.monotonic() + timeout_s, self._opened)

    def _opened(self, channel: Channel) -> None:
        self.channel = channel

    def stop(self) -> None:
        if self.channel is not None:
            self.channel.close()
        for peer in self.peers:
            peer.stop()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.stop()


def weights(*, large: bool = False) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    rows = 1_000_000 if large else 40  # 64 MB is more than the sockets of a peer that does not read will hold
    return [
        ("a", torch.randn(rows, 16, generator=generator)),
        ("b", torch.randn(3, generator=generator).to(torch.bfloat16)),
        ("c", torch.tensor(5, dtype=torch.int64)),
        ("d", torch.randn(2, 3, 4, generator=generator)),
        ("e", torch.randn(rows, 16, generator=generator)),
    ]


def manifest_of(tensors: list[tuple[str, torch.Tensor]], bucket_bytes: int = 4096) -> Manifest:
    return Manifest.of([(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors], bucket_bytes)


def test_every_receiver_gets_every_tensor_again_and_again(fleet: Fleet) -> None:
    tensors = weights()
    manifest = manifest_of(tensors, bucket_bytes=200)
    fleet.start(manifest, 2, transfers=3)
    channel = fleet.lead(2)
    for round_ in range(3):
        tensors = [(name, tensor + round_) for name, tensor in tensors]
        send(channel, manifest, tensors, time.monotonic() + PATIENCE_S)
        for peer in fleet.peers:
            sums = peer.expect("received")["sums"]
            assert sums == {name: tensor.double().sum().item() for name, tensor in tensors}


def test_a_bucket_is_filled_and_another_loaded_while_one_travels(fleet: Fleet) -> None:
    tensors = [(name, torch.full((4_000_000,), float(i))) for i, name in enumerate("abcd")]  # more than sockets hold
    manifest = manifest_of(tensors)
    asked = {name: threading.Event() for name, _ in tensors}

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            asked[name].set()
            yield name, tensor

    def follow() -> None:
        place = GroupRank("g", "gloo", "127.0.0.1", fleet.store.port, 1, 2, torch.device("cpu"), SECRET)
        channel = Channel.follow(place, time.monotonic() + PATIENCE_S)
        assert asked["b"].wait(PATIENCE_S)  # nobody takes "a" yet
        sums = []
        for ((name, tensor, known),), (_, sent) in zip(
            receive(channel, manifest, time.monotonic() + PATIENCE_S), tensors, strict=True
        ):
            assert name != "a" or asked["d"].wait(PATIENCE_S)  # "b" has arrived
            assert torch.equal(tensor, sent)
            sums.append(known)
        assert sums == [checksum(sent) for _, sent in tensors]

    with ThreadPoolExecutor(1) as threads:
        follower = threads.submit(follow)
        send(fleet.lead(1), manifest, source(), time.monotonic() + PATIENCE_S)
        follower.result(PATIENCE_S)


def test_a_weight_of_another_device_is_cast_before_it_leaves() -> None:
    """torch would cast it on the host, in memory that is not pinned: a refit of 3 GB took 6 s. The other device is a stand-in."""
    copied = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
                copied.append([tensor.dtype for tensor in args[:2]])
                return args[0]
            return func(*args, **(kwargs or {}))

    with Copies():
        copy(Manifest.of([("a", "bfloat16", (4, 4))], 4096), [("a", torch.empty(4, 4, device="meta"))])
    assert copied == [[torch.bfloat16, torch.bfloat16]]


def test_buckets_are_pinned_where_a_gpu_copies_them(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none travels, or is filled again, while the GPU still copies: here the GPU is a stand-in."""
    tensors = weights()
    manifest = manifest_of(tensors, bucket_bytes=200)
    fleet.start(manifest, 1)
    channel, empty, pinned, waited = fleet.lead(1), torch.empty, [], []

    def allocate(*size: int, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*size, **named)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: waited.append(1)))
    monkeypatch.setattr(torch, "empty", allocate)
    send(channel, manifest, tensors, time.monotonic() + PATIENCE_S)
    assert fleet.peers[0].expect("received")
    assert pinned[:2] == [True, True]
    assert not any(pinned[2:])  # what is no bucket
    assert len(waited) == len(manifest.buckets()) + 1  # and the checksums


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_lost_in_the_middle_ends_at_the_deadline(fleet: Fleet, signum: signal.Signals) -> None:
    tensors = weights(large=True)
    manifest = manifest_of(tensors)
    fleet.start(manifest, 2, timeout_s=10 * PATIENCE_S, transfers=2)
    channel = fleet.lead(2)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name == "e":
                for peer in fleet.peers:
                    peer.expect("bucket")
                os.kill(fleet.peers[0].process.pid, signum)
            yield name, tensor

    with pytest.raises(WeightChannelError):
        send(channel, manifest, source(), time.monotonic() + 10.0)
    # the survivor is told, long before its own deadline
    assert fleet.peers[1].expect("error")["type"] in ENDED
    with pytest.raises(WeightChannelAborted):
        channel.broadcast(torch.zeros(1), time.monotonic() + PATIENCE_S)


def test_the_sender_can_give_up_a_broadcast_at_once(fleet: Fleet) -> None:
    tensors = weights(large=True)
    manifest = manifest_of(tensors)
    fleet.start(manifest, 1)
    channel = fleet.lead(1)
    os.kill(fleet.peers[0].process.pid, signal.SIGSTOP)
    threading.Timer(0.2, channel.close).start()
    with pytest.raises(WeightChannelAborted):
        send(channel, manifest, tensors, time.monotonic() + 10 * PATIENCE_S)


def test_a_sender_that_gives_up_leaves_no_call_behind(fleet: Fleet) -> None:
    """Long before its deadline: a call that comes back while the interpreter ends takes the process down."""

    def opened(channel: Channel) -> None:
        fleet.channel = channel
        threading.Timer(0.2, channel.close).start()

    place = GroupRank("g", "gloo", "127.0.0.1", fleet.store.port, 0, 3, torch.device("cpu"), SECRET)
    with pytest.raises(WeightChannelAborted):
        Channel.lead(place, fleet.store, time.monotonic() + 10 * PATIENCE_S, opened)
    assert fleet.channel is not None
    assert fleet.channel.join(PATIENCE_S)


def test_a_receiver_is_freed_when_the_sender_is_killed(fleet: Fleet) -> None:
    tensors = weights()
    manifest = manifest_of(tensors)
    script = (
        "import sys, time, torch\n"
        "from headrace_services.refit.channel import *\n"
        "store = RendezvousStore('127.0.0.1', 0)\n"
        "print(store.port, flush=True)\n"
        "place = GroupRank('g', 'gloo', '127.0.0.1', store.port, 0, 2, torch.device('cpu'), bytes.fromhex(sys.argv[1]))\n"
        "Channel.lead(place, store, time.monotonic() + 60, lambda channel: None)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, SECRET.hex()], stdout=subprocess.PIPE, text=True) as sender:
        try:
            port = int(sender.stdout.readline())
            spec = {"group_id": "g", "port": port, "secret": SECRET.hex(), "rank": 1, "world_size": 2, "transfers": 1}
            fleet.peers.append(Peer({**spec, "timeout_s": 10 * PATIENCE_S, "manifest": manifest.encode()}))
            fleet.peers[-1].expect("joined")
        finally:
            sender.kill()
    assert fleet.peers[-1].expect("error")["type"] in ENDED


def test_a_member_that_never_comes_ends_the_wait_at_the_deadline(fleet: Fleet) -> None:
    manifest = manifest_of(weights())
    fleet.start(manifest, 1)
    with pytest.raises(WeightChannelTimeout, match="members to join"):
        fleet.lead(2, timeout_s=1.0)
    assert fleet.peers[0].expect("error")["type"] == "WeightChannelAborted"


def test_a_closed_group_frees_its_buckets(fleet: Fleet) -> None:
    """As after a replica has joined or died: the next group has buckets of its own."""
    tensors = weights()
    manifest = manifest_of(tensors)
    channels, buckets = Channels(), []
    for fleet.group in ("first", "second", "third"):
        fleet.start(manifest, 1)
        channel = fleet.lead(1)
        send(channel, manifest, tensors, time.monotonic() + PATIENCE_S)
        fleet.peers[-1].expect("received")
        buckets += [weakref.ref(bucket) for bucket in channel._buffers]
        channels.open = channel
        channels.close()
        assert channel.join(PATIENCE_S)
    gc.collect()
    assert not [kept for bucket in buckets if (kept := bucket()) is not None]


def lead_acting(fleet: Fleet, act: Callable[[], object]) -> tuple[Channel, list[weakref.ref[torch.Tensor]]]:
    """A group of one member, in which a call of `act` precedes each broadcast of weights; and their buckets so far."""
    buckets: list[weakref.ref[torch.Tensor]] = []

    class Acting(Channel):
        def _broadcast(self, tensor: torch.Tensor, *how: Any) -> None:
            if tensor.numel() > 32:  # no challenge
                buckets.append(weakref.ref(self._buffers[0]))
                act()
            super()._broadcast(tensor, *how)

    fleet.start(manifest_of(weights()), 1)
    place = GroupRank("g", "gloo", "127.0.0.1", fleet.store.port, 0, 2, torch.device("cpu"), SECRET)
    return Acting.lead(place, fleet.store, time.monotonic() + PATIENCE_S, fleet._opened), buckets


def test_a_closed_group_frees_its_buckets_once_no_call_has_them(fleet: Fleet) -> None:
    let_go = threading.Event()
    channel, buckets = lead_acting(fleet, lambda: let_go.wait(PATIENCE_S))
    tensors = weights()
    try:
        with pytest.raises(WeightChannelTimeout, match=r"the network is slow.*weight_channel\.timeout_s"):
            send(channel, manifest_of(tensors), tensors, time.monotonic() + 1.0)
        gc.collect()
        assert buckets[0]() is not None
    finally:
        let_go.set()
    assert channel.join(PATIENCE_S)
    gc.collect()
    assert buckets[0]() is None


def test_a_group_that_failed_frees_the_bucket_that_did_not_travel(fleet: Fleet) -> None:
    """Its error, which the channel keeps, knows what the failed call was given."""

    def fail() -> None:
        raise RuntimeError("connection reset")

    channel, buckets = lead_acting(fleet, fail)
    tensors = weights()
    with pytest.raises(WeightChannelError, match="connection reset"):
        send(channel, manifest_of(tensors), tensors, time.monotonic() + PATIENCE_S)
    assert channel.join(PATIENCE_S)
    gc.collect()
    assert buckets[0]() is None


def test_who_has_not_the_secret_gets_nothing(fleet: Fleet) -> None:
    manifest = manifest_of(weights())
    fleet.start(manifest, 1, secret=b"x" * 32)
    with pytest.raises(WeightChannelError, match=r"'ready/1'.*member"):
        fleet.lead(1)
    assert fleet.peers[0].expect("error")["type"] in ENDED


def test_an_address_that_a_stranger_puts_into_the_store_is_not_used(fleet: Fleet) -> None:
    store = SignedStore(fleet.store.connect(), "g", SECRET)
    store.set("0/1", b"10.0.0.1")
    assert store.get("0/1") == b"10.0.0.1"
    stranger = dist.PrefixStore("g", fleet.store.connect())
    stranger.set("0/1", bytes(32) + b"6.6.6.6")
    with pytest.raises(RuntimeError, match=r"'0/1'.*member"):
        store.get("0/1")
    # what a member signed counts neither under another key nor in another group
    store.set("0/1", b"10.0.0.1")
    stranger.set("0/2", stranger.get("0/1"))
    other = SignedStore(fleet.store.connect(), "h", SECRET)
    dist.PrefixStore("h", fleet.store.connect()).set("0/1", stranger.get("0/1"))
    for view, key in ((store, "0/2"), (other, "0/1")):
        with pytest.raises(RuntimeError, match="was not written"):
            view.get(key)


def test_a_rank_whose_place_is_taken_is_found_before_a_tensor_moves(fleet: Fleet) -> None:
    """It has the secret, but the challenge went to the other."""

    class Displaced(Channel):
        def _answer(self, deadline: float) -> None:
            self.broadcast(self._nonce(bytes(32)), deadline)
            self._store.set("proof/1", self._proof(1, bytes(32)))

    def follow() -> None:
        place = GroupRank("g", "gloo", "127.0.0.1", fleet.store.port, 1, 2, torch.device("cpu"), SECRET)
        Displaced.follow(place, time.monotonic() + PATIENCE_S)

    member = threading.Thread(target=follow)
    member.start()
    with pytest.raises(WeightChannelError, match=r"rank 1.*challenge"):
        fleet.lead(1)
    member.join(PATIENCE_S)


def test_an_unreachable_store_is_an_error_with_the_remedy() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = GroupRank("g", "gloo", "127.0.0.1", port, 1, 2, torch.device("cpu"), SECRET)
    with pytest.raises(WeightChannelTimeout, match=r"weight_channel\.host"):
        Channel.follow(place, time.monotonic() + 1.0)


AT_SIX = """
from headrace_services.refit.channel import RendezvousStore
RendezvousStore("fd00::1", 0).connect()
print("reached")
"""


def test_a_busy_port_is_an_error_that_names_the_key() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(ServiceError, match=r"weight_channel\.port"):
            RendezvousStore("127.0.0.1", busy.getsockname()[1])


def test_a_source_that_breaks_its_word_is_run_to_its_end_and_refused(fleet: Fleet) -> None:
    tensors = weights()
    manifest = manifest_of(tensors)
    fleet.start(manifest, 1)
    channel = fleet.lead(1)
    given = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in reversed(tensors):
            given.append(name)
            yield name, tensor

    with pytest.raises(ValueError, match="manifest announces"):
        send(channel, manifest, source(), time.monotonic() + PATIENCE_S)
    assert len(given) == len(tensors)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_a_host_that_is_not_this_machine_names_the_key(
    host: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace_services.refit.channel._STORE_TIMEOUT", timedelta(seconds=0.5))
    monkeypatch.setattr("headrace_services.refit.channel._REACH_S", 0.5, raising=False)
    with pytest.raises(ServiceError, match=r"weight_channel\.host:.*store"):
        RendezvousStore(host, 0)
    assert "c10d" not in capfd.readouterr().err, "torch tried for a minute, and wrote its stack"


def test_a_trainer_is_reached_at_an_address_of_version_6() -> None:
    if lacks := runs.missing():
        pytest.skip(lacks)
    script = f"ip link set lo up && ip addr add fd00::1/64 dev lo nodad && {sys.executable} -c '{AT_SIX}'"
    done = subprocess.run([*runs.NAMESPACES, "sh", "-c", script], cwd=runs.ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["reached"], done.stderr


def test_a_store_that_is_gone_is_an_error_before_any_rank_joins(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise torch.distributed.DistNetworkError("connection reset")

    monkeypatch.setattr(fleet.store, "_store", type("Store", (), {"clone": staticmethod(gone)}))
    with pytest.raises(WeightChannelError, match=r"store failed.*reset"):
        fleet.lead(1)


def test_floats_are_cast_to_what_the_manifest_announces(fleet: Fleet) -> None:
    tensors = weights()
    cast = [(name, tensor.bfloat16() if tensor.is_floating_point() else tensor) for name, tensor in tensors]
    manifest = manifest_of(cast)
    fleet.start(manifest, 1)
    send(fleet.lead(1), manifest, tensors, time.monotonic() + PATIENCE_S)
    assert fleet.peers[0].expect("received")["sums"] == {name: it.double().sum().item() for name, it in cast}


def test_a_tensor_that_arrives_with_other_bytes_is_named(fleet: Fleet) -> None:
    tensors = weights()
    manifest = manifest_of(tensors, bucket_bytes=200)

    class Torn(Channel):
        def broadcasting(self, tensor: torch.Tensor, deadline: float) -> contextlib.AbstractContextManager[None]:
            if tensor.numel() == 24 * 4:  # "d"
                tensor = tensor.clone()
                tensor[50] ^= 1
            return super().broadcasting(tensor, deadline)

    fleet.start(manifest, 1)
    place = GroupRank("g", "gloo", "127.0.0.1", fleet.store.port, 0, 2, torch.device("cpu"), SECRET)
    channel = Torn.lead(place, fleet.store, time.monotonic() + PATIENCE_S, fleet._opened)
    send(channel, manifest, tensors, time.monotonic() + PATIENCE_S)
    assert "first is d" in fleet.peers[0].expect("error")["message"]
