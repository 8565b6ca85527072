"""The collective that carries weights: its own process group, and broadcasts in which every step has a deadline.

The trainer (rank 0) and the replica workers never touch torch's global process group. The trainer keeps a `RendezvousStore` open for as
long as it runs, and each group of ranks meets there under its own id.

Neither backend reliably detects a peer that died or hangs. So every blocking call runs on a thread, which the caller abandons at the
deadline, or as soon as the trainer closes the group. The thread itself ends at the timeout of its operation or, with nccl, when its group
is aborted. The abort may block too, and has its own thread. If a thread of a group that had connected does not end, the process must be
restarted (`Channels.check`). A group in which a call failed is never used again.

Anybody who can reach the store's port can read and write it. So each group has a secret, which its members get from the buffer. What they
put into the store (gloo's addresses, NCCL's id) is signed with it, and before a tensor moves, every member answers a challenge that rank 0
broadcasts through the group itself. Without the secret, an attacker can disturb a refit, but neither receive nor send weights. The tensors
themselves are not encrypted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions

from headrace.base.addresses import own_address, with_port
from headrace.base.errors import (
    Restartable,
    ServiceError,
    WeightChannelAborted,
    WeightChannelError,
    WeightChannelTimeout,
)
from headrace.net.service import bind

from .backends import Backend

log = logging.getLogger(__name__)

T = TypeVar("T")

_GO, _OVER = b"go", b"over"
_NONCE_BYTES = 32
_GROUP_LIFETIME = timedelta(days=365)
# how long the abort of a group may take, including the calls that it ends
ABORT_S = 30.0
_STORE_TIMEOUT = timedelta(seconds=30)
# how long the trainer tries to reach its own store; torch would try a name that doesn't exist for a minute
_REACH_S = 10.0
_TIMEOUT_CAUSES = "a peer died or hangs, or the network is slow: then raise weight_channel.timeout_s"


class RendezvousStore:
    """The trainer's TCPStore, through which the ranks of every group find each other.

    Raises `ServiceError` if the port is busy, or if the trainer itself can't reach the store under `host`.
    """

    def __init__(self, host: str, port: int) -> None:
        sock = bind(_listen_address(host), port, "weight_channel.port")
        self.port: int = sock.getsockname()[1]
        try:
            with contextlib.ExitStack() as unless_reached:
                unless_reached.callback(sock.close)
                socket.create_connection((host, self.port), _REACH_S).close()
                unless_reached.pop_all()
            self._store = dist.TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=sock.detach(),
                timeout=_STORE_TIMEOUT,
            )
        except (OSError, RuntimeError) as error:
            raise ServiceError(
                f"weight_channel.host: the trainer can't reach its own store at {with_port(host, self.port)} ({_line(error)}); set it to "
                "an address of this machine that replicas can reach"
            ) from error

    def connect(self) -> dist.TCPStore:
        """Open a new connection to the store. Raises `WeightChannelError`."""
        with _torch_errors("connecting to the store"):
            return self._store.clone()  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class GroupRank:
    """One rank's place in a group. Rank 0 sends; the others receive. `device` holds the tensors; `secret` is the group's. Once all ranks
    have come, they connect within `connect_s`."""

    group_id: str
    backend: Backend
    host: str
    port: int
    rank: int
    world_size: int
    device: torch.device
    secret: bytes = dataclasses.field(repr=False)
    connect_s: float = math.inf


class SignedStore(dist.Store):
    """A group's part of the rendezvous store, whose values are signed with the group's secret. `get` raises `RuntimeError` for a value that
    is not. torch calls these methods too, from its own threads, with the keys of its backends."""

    def __init__(self, store: dist.Store, group_id: str, secret: bytes) -> None:
        super().__init__()
        self._store = dist.PrefixStore(group_id, store)
        self._group = group_id.encode()
        self._secret = secret

    def sign(self, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of `parts` for this group."""
        message = b"".join(len(part).to_bytes(8, "little") + part for part in (self._group, *parts))
        return hmac.digest(self._secret, message, "sha256")

    def set(self, key: str, value: Any) -> None:
        value = bytes(value)
        self._store.set(key, self.sign(key.encode(), value) + value)

    def get(self, key: str) -> bytes:
        signed = self._store.get(key)
        signature, value = signed[:32], signed[32:]
        if not hmac.compare_digest(signature, self.sign(key.encode(), value)):
            raise RuntimeError(f"key {key!r} of the rendezvous store was not written by a member of the group")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)  # not signed: a counter names no peer


class Channel:
    """A group that this process has joined. Any failure closes it; a closed channel raises `WeightChannelAborted`.

    `gathered`: all ranks have come to the group. `formed`: they have connected and proved who they are.

    Not safe for concurrent use, except that any thread may call `close` to end a running call.
    """

    def __init__(self, membership: GroupRank, store: dist.TCPStore) -> None:
        self.membership = membership
        self._store = SignedStore(store, membership.group_id, membership.secret)
        # a connection is locked while it waits, so the signal that ends a wait needs a second connection
        with _torch_errors("connecting to the store"):
            control = store.clone()  # type: ignore[attr-defined]
        self._control = SignedStore(control, membership.group_id, membership.secret)
        self.gathered = self.formed = False
        self._group: Any = None
        self._connected = False
        self._transfer = 0
        self._running: Future[Any] = Future()
        self._threads: list[threading.Thread] = []
        self._over_by = 0.0  # when all of them should have ended
        self._not_aborted: str | None = None  # why torch could not abort the group
        self._starting = threading.Lock()
        self._buffers = _no_buffers()
        self._pinned = False  # whether the buffers are the host's memory, and a GPU copies from or to them
        self._stream = torch.cuda.Stream(membership.device) if membership.device.type == "cuda" else None
        self._closed = threading.Event()

    @classmethod
    def lead(
        cls, membership: GroupRank, store: RendezvousStore, deadline: float, opened: Callable[[Channel], None]
    ) -> Channel:
        """Join as rank 0, after waiting for every other rank. `opened` gets the channel first, so that it can be closed during the wait.

        `deadline` is on the clock of `time.monotonic`. Raises `WeightChannelError`.
        """
        channel = cls(membership, store.connect())
        opened(channel)
        with channel.closing_on_failure():
            others = [f"ready/{rank}" for rank in range(1, membership.world_size)]
            channel._in_time("members to join", deadline, lambda: channel._await_keys(others, deadline))
            with _torch_errors("starting the group"):
                channel._store.set("go", _GO)
            channel._form(deadline, channel._challenge)
        return channel

    @classmethod
    def follow(cls, membership: GroupRank, deadline: float) -> Channel:
        """Join as a rank above 0: report to the trainer and wait for its start signal first. Raises `WeightChannelError`."""
        seconds = timedelta(seconds=_seconds_left(deadline, "connecting"))
        try:
            store = dist.TCPStore(membership.host, membership.port, is_master=False, timeout=seconds)
            channel = cls(membership, store)
            channel._store.set(f"ready/{membership.rank}", b"")
        except (RuntimeError, OSError) as error:
            raise WeightChannelTimeout(
                f"the trainer's store {membership.host}:{membership.port} can't be reached ({_line(error)}); "
                "set weight_channel.host to an address of the trainer that replicas can reach"
            ) from error
        with channel.closing_on_failure():
            (go,) = channel._in_time("the start signal", deadline, lambda: channel._await_keys(["go"], deadline))
            if go != _GO:
                raise WeightChannelAborted("the trainer gave up the group before it was complete")
            channel._watch()
            channel._form(deadline, channel._answer)
        return channel

    @contextlib.contextmanager
    def broadcasting(self, tensor: torch.Tensor, deadline: float) -> Iterator[None]:
        """Copy rank 0's `tensor` (contiguous, on this rank's device) into every other rank's while the body runs. The body must not touch
        it. The copy has arrived when the context ends. Only one broadcast may run at a time.

        Raises `WeightChannelTimeout` at `deadline`, `WeightChannelAborted` once this rank or rank 0 has called `close`.
        """
        with self.closing_on_failure():
            options = BroadcastOptions()
            options.rootRank = 0
            options.timeout = timedelta(seconds=_seconds_left(deadline, "broadcast"))
            # the broadcast waits for what this thread's stream still does with the memory
            if self._pinned:
                torch.cuda.current_stream().synchronize()
            before = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
            arrived = self._begin(lambda: self._broadcast(tensor.view(-1), options, before), deadline)
            yield
            self._result("a broadcast", arrived, deadline)

    def broadcast(self, tensor: torch.Tensor, deadline: float) -> None:
        """Run `broadcasting` to its end."""
        with self.broadcasting(tensor, deadline):
            pass

    def begin_transfer(self) -> None:
        """Count transfers, on all ranks alike: reports of an earlier one say nothing of the next."""
        self._transfer += 1

    def report_received(self, buckets: int) -> None:
        """Tell rank 0, as a rank above 0, how many buckets of this transfer have arrived. Raises `WeightChannelError`."""
        with _torch_errors("reporting what has arrived"):
            self._store.set(f"received/{self.membership.rank}", f"{self._transfer} {buckets}".encode())

    def received(self) -> list[int]:
        """Return how many buckets of this transfer each other rank has reported to rank 0. Raises `WeightChannelError`."""
        counts = []
        with _torch_errors("reading what has arrived"):
            for rank in range(1, self.membership.world_size):
                key = f"received/{rank}"
                transfer, buckets = self._store.get(key).split() if self._store.check([key]) else (0, 0)
                counts.append(int(buckets) if int(transfer) == self._transfer else 0)
        return counts

    def buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return memory on this rank's device for buckets of these sizes. Every second bucket shares the same memory, in this transfer and
        in the next, because touching fresh memory costs as much as sending it. Host memory is pinned if this process computes on a GPU,
        which makes the GPU's copies several times faster."""
        device = self.membership.device
        self._pinned = device.type == "cpu" and torch.cuda.is_initialized()
        for which in range(2):
            largest = max(sizes[which::2], default=0)
            if self._buffers[which].numel() < largest:
                self._buffers[which] = torch.empty(largest, dtype=torch.uint8, device=device, pin_memory=self._pinned)
        return [self._buffers[number % 2][:size] for number, size in enumerate(sizes)]

    def close(self) -> None:
        """Leave the group. When rank 0 leaves, the group ends for all members at once. Buckets are freed once no call has them any more.
        Idempotent."""
        self._buffers = _no_buffers()
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(InvalidStateError):
            self._running.set_exception(WeightChannelAborted("the group is over"))
        self._running = Future()  # the error of a call that failed has what the call was given
        if self.membership.rank == 0:
            # members that have not joined yet wait for "go", joined members watch "over", and our own call waits for "ready"
            self._control.set("go", _OVER)
            self._control.set("over", _OVER)
            for rank in range(1, self.membership.world_size):
                self._control.set(f"ready/{rank}", _OVER)
        self._leave_group()

    def join(self, timeout_s: float) -> bool:
        """Wait for abandoned calls that still run on their threads, and return whether all have ended. Call it before the process ends: a
        thread that returns from torch's code while the interpreter shuts down kills the process with SIGABRT."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def hangs(self) -> str | None:
        """Why this group may hold a device forever, or None if it can't: an abandoned call should have ended but still runs, or the group
        could not be aborted. Until a group has connected, nothing of it runs on a device."""
        if not self._connected:
            return None
        if self._not_aborted is not None:
            return f"could not be aborted ({self._not_aborted})"
        if self.membership.backend != "gloo" and time.monotonic() > self._over_by and not self.join(0.0):
            return f"has an abandoned call that has not ended within {ABORT_S:g} s"
        return None

    def _challenge(self, deadline: float) -> None:
        """Broadcast a nonce as rank 0, and wait until every other rank has signed it. An impostor in a rank's place has the nonce but not
        the secret, and the rank itself has the secret but not the nonce."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self.broadcast(self._nonce(nonce), deadline)
        ranks = range(1, self.membership.world_size)
        proofs = [f"proof/{rank}" for rank in ranks]
        found = self._in_time("the members' proofs", deadline, lambda: self._await_keys(proofs, deadline))
        for rank, proof in zip(ranks, found, strict=True):
            if not hmac.compare_digest(proof, self._proof(rank, nonce)):
                raise WeightChannelError(
                    f"rank {rank} of group {self.membership.group_id} did not get the challenge; another process has its place"
                )

    def _answer(self, deadline: float) -> None:
        """Sign the nonce that rank 0 broadcasts, as a rank above 0."""
        nonce = self._nonce(bytes(_NONCE_BYTES))
        self.broadcast(nonce, deadline)
        with _torch_errors("answering the challenge"):
            self._store.set(f"proof/{self.membership.rank}", self._proof(self.membership.rank, bytes(nonce.tolist())))

    def _nonce(self, value: bytes) -> torch.Tensor:
        return torch.tensor(list(value), dtype=torch.uint8, device=self.membership.device)

    def _proof(self, rank: int, nonce: bytes) -> bytes:
        return self._store.sign(b"challenge", str(rank).encode(), nonce)

    def _form(self, deadline: float, prove: Callable[[float], None]) -> None:
        """Connect to the other ranks, all of which have come, and prove with `prove` who this one is."""
        self.gathered = True
        deadline = min(deadline, time.monotonic() + self.membership.connect_s)
        seconds = _seconds_left(deadline, "joining the group")
        self._in_time("peers to connect", deadline, lambda: self._connect(seconds))
        prove(deadline)
        self.formed = True

    def _connect(self, seconds: float) -> None:
        self._group = group = self._process_group(seconds)
        if self.membership.backend != "gloo" and not self._closed.is_set():
            # Connect now, with a deadline, not in the first broadcast.
            group.eager_connect_single_device(self.membership.device)
        if self._closed.is_set():
            self._leave_group()  # `close` was called before the group existed
        else:
            self._connected = True

    def _leave_group(self) -> None:
        group, self._group = self._group, None

        def abort() -> None:
            try:
                group.abort()
            except Exception as error:  # after any error the group may still hold the device
                log.exception("group %s of nccl could not be aborted", self.membership.group_id)
                self._not_aborted = _line(error)

        if group is not None and self.membership.backend != "gloo":
            self._start("weight-channel-abort", abort, time.monotonic())

    def _start(self, name: str, call: Callable[[], None], deadline: float) -> None:
        """Run `call` on a thread, which should end soon after `deadline`."""
        thread = threading.Thread(target=call, name=name, daemon=True)
        with self._starting:
            thread.start()
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            self._over_by = max(self._over_by, deadline + ABORT_S)

    def _process_group(self, seconds: float) -> Any:
        m = self.membership
        if m.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(m.host, m.port))]
            options._timeout = timedelta(seconds=seconds)
            return dist.ProcessGroupGloo(self._store, m.rank, m.world_size, options)
        torch.cuda.set_device(m.device)
        of_nccl = dist.ProcessGroupNCCL.Options()
        # This module has its own deadlines. An abort raises at this timeout, but `hangs` decides how long it may take.
        of_nccl._timeout = _GROUP_LIFETIME
        of_nccl.config.blocking = int(m.backend == "nccl-blocking")  # a blocking call can't be aborted
        # A failed broadcast must not end the process, and neither must torch's watchdog when a broadcast holds it up. The first variable
        # would make torch end the process for the error, the second for the watchdog. Their threads run anyway (`refit/nccl.py`).
        quiet = _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), _environment("TORCH_NCCL_ENABLE_MONITORING", "0")
        with quiet[0], quiet[1]:
            return dist.ProcessGroupNCCL(self._store, m.rank, m.world_size, of_nccl)

    def _broadcast(self, tensor: torch.Tensor, options: BroadcastOptions, before: torch.cuda.Event | None) -> None:
        group = self._group
        if group is None:
            raise WeightChannelAborted("the group is over")
        with torch.cuda.stream(self._stream):  # does nothing on a CPU, which has no streams
            if before is not None:
                before.wait()
            group.broadcast([tensor], options).wait()
        if self._stream is not None:  # for nccl, wait() only orders streams
            self._stream.synchronize()

    def _await_keys(self, keys: list[str], deadline: float) -> list[bytes]:
        if keys:
            self._store.wait(keys, timedelta(seconds=_seconds_left(deadline, "waiting in the store")))
        return [self._store.get(key) for key in keys]

    def _watch(self) -> None:
        """Watch the group on a separate connection, to end a running call as soon as rank 0 closes the group or disappears."""

        def watch() -> None:
            # whether the key or a lost connection ends this wait, the group is over
            with contextlib.suppress(RuntimeError):
                self._control.wait(["over"], _GROUP_LIFETIME)
            self.close()

        threading.Thread(target=watch, name="weight-channel-watch", daemon=True).start()

    def _in_time(self, what: str, deadline: float, call: Callable[[], T]) -> T:
        """Run a blocking call on a thread. Abandon it at `deadline`, or when the channel is closed."""
        return self._result(what, self._begin(call, deadline), deadline)

    def _begin(self, call: Callable[[], T], deadline: float) -> Future[T]:
        """Start a blocking call on a thread, and return its future."""
        future: Future[T] = Future()
        self._running = future
        if self._closed.is_set():
            raise WeightChannelAborted("the group is over")

        def run() -> None:
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - handed to the caller
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):
                    future.set_result(result)

        self._start("weight-channel-call", run, deadline)
        return future

    def _result(self, what: str, future: Future[T], deadline: float) -> T:
        try:
            return future.result(timeout=_seconds_left(deadline, what))
        except TimeoutError as error:
            raise WeightChannelTimeout(f"waiting for {what} exceeded its deadline; {_TIMEOUT_CAUSES}") from error
        except (RuntimeError, OSError) as error:  # torch's DistError family, and an address that can't be resolved
            if time.monotonic() >= deadline:
                raise WeightChannelTimeout(
                    f"waiting for {what} exceeded its deadline ({_line(error)}); {_TIMEOUT_CAUSES}"
                ) from error
            raise WeightChannelError(f"waiting for {what} failed: {_line(error)}") from error

    @contextlib.contextmanager
    def closing_on_failure(self) -> Iterator[None]:
        """Close the channel if the context ends with an error."""
        try:
            yield
        except BaseException:
            self.close()
            raise


class Channels:
    """The channels of a process. At most one is `open`. Those that were closed are kept while their last calls still run on their
    threads."""

    def __init__(self) -> None:
        self.open: Channel | None = None
        self._closed: list[Channel] = []

    def close(self) -> None:
        """Close the open channel, if there is one."""
        channel, self.open = self.open, None
        if channel is not None:
            channel.close()
            self._closed = [*(other for other in self._closed if other.hangs or not other.join(0.0)), channel]

    def check(self) -> None:
        """Raise `Restartable` if a closed group may hold its device and nothing in this process can make it release the device."""
        for channel in self._closed:
            if why := channel.hangs:
                raise Restartable(f"group {channel.membership.group_id} of nccl {why}; only a new process can continue")

    def leave(self, timeout_s: float) -> None:
        """Close the open channel, and wait for calls that still run. Call it before the process ends (`Channel.join`)."""
        self.close()
        for channel in self._closed:
            channel.join(timeout_s)


def _seconds_left(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise WeightChannelTimeout(f"{what}: the deadline has passed; {_TIMEOUT_CAUSES}")
    return left


def _no_buffers() -> list[torch.Tensor]:
    return [torch.empty(0, dtype=torch.uint8)] * 2


def _listen_address(host: str) -> str:
    """Return `host` if it is a loopback address, else all interfaces, because `host` may be a name that this machine can't bind to."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_loopback:
            return host
        if address.version == 6:
            return "::"  # it takes connections of both kinds
    return "127.0.0.1" if host == "localhost" else "0.0.0.0"


@contextlib.contextmanager
def _torch_errors(what: str) -> Iterator[None]:
    """Turn torch's errors (`RuntimeError`, including its DistError family) into `WeightChannelError`."""
    try:
        yield
    except RuntimeError as error:
        raise WeightChannelError(f"{what} failed: {_line(error)}") from error


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
