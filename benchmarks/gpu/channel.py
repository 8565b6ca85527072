"""The weight channel: two ranks on one device, a peer that never comes, one that stands still."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.rows import NEEDS_CUDA, line
from benchmarks.gpu.stage import Stage
from headrace.base.errors import WeightChannelError
from headrace.net.service import die_with_parent
from headrace_services.refit import nccl
from headrace_services.refit.backends import Backend
from headrace_services.refit.channel import ABORT_S, Channel, GroupRank, RendezvousStore, SignedStore

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
MISSING, STOPPED = "a peer that never comes", "a peer that stands still in a broadcast"
HOST = "127.0.0.1"
START_S = 90.0  # for a peer to import torch and to join


class Pair:
    """A group of two, of which this process leads on `device` and `peer` follows on `peer_device`, by default the same."""

    def __init__(self, backend: Backend, device: torch.device, peer_device: torch.device | None = None) -> None:
        self.peer_device = peer_device or device
        self.store = RendezvousStore(HOST, 0)
        self.place = GroupRank(
            secrets.token_hex(4), backend, HOST, self.store.port, 0, 2, device, secrets.token_bytes(32)
        )
        self.channel: Channel | None = None

    def lead(self, timeout_s: float) -> Channel:
        nccl.prepare_environment(timeout_s)
        return Channel.lead(self.place, self.store, time.monotonic() + timeout_s, self._opened)

    @contextlib.contextmanager
    def peer(self, timeout_s: float, **asked: Any) -> Iterator[subprocess.Popen[str]]:
        """`benchmarks.gpu.peer`, which does what is `asked`; it is killed in the end."""
        place = {
            "group_id": self.place.group_id,
            "backend": self.place.backend,
            "port": self.place.port,
            "device": str(self.peer_device),
            "secret": self.place.secret.hex(),
            "timeout_s": timeout_s,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.peer", json.dumps(place | asked)],
            stdin=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        try:
            yield process
        finally:
            if self.channel is not None:
                self.channel.close()
            process.kill()
            process.communicate()

    def _opened(self, channel: Channel) -> None:
        self.channel = channel


def pairs(stage: Stage, *, apart: bool = True) -> Iterator[tuple[Backend, Pair]]:
    """A pair for each backend that there is here. gloo's tensors go through the host's memory. The peer of nccl has the second device, if
    there is one and they may be `apart`."""
    yield "gloo", Pair("gloo", torch.device("cpu"))
    if stage.device == "cuda":
        second = torch.device("cuda", 1) if apart and torch.cuda.device_count() > 1 else stage.torch_device
        yield "nccl", Pair("nccl", stage.torch_device, second)


def say_where(stage: Stage, pair: Pair) -> None:
    """A row with the devices of the pair, if it is one of nccl."""
    if pair.place.backend == "nccl":
        only = ", the only device" if torch.cuda.device_count() == 1 else ""
        stage.rows.add("the ranks of nccl are on", f"{pair.place.device} and {pair.peer_device}{only}")


def refused(backend: Backend, error: WeightChannelError) -> str:
    """What to report where no group of two could be formed, or nothing came through it: of gloo it is a failure."""
    return f"{'refused' if backend == 'nccl' else 'failed'}: {line(error)}"


def world_of_two(stage: Stage) -> None:
    """A group of two ranks on one device is formed, and a tensor arrives; or NCCL says why not."""
    what = f"two ranks of nccl on one device, {MULTI_RANK}={os.environ.get(MULTI_RANK, '0')}"
    if stage.device != "cuda":
        stage.rows.add(what, NEEDS_CUDA)
    for backend, pair in pairs(stage, apart=False):
        named = what if backend == "nccl" else "two ranks of gloo on one host"
        stage.rows.add(named, _two(stage, backend, pair))


def _two(stage: Stage, backend: Backend, pair: Pair) -> str:
    with pair.peer(START_S, broadcasts=1, nbytes=stage.size.bandwidth_bytes):
        try:
            channel = pair.lead(START_S)
            tensor = torch.ones(stage.size.bandwidth_bytes, dtype=torch.uint8, device=pair.place.device)
            began = time.perf_counter()
            channel.broadcast(tensor, time.monotonic() + START_S)
            took = time.perf_counter() - began
        except WeightChannelError as error:
            return refused(backend, error)
    version = f" (NCCL {'.'.join(map(str, torch.cuda.nccl.version()))})" if backend == "nccl" else ""
    return f"allowed{version}, first broadcast {tensor.numel() / took / 1e9:.2g} GB/s"


def missing_peer(stage: Stage) -> None:
    """Rank 1 has reported itself and never connects."""
    for backend, pair in pairs(stage):
        SignedStore(pair.store.connect(), pair.place.group_id, pair.place.secret).set("ready/1", b"")
        lead = functools.partial(pair.lead, stage.size.deadline_s)
        stage.rows.add(f"{MISSING}, {backend}", _given_up(stage, pair, lead), f"{stage.size.deadline_s:g} s")
    if stage.device != "cuda":
        stage.rows.add(f"{MISSING}, nccl", NEEDS_CUDA)


def stopped_peer(stage: Stage) -> None:
    """Rank 1 is stopped (SIGSTOP) before it has taken a broadcast."""
    for backend, pair in pairs(stage):
        say_where(stage, pair)
        # more than sockets hold
        tensor = torch.ones(max(2**26, stage.size.bandwidth_bytes), dtype=torch.uint8, device=pair.place.device)
        with pair.peer(2 * START_S, broadcasts=1, nbytes=tensor.numel()) as peer:
            try:
                channel = pair.lead(START_S)
            except WeightChannelError as error:
                found = refused(backend, error)
            else:
                peer.send_signal(signal.SIGSTOP)
                deadline = time.monotonic() + stage.size.deadline_s
                found = _given_up(stage, pair, functools.partial(channel.broadcast, tensor, deadline))
        stage.rows.add(f"{STOPPED}, {backend}", found, f"{stage.size.deadline_s:g} s")
    if stage.device != "cuda":
        stage.rows.add(f"{STOPPED}, nccl", NEEDS_CUDA)


def _given_up(stage: Stage, pair: Pair, call: Callable[[], object]) -> str:
    """How long `call` takes to be given up, and its thread to end once it was."""
    began = time.monotonic()
    try:
        call()
    except WeightChannelError as error:
        given_up = time.monotonic() - began
        assert pair.channel is not None
        ended = pair.channel.join(stage.size.deadline_s + ABORT_S)
        took = time.monotonic() - began - given_up
        after = f"its call ended {took:.1f} s later" if ended else f"its call HANGS {took:.0f} s later"
        return f"given up after {given_up:.1f} s ({type(error).__name__}), {after}"
    return "failed: the call came back as if the peer were there"
