"""The weight channel between two processes of this machine: each backend that the trainer tries, and a peer that is killed."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, get_args

import torch

from benchmarks.gpu.rows import line
from benchmarks.gpu.stage import Stage
from headrace.base.errors import WeightChannelError
from headrace.base.parent import die_with_parent
from headrace_services.refit import nccl
from headrace_services.refit.backends import Backend
from headrace_services.refit.channel import ABORT_S, Channel, GroupRank, RendezvousStore

HOST = "127.0.0.1"
START_S = 60.0  # for a peer to import torch and to join
BROADCASTS = 5
KILL_S = 0.5  # after the broadcast has begun
LEAST_BYTES = 2**26  # more than sockets hold


def ladder(stage: Stage) -> None:
    for backend, pair in _pairs(stage):
        try:
            with pair.peer(2 * START_S, BROADCASTS, stage.size.nbytes):
                began = time.perf_counter()
                channel = pair.lead(START_S)
                stage.rows.add(
                    f"{backend}: the group has formed", time.perf_counter() - began, "s", "the peer's start", True
                )
                tensor = torch.ones(stage.size.nbytes, dtype=torch.uint8, device=pair.place.device)
                taken = []
                for _ in range(BROADCASTS):
                    began = time.perf_counter()
                    channel.broadcast(tensor, time.monotonic() + START_S)
                    taken.append(time.perf_counter() - began)
                limit = (
                    "about 2.5 GB/s on a CPU" if backend == "gloo" else "NVLink: hundreds of GB/s; PCIe 5.0: below 63"
                )
                stage.rows.add(f"{backend}: broadcast", tensor.numel() / min(taken) / 1e9, "GB/s", limit)
        except WeightChannelError as error:
            stage.rows.fail(backend, error)


def killed_peer(stage: Stage) -> None:
    """Rank 1 stands still when the broadcast begins, and is killed while it waits."""
    for backend, pair in _pairs(stage):
        tensor = torch.ones(max(LEAST_BYTES, stage.size.nbytes), dtype=torch.uint8, device=pair.place.device)
        try:
            with pair.peer(2 * START_S, 1, tensor.numel()) as peer:
                channel = pair.lead(START_S)
                peer.send_signal(signal.SIGSTOP)
                threading.Timer(KILL_S, peer.kill).start()
                began = time.monotonic()
                try:
                    channel.broadcast(tensor, began + stage.size.deadline_s)
                except WeightChannelError as error:
                    took, said = time.monotonic() - began, line(error)
                else:
                    stage.rows.add(backend, "the broadcast came back as if the peer were there", passed=False)
                    continue
                limit = stage.size.deadline_s + 2
                stage.rows.add(f"{backend}: given up after", took, "s", f"below {limit:g} s", took < limit)
                stage.rows.add(f"{backend}: the trainer says", said)
                ended = channel.join(stage.size.deadline_s + ABORT_S)
                after = time.monotonic() - began - took
                stage.rows.add(
                    f"{backend}: its call ended, later by",
                    after if ended else "HANGS",
                    "s",
                    f"below {ABORT_S:g} s",
                    ended,
                )
        except WeightChannelError as error:
            stage.rows.fail(backend, error)


class Pair:
    """A group of two, of which this process leads on `device` and `benchmarks.gpu.peer` follows on `peer_device`."""

    def __init__(self, backend: Backend, device: torch.device, peer_device: torch.device) -> None:
        self._peer_device = peer_device
        self._store = RendezvousStore(HOST, 0)
        self._channel: Channel | None = None
        secret = secrets.token_bytes(32)
        self.place = GroupRank(secrets.token_hex(4), backend, HOST, self._store.port, 0, 2, device, secret)

    def lead(self, timeout_s: float) -> Channel:
        nccl.prepare_environment(timeout_s)
        return Channel.lead(self.place, self._store, time.monotonic() + timeout_s, self._opened)

    @contextlib.contextmanager
    def peer(self, timeout_s: float, broadcasts: int, nbytes: int) -> Iterator[subprocess.Popen[str]]:
        """A process that takes so many broadcasts of `nbytes`; it is killed in the end."""
        asked: dict[str, Any] = {
            "group_id": self.place.group_id,
            "backend": self.place.backend,
            "port": self.place.port,
            "device": str(self._peer_device),
            "secret": self.place.secret.hex(),
            "timeout_s": timeout_s,
            "broadcasts": broadcasts,
            "nbytes": nbytes,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.peer", json.dumps(asked)],
            stdin=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        try:
            yield process
        finally:
            if self._channel is not None:
                self._channel.close()
            process.kill()
            process.communicate()

    def _opened(self, channel: Channel) -> None:
        self._channel = channel


def _pairs(stage: Stage) -> Iterator[tuple[Backend, Pair]]:
    """A pair for each backend that there is here. gloo's tensors go through the host's memory."""
    cpu = torch.device("cpu")
    for backend in get_args(Backend):
        if backend == "gloo":
            yield backend, Pair(backend, cpu, cpu)
        elif stage.on_gpu:
            yield backend, Pair(backend, torch.device("cuda", 0), torch.device("cuda", 1))
