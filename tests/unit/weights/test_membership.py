"""Who is waited for, who broke a transfer, and which group they use: decisions on values."""

from __future__ import annotations

import msgpack
import msgspec
import numpy as np
import pytest

from headrace.base.errors import CodecError
from headrace.replay import Epoch, Replica
from headrace_services.refit import membership
from headrace_services.refit.manifest import Manifest
from headrace_services.refit.rendezvous import Announcement, Rendezvous

EPOCH = Epoch("e", 3, "t", "transfer", ("a", "b", "c"), ("a",), ("b",), {}, {})


def fleet(**states: str) -> list[Replica]:
    return [Replica(name, state, -1, "t", {}, 0, 0.0) for name, state in states.items()]


def test_the_dead_the_gone_and_the_excluded_are_not_waited_for() -> None:
    assert membership.find_awaited(EPOCH, fleet(a="STALE", b="STALE", c="HEALTHY"), ()) == {"b", "c"}
    assert membership.find_awaited(EPOCH, fleet(a="STALE", b="DEAD", c="STALE"), ()) == {"c"}
    assert membership.find_awaited(EPOCH, fleet(a="STALE", b="QUARANTINED", c="STALE"), ()) == {"c"}
    assert membership.find_awaited(EPOCH, fleet(a="STALE", b="STALE"), ("b",)) == set()


def test_a_member_settles_by_verifying_refusing_or_dying() -> None:
    everyone = fleet(a="STALE", b="STALE", c="STALE")
    assert membership.find_unsettled(EPOCH, everyone) == {"a", "c"}
    assert membership.find_unsettled(msgspec.structs.replace(EPOCH, refused={"a": "no"}), everyone) == {"c"}
    assert membership.find_unsettled(EPOCH, fleet(a="DEAD", b="STALE", c="STALE")) == {"c"}


def test_who_has_less_than_others_is_late() -> None:
    ranks = {"a": range(1, 3), "b": range(3, 5), "c": range(5, 7)}
    assert membership.find_late([7, 7, 7, 6, 0, 7], ranks) == {"b": 6, "c": 0}  # as much as its slowest worker
    assert membership.find_late([3] * 6, ranks) == {}
    assert membership.find_late([0] * 6, ranks) == {}
    assert membership.find_late([2, 5], {"a": range(1, 3)}) == {}  # there is no other


def test_only_who_broke_the_transfer_is_at_fault() -> None:
    epoch = msgspec.structs.replace(EPOCH, refused={"a": "gone", "c": "no such parameter"}, interrupted=("a",))
    assert membership.at_fault(epoch) == {"c"}


RENDEZVOUS = Rendezvous(
    group_id="new",
    previous_group="old",
    previous_members=("a", "b"),
    backend="gloo",
    host="127.0.0.1",
    port=1234,
    secret=bytes(32),
    workers=1,
    timeout_s=5.0,
    connect_s=2.5,
    manifest=Manifest.of([("w", "float32", (2, 3))], 64),
    probe_token_ids=np.array([5, 6, 7], dtype=np.int32),
)


def test_the_group_is_reused_until_the_membership_changes() -> None:
    assert RENDEZVOUS.derive_group(("a", "b")) == RENDEZVOUS.derive_group(("b", "a")) == "old"
    for members in (("b",), ("a",), ("a", "b", "c")):
        assert RENDEZVOUS.derive_group(members) == "new"
    assert msgspec.structs.replace(RENDEZVOUS, previous_group="", previous_members=()).derive_group(()) == "new"


def test_ranks_are_distinct_and_do_not_depend_on_the_order_of_members() -> None:
    rendezvous = msgspec.structs.replace(RENDEZVOUS, workers=2)
    for members in (("b", "a", "c"), ("c", "b", "a")):
        assert [rendezvous.ranks_of(member, members).start for member in "abc"] == [1, 3, 5]
        assert rendezvous.place(0, members)["world_size"] == 7


def test_rendezvous_and_announcement_survive_the_wire() -> None:
    arrived = Rendezvous.decode(msgpack.unpackb(msgpack.packb(RENDEZVOUS.encode())))
    assert arrived.encode() == RENDEZVOUS.encode()
    assert arrived.probe_token_ids.tolist() == [5, 6, 7]
    assert Announcement.decode(msgpack.unpackb(msgpack.packb(Announcement(("a",)).encode()))).excluded == ("a",)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"backend": "mpi"}, "backend"),
        ({"port": 0}, "port"),
        ({"port": 99999}, "port"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"workers": 0}, "workers"),
        ({"manifest": None}, "manifest"),
        ({"timeout_s": float("inf")}, "not finite"),
        ({"connect_s": float("inf")}, "not finite"),
        ({"probe_token_ids": b"\0" * 4}, "a probe of 1 tokens"),
        ({"probe_token_ids": b"abc"}, "probe_token_ids"),
    ],
)
def test_a_malformed_rendezvous_is_refused_by_name(change: dict, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        Rendezvous.decode({**RENDEZVOUS.encode(), **change})
