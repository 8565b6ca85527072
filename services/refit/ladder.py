"""The backend that carries the weights: the fastest one that works. Decisions without a clock or a connection."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

from headrace.base.devices import NCCL_REMEDY
from headrace.base.errors import ServiceError

# `nccl` connects without blocking the thread that calls it, so that it can be aborted; `nccl-blocking` does what NCCL does by default.
Backend = Literal["nccl", "nccl-blocking", "gloo"]


@dataclasses.dataclass(frozen=True)
class _Suspicion:
    """A backend whose group was complete, and yet did not carry the weights."""

    backend: Backend
    members: frozenset[str]
    reason: str


class Ladder:
    """The backends that may carry the weights, and those among them that were given up, each with the reason, until this trainer ends.

    A backend is given up if the members of a group were all there, the group failed, and all of them come to the next attempt: then no
    member was the cause. That holds for a group that did not connect, and for one that connected if the backend has never carried weights
    before. gloo is never given up, because there is nothing below it.
    """

    def __init__(self, configured: Literal["auto", "gloo", "nccl"], *, may_be_nonblocking: bool) -> None:
        of_nccl: tuple[Backend, ...] = ("nccl", "nccl-blocking") if may_be_nonblocking else ("nccl-blocking",)
        self._configured = configured
        self._rungs: tuple[Backend, ...] = {"auto": (*of_nccl, "gloo"), "nccl": of_nccl, "gloo": ("gloo",)}[configured]
        self._has_carried: set[Backend] = set()
        self._suspicion: _Suspicion | None = None
        self.given_up: dict[Backend, str] = {}

    def choose(self, problem: str | None) -> Backend:
        """Return the first backend that was not given up; with a `membership.nccl_problem`, not one of NCCL. Raises `ServiceError` if nccl
        is configured and can't be used."""
        if self._configured == "nccl" and problem is not None:
            raise ServiceError(f"weight_channel.backend: nccl, but {problem}; set it to auto or gloo")
        for backend in self._rungs:
            if backend not in self.given_up and (problem is None or backend == "gloo"):
                return backend
        raise ServiceError(
            f"weight_channel.backend: nccl, but NCCL does not connect the trainer and its replicas ({self.describe_failures()}); "
            f"{NCCL_REMEDY}. Or set it to auto or gloo"
        )

    def suspect(self, backend: Backend, members: Collection[str], reason: str, *, connected: bool) -> None:
        """Note that an attempt over `backend` failed after all `members` had come to its group; `connected`: after the group was formed."""
        if backend != "gloo" and not (connected and backend in self._has_carried):
            self._suspicion = _Suspicion(backend, frozenset(members), reason)

    def decide(self, acknowledged: Collection[str]) -> bool:
        """Decide, once these members came to the next attempt, whether the suspected backend is given up."""
        suspicion, self._suspicion = self._suspicion, None
        if suspicion is None or not suspicion.members.issubset(acknowledged):
            return False
        self.given_up[suspicion.backend] = suspicion.reason
        return True

    def carried(self, backend: Backend) -> None:
        """Note that weights arrived over `backend`."""
        self._has_carried.add(backend)

    def describe_failures(self) -> str:
        return "; ".join(f"{backend}: {reason}" for backend, reason in self.given_up.items())
