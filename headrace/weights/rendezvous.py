"""What the trainer tells the members of an epoch: first which are excluded, then where to connect, what is sent, and the probe.

The buffer carries both as opaque msgpack maps (`Epoch.rendezvous`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.codec import Reader
from headrace.errors import CodecError
from headrace.trajectory import Float32, Int32
from headrace.weights.manifest import Manifest

BACKENDS = ("gloo", "nccl")


@dataclasses.dataclass(frozen=True)
class Announcement:
    """Sent while an epoch is `announced`. Replicas in `excluded` made an earlier attempt at this version fail and must not acknowledge."""

    excluded: tuple[str, ...] = ()

    def encode(self) -> dict[str, Any]:
        return {"excluded": list(self.excluded)}

    @classmethod
    def decode(cls, fields: Any) -> Announcement:
        return cls(tuple(_reader(fields, "announcement").list_of("excluded", str)))


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Sent when an epoch enters `transfer`.

    If the members are exactly `previous_members`, they reuse the group `previous_group`; otherwise they form the new group
    `group_id` at the trainer's store `host:port`. Ranks follow the sorted names: the trainer is 0, then each member has
    `workers` ranks, one per worker process. Each phase ends after `timeout_s`.
    `probe_logprobs` [len - 1] are the trainer's log-probabilities of `probe_token_ids[1:]` at temperature 1; a member's must
    equal them within `tolerance` nats.
    """

    group_id: str
    previous_group: str
    previous_members: tuple[str, ...]
    backend: str
    host: str
    port: int
    workers: int
    timeout_s: float
    manifest: Manifest
    probe_token_ids: Int32
    probe_logprobs: Float32
    tolerance: float

    def group_of(self, members: Sequence[str]) -> str:
        """Id of the group that these members use; a pure function, so that all compute the same one."""
        return self.previous_group if members and set(members) == set(self.previous_members) else self.group_id

    def first_rank(self, member: str, members: Sequence[str]) -> int:
        """Rank of the member's first worker, whatever the order of `members`."""
        return 1 + sorted(members).index(member) * self.workers

    def world_size(self, members: Sequence[str]) -> int:
        return 1 + len(members) * self.workers

    def encode(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields,
            "previous_members": list(self.previous_members),
            "manifest": self.manifest.encode(),
            "probe_token_ids": self.probe_token_ids.astype("<i4").tobytes(),
            "probe_logprobs": self.probe_logprobs.astype("<f4").tobytes(),
        }

    @classmethod
    def decode(cls, fields: Any) -> Rendezvous:
        """Raises `CodecError` naming what is wrong."""
        m = _reader(fields, "rendezvous")
        rendezvous = cls(
            group_id=m.get("group_id", str),
            previous_group=m.get("previous_group", str),
            previous_members=tuple(m.list_of("previous_members", str)),
            backend=m.choice("backend", BACKENDS),
            host=m.get("host", str),
            port=m.natural("port"),
            workers=m.natural("workers"),
            timeout_s=m.number("timeout_s"),
            manifest=Manifest.decode(m.get("manifest", dict)),
            probe_token_ids=m.array("probe_token_ids", "<i4"),
            probe_logprobs=m.array("probe_logprobs", "<f4"),
            tolerance=m.number("tolerance"),
        )
        rendezvous.check()
        return rendezvous

    def check(self) -> None:
        """Raise `CodecError` unless the probe is usable and times and counts are positive."""
        if self.probe_token_ids.size < 2 or self.probe_logprobs.size != self.probe_token_ids.size - 1:
            raise CodecError(
                f"rendezvous: {self.probe_logprobs.size} log-probabilities for a probe of {self.probe_token_ids.size} tokens"
            )
        if not np.isfinite(self.probe_logprobs).all():
            raise CodecError("rendezvous: the trainer's log-probabilities on the probe are not finite")
        if self.timeout_s <= 0 or self.tolerance <= 0 or self.workers < 1 or not 0 < self.port < 65536:
            raise CodecError("rendezvous: timeout_s, tolerance, workers and port are above 0")


def _reader(fields: Any, what: str) -> Reader:
    if not isinstance(fields, Mapping):
        raise CodecError(f"{what}: a {type(fields).__name__}, not a map")
    return Reader(fields, what)
