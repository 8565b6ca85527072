"""The backend that carries the weights: the fastest one that works. Decisions without a clock or a connection."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from headrace.base.devices import NCCL_REMEDY
from headrace.base.errors import ServiceError

# `nccl` connects without blocking the thread that calls it, so that it can be aborted; `nccl-blocking` does what NCCL does by default.
Backend = Literal["nccl", "nccl-blocking", "gloo"]


# One member that dies while a group forms may die for any reason. This many in a row, one attempt after the other, die of the backend: NCCL
# can end a process.
MOST_LOST = 3


@dataclasses.dataclass(frozen=True)
class _Failure:
    """A group that was complete, and yet did not carry the weights."""

    backend: Backend
    members: frozenset[str]
    reason: str


class Backends:
    """The backends that may carry the weights, and those among them that were given up, each with the reason, until this trainer ends.

    A backend is given up if the members of a group were all there, the group failed, and all of them come to the next attempt: then no
    member was the cause. That holds for a group that was not formed, and for one that was if the backend has never carried weights before.
    It is also given up if `MOST_LOST` groups in a row failed of which a member did not come back, and carried nothing in between.
    gloo is never given up, because there is nothing slower.
    """

    def __init__(self, configured: Literal["auto", "gloo", "nccl"], *, may_be_nonblocking: bool) -> None:
        of_nccl: tuple[Backend, ...] = ("nccl", "nccl-blocking") if may_be_nonblocking else ("nccl-blocking",)
        self._configured = configured
        self._by_speed: tuple[Backend, ...] = {"auto": (*of_nccl, "gloo"), "nccl": of_nccl, "gloo": ("gloo",)}[
            configured
        ]
        self._have_carried: set[Backend] = set()
        self._failure: _Failure | None = None  # of the last attempt, if its backend may be the cause
        self._lost: dict[Backend, int] = {}  # failures in a row after which a member did not come back
        self.given_up: dict[Backend, str] = {}

    def choose(self, members: Collection[str], problem: str | None) -> Backend:
        """Return the backend for an attempt to which these members have come: the fastest that is not given up; with a
        `nccl_problem`, not one of NCCL. Raises `ServiceError` if nccl is configured and can't be used."""
        failure, self._failure = self._failure, None
        if failure is not None and failure.members.issubset(members):
            self.given_up[failure.backend] = failure.reason
        elif failure is not None:
            self._lost[failure.backend] = lost = self._lost.get(failure.backend, 0) + 1
            if lost >= MOST_LOST:
                self.given_up[failure.backend] = f"{failure.reason}; in each of {lost} attempts in a row a member died"
        if self._configured == "nccl" and problem is not None:
            raise ServiceError(f"weight_channel.backend: nccl, but {problem}; set it to auto or gloo")
        for backend in self._by_speed:
            if backend not in self.given_up and (problem is None or backend == "gloo"):
                return backend
        raise ServiceError(
            f"weight_channel.backend: nccl, but NCCL does not connect the trainer and its replicas ({self.describe_failures()}); "
            f"{NCCL_REMEDY}. Or set it to auto or gloo"
        )

    def may_be_cause(self, backend: Backend, *, formed: bool) -> bool:
        """Return whether a group to which all members had come may have failed because of its backend; `formed`: after it was formed."""
        return backend != "gloo" and not (formed and backend in self._have_carried)

    def note_failure(self, backend: Backend, members: Collection[str], reason: str, *, formed: bool) -> None:
        """Note that an attempt over `backend` failed after all `members` had come to its group; `formed`: after the group was formed."""
        if members and self.may_be_cause(backend, formed=formed):
            self._failure = _Failure(backend, frozenset(members), reason)

    def note_success(self, backend: Backend) -> None:
        """Note that weights arrived over `backend`."""
        self._have_carried.add(backend)
        self._lost.pop(backend, None)

    def describe_failures(self) -> str:
        return "; ".join(f"{backend}: {reason}" for backend, reason in self.given_up.items())


def nccl_problem(trainer: Sequence[str], replicas: Mapping[str, Sequence[str]]) -> str | None:
    """Return why NCCL can't carry weights between these devices, the trainer's and each replica's (UUIDs; none on a CPU); None if it
    can.

    NCCL refuses two ranks on one device, and can't connect instances of a divided one.
    """
    holders: dict[str, str] = {}
    for holder, own in (("the trainer", trainer), *((f"replica {name}", own) for name, own in replicas.items())):
        if not own:
            return f"{holder} names no GPU (it runs on a CPU, or NVML can't be reached there)"
        for uuid in own:
            if uuid.startswith("MIG-"):
                return f"{holder} has {uuid}, an instance of a divided GPU"
            if uuid in holders:
                return f"{holders[uuid]} and {holder} share {uuid}"
            holders[uuid] = holder
    return None
