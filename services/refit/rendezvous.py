"""The trainer's messages to the members of an epoch: first which are excluded, then where to connect, what is sent, and the probe. And its
message to replicas that pull: what is in the store, and the probe.

The buffer carries them as opaque msgpack maps (`Epoch.rendezvous`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Self, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import CodecError

from .backends import Backend
from .manifest import Manifest
from .states import StateReference

AboveZero = Annotated[float, msgspec.Meta(gt=0)]


class _Message(msgspec.Struct, frozen=True):
    def encode(self) -> dict[str, Any]:
        """Return the message as msgpack types, with arrays as little-endian bytes."""
        fields: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,), enc_hook=_array_to_bytes)
        return fields

    @classmethod
    def decode(cls, fields: Any) -> Self:
        """Decode the message. Raises `CodecError` naming what is wrong."""
        try:
            return msgspec.convert(fields, cls, dec_hook=_bytes_to_array)
        except msgspec.ValidationError as error:
            raise CodecError(f"{cls.__name__.lower()}: {error}") from error


class Announcement(_Message, frozen=True):
    """Sent while an epoch is `announced`. Replicas in `excluded` made an earlier attempt at this version fail and must not acknowledge."""

    excluded: tuple[str, ...]


class Rendezvous(_Message, frozen=True):
    """Sent when an epoch enters `transfer`.

    If the members are exactly `previous_members`, they reuse the group `previous_group`; otherwise they form the new group `group_id` at
    the trainer's store `host:port`. Ranks follow the sorted names: the trainer is 0, then each member has `workers` ranks, one per worker
    process. Each phase ends after `timeout_s`, and forming a group after `connect_s`. A member reports its log-probabilities of
    `probe_token_ids[1:]` at temperature 1, and doesn't know the trainer's. A member that has failed the probe before compares its states
    with the trainer's `states`, if they are there. Members prove with `secret` that they received this message (`channel`).
    """

    group_id: str
    previous_group: str
    previous_members: tuple[str, ...]
    backend: Backend
    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=65536)]
    secret: Annotated[bytes, msgspec.Meta(min_length=32)]
    workers: Annotated[int, msgspec.Meta(ge=1)]
    timeout_s: AboveZero
    connect_s: AboveZero
    manifest: Manifest
    probe_token_ids: NDArray[np.int32]
    states: StateReference | None = None

    def derive_group(self, members: Sequence[str]) -> str:
        """Return the id of the group that these members use; a pure function, so that all compute the same id."""
        return self.previous_group if members and set(members) == set(self.previous_members) else self.group_id

    def ranks_of(self, member: str, members: Sequence[str]) -> range:
        """Return the ranks of the member's workers, whatever the order of `members`."""
        first = 1 + sorted(members).index(member) * self.workers
        return range(first, first + self.workers)

    def place(self, rank: int, members: Sequence[str]) -> dict[str, Any]:
        """Return the place of a rank in the group (`channel.GroupRank`), but for its device."""
        return {
            "group_id": self.derive_group(members),
            "backend": self.backend,
            "host": self.host,
            "port": self.port,
            "rank": rank,
            "world_size": 1 + len(members) * self.workers,
            "secret": self.secret,
            "connect_s": self.connect_s,
        }

    @classmethod
    def decode(cls, fields: Any) -> Self:
        """Decode the message. Raises `CodecError` naming what is wrong, also if the probe could not prove anything."""
        rendezvous = super().decode(fields)
        if rendezvous.probe_token_ids.size < 2:
            raise CodecError(f"rendezvous: a probe of {rendezvous.probe_token_ids.size} tokens, not of at least 2")
        for name in ("timeout_s", "connect_s"):
            if not math.isfinite(seconds := getattr(rendezvous, name)):
                raise CodecError(f"rendezvous: {name} is not finite: {seconds}")
        return rendezvous


class Offer(_Message, frozen=True):
    """Sent once a version is in the store: the digest of its list (`headrace.run.weight_store`), and the probe. What a replica does with
    the weights ends after `timeout_s`."""

    digest: str
    probe_token_ids: NDArray[np.int32]
    timeout_s: AboveZero


class Pulled(msgspec.Struct, frozen=True):
    """An offer whose weights are in a `file` of this machine, each with its checksum: what a replica gives to itself in place of a
    `Rendezvous`."""

    file: str
    manifest: Manifest
    checksums: tuple[int, ...]
    probe_token_ids: NDArray[np.int32]
    timeout_s: AboveZero
    states: None = None


def _array_to_bytes(array: Any) -> bytes:
    written: bytes = array.astype(array.dtype.newbyteorder("<")).tobytes()
    return written


def _bytes_to_array(kind: Any, data: Any) -> Any:
    """Convert bytes to an array; `kind` is `NDArray[element]`. A `ValueError` here becomes msgspec's, with the path of the field."""
    (element,) = get_args(get_args(kind)[1])
    if not isinstance(data, bytes):
        raise ValueError(f"{data!r:.80} are not bytes")
    return np.frombuffer(data, np.dtype(element).newbyteorder("<"))
