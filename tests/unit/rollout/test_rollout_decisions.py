"""What a replica does next, for every state that the laws of the weight channel and of leases speak of."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.replay import Epoch, HeartbeatReply
from headrace_services.rollout.decisions import (
    Abort,
    Acknowledge,
    EndCalls,
    LeaseGroups,
    Rejoin,
    TakePart,
    WorkerState,
    decide,
    fence,
)
from headrace_services.rollout.worker import ReplicaStatus

ME = "rollout-me"


def epoch(**changes: Any) -> Epoch:
    fields: dict[str, Any] = {
        "id": "e1",
        "version": 3,
        "timeline": "t",
        "state": "announced",
        "members": (ME, "rollout-other"),
        "acknowledged": (),
        "verified": (),
        "refused": {},
        "rendezvous": {},
    }
    return Epoch(**{**fields, **changes})


def worker_state(
    state: str = "HEALTHY", lost: tuple[str, ...] = (), epoch: Epoch | None = None, **changes: Any
) -> WorkerState:
    now = WorkerState(
        replica=ME,
        reply=HeartbeatReply(state=state, timeline="t", lost=lost, epoch=epoch),  # type: ignore[arg-type]
        held=frozenset(),
        calls=frozenset(),
        weights=("t", 2),
        answered=None,
        attempted=None,
        refitting=False,
        torn=False,
        in_flight_updates=False,
        max_groups=4,
    )
    return dataclasses.replace(now, **changes)


HELD = frozenset({"a", "b"})


MINE = epoch(state="transfer", acknowledged=(ME, "rollout-other"))
NEXT: dict[str, tuple[WorkerState, list[Any]]] = {
    "a new replica waits for weights": (worker_state("STALE"), []),
    "a healthy replica leases what it has room for": (worker_state(held=HELD), [LeaseGroups(2)]),
    "and nothing where it has none": (worker_state(held=HELD, max_groups=2), []),
    "lost leases are aborted and make room": (
        worker_state(held=HELD, lost=("a", "not mine")),
        [Abort(frozenset({"a"})), LeaseGroups(3)],
    ),
    "a stale replica goes on with what it holds": (worker_state("STALE", held=HELD), []),
    "dead means a new life with nothing held": (worker_state("DEAD", held=HELD), [Abort(HELD), Rejoin()]),
    "a dead replica ends its refit first": (worker_state("DEAD", held=HELD, refitting=True), [Abort(HELD)]),
    "a proof whose answer was lost": (worker_state(torn=True, attempted="e1"), [Rejoin()]),
    "a proof that failed": (worker_state("STALE", torn=True, attempted="e1"), []),
    "an idle replica acknowledges at once": (worker_state(epoch=epoch()), [Acknowledge(epoch())]),
    "a stale one, too": (worker_state("STALE", epoch=epoch()), [Acknowledge(epoch())]),
    "generations are drained first": (worker_state(epoch=epoch(), held=HELD), []),
    "lost leases are not waited for": (
        worker_state(epoch=epoch(), held=HELD, lost=("a", "b")),
        [Abort(HELD), Acknowledge(epoch())],
    ),
    "with in-flight updates nothing is drained": (
        worker_state(epoch=epoch(), held=HELD, in_flight_updates=True),
        [Acknowledge(epoch())],
    ),
    "a transfer without this replica is left alone": (
        worker_state("STALE", epoch=epoch(state="transfer", acknowledged=("rollout-other",))),
        [],
    ),
    "a verified replica leases while others verify": (
        worker_state(epoch=msgspec.structs.replace(MINE, verified=(ME,)), attempted="e1"),
        [LeaseGroups(4)],
    ),
    "a transfer is joined once": (
        worker_state("STALE", epoch=msgspec.structs.replace(MINE, refused={ME: "timeout"}), attempted="e1"),
        [],
    ),
    "and the next is another": (
        worker_state("STALE", epoch=epoch(id="e2"), attempted="e1"),
        [Acknowledge(epoch(id="e2"))],
    ),
    **{
        f"a {state} replica after an epoch that is {over}": (worker_state(state, epoch=epoch(state=over)), actions)
        for over in ("done", "aborted")
        for state, actions in (("HEALTHY", [LeaseGroups(4)]), ("STALE", []))
    },
}


@pytest.mark.parametrize(("now", "actions"), NEXT.values(), ids=NEXT)
def test_what_a_replica_does_next(now: WorkerState, actions: list[Any]) -> None:
    assert decide(now) == actions


def test_law_2_what_weights_that_a_rewind_ended_write_ends() -> None:
    rewound = {"held": HELD, "epoch": epoch(version=2), "in_flight_updates": True}
    assert decide(worker_state("STALE", weights=("before", 2), **rewound)) == [Acknowledge(epoch(version=2))]
    assert decide(worker_state("STALE", weights=("before", 3), **rewound)) == [Abort(HELD), Rejoin()]
    # of one timeline, a replica installs what the epoch says
    assert decide(worker_state("STALE", weights=("t", 3), **rewound)) == [Acknowledge(epoch(version=2))]


@pytest.mark.parametrize("state", ["announced", "transfer"])
def test_an_epoch_for_others_interrupts_nothing(state: str) -> None:
    for_late = epoch(state=state, members=("rollout-late",), acknowledged=("rollout-late",))
    now = worker_state(epoch=for_late, held=HELD, calls=frozenset({"t"}), weights=("t", 3))
    assert decide(now) == [LeaseGroups(2)]
    assert fence(now, "t", 3) is None


@pytest.mark.parametrize("state", ["HEALTHY", "STALE"])
def test_nothing_is_leased_between_acknowledgement_and_verification(state: str) -> None:
    mine = epoch(acknowledged=(ME,))
    assert decide(worker_state(state, epoch=mine)) == []
    assert decide(worker_state(state, epoch=epoch(), answered="e1")) == []
    transfer = msgspec.structs.replace(mine, state="transfer")
    assert decide(worker_state(state, epoch=transfer)) == [TakePart(transfer)]
    assert decide(worker_state(state, epoch=transfer, attempted="e1", refitting=True)) == []


@pytest.mark.parametrize("busy", [{"held": HELD}, {"calls": frozenset({"t"})}])
def test_one_that_pulls_drains_first_unless_in_flight(busy: dict[str, Any]) -> None:
    here = epoch(state="transfer", members=(ME,), acknowledged=(ME,))
    assert decide(worker_state(epoch=here, pulls=True, **busy)) == []
    assert decide(worker_state(epoch=here, pulls=True, in_flight_updates=True, **busy)) == [TakePart(here)]
    assert decide(worker_state(epoch=here, pulls=True)) == [TakePart(here)]
    assert decide(worker_state(epoch=None, pulls=True)) == [LeaseGroups(4)]  # until then it leases
    # the others wait for one that has acknowledged, whatever it does by now
    assert decide(worker_state(epoch=here, **busy)) == [TakePart(here)]


members = st.sets(st.sampled_from([ME, "rollout-other"])).map(tuple)
situations = st.builds(
    worker_state,
    state=st.sampled_from(["HEALTHY", "STALE", "DEAD"]),
    lost=st.sets(st.sampled_from(["a", "b", "c"])).map(tuple),
    epoch=st.none()
    | st.builds(
        epoch,
        id=st.sampled_from(["e1", "e2"]),
        state=st.sampled_from(["announced", "transfer", "done", "aborted"]),
        members=members,
        acknowledged=members,
        verified=members,
        refused=st.dictionaries(st.sampled_from([ME, "rollout-other"]), st.just("why")),
    ),
    held=st.frozensets(st.sampled_from(["a", "b"])),
    answered=st.sampled_from([None, "e1", "e2"]),
    attempted=st.sampled_from([None, "e1", "e2"]),
    refitting=st.booleans(),
    torn=st.booleans(),
    calls=st.frozensets(st.sampled_from(["t", "u"])),
    weights=st.none() | st.tuples(st.sampled_from(["t", "u"]), st.integers(2, 4)),
    in_flight_updates=st.booleans(),
    max_groups=st.integers(1, 3),
)


@given(situations)
def test_in_every_situation(now: WorkerState) -> None:
    """Only a HEALTHY replica leases, within its room, and never in the turn in which it takes any other step towards weights."""
    actions = decide(now)
    kinds = [type(action) for action in actions]
    if LeaseGroups in kinds:
        lease = actions[-1]
        assert isinstance(lease, LeaseGroups)
        assert now.reply.state == "HEALTHY"
        assert not now.refitting
        assert not now.torn
        assert lease.count + len(now.held - set(now.reply.lost)) == now.max_groups
        assert set(kinds[:-1]) <= {EndCalls, Abort}
    if Acknowledge in kinds or TakePart in kinds:
        opened = now.reply.epoch
        assert opened is not None
        assert ME in opened.members
        assert not now.refitting
        assert (opened.state == "announced") == (Acknowledge in kinds)
    if Acknowledge in kinds and not now.in_flight_updates:
        assert now.held <= set(now.reply.lost)
    ended = {timeline for action in actions if isinstance(action, EndCalls) for timeline in action.timelines}
    over = now.calls - {now.reply.timeline}
    assert over <= ended <= now.calls
    if Rejoin in kinds:
        assert ended == now.calls
    if Acknowledge in kinds and not now.in_flight_updates:
        assert ended == now.calls
    for timeline in ("t", "u"):
        if fence(now, timeline, 3) is None:
            assert now.reply.state == "HEALTHY"
            assert now.reply.timeline == timeline
            assert not now.torn
            assert now.weights is not None
            assert now.weights >= (timeline, 3)
            if not now.in_flight_updates:
                assert Acknowledge not in kinds
                assert TakePart not in kinds
                assert not now.refitting
    aborted = [action.tokens for action in actions if isinstance(action, Abort)]
    if now.reply.state != "DEAD":
        assert aborted in ([], [now.held & set(now.reply.lost)])


def test_a_lease_of_a_complete_group_is_told_apart() -> None:
    reply = HeartbeatReply(state="HEALTHY", timeline="t", lost=("a", "b", "gone"), epoch=None, complete=("b", "gone"))
    now = dataclasses.replace(worker_state(held=frozenset("abc")), reply=reply)
    assert decide(now)[0] == Abort(frozenset("ab"), complete=frozenset("b"))


def test_a_quarantined_replica_lets_go_and_does_nothing_more() -> None:
    now = worker_state(
        "QUARANTINED", lost=("a",), epoch=epoch(members=("rollout-other",)), held=frozenset({"a"}), torn=True
    )
    assert decide(now) == [Abort(frozenset({"a"}))]


def test_a_quarantined_replica_says_why_and_what_to_do() -> None:
    status = ReplicaStatus(state="QUARANTINED", quarantined="its refit failed", refused="of older date")
    problem = status.problem() or ""
    assert problem.startswith("quarantined, because its refit failed")
    assert "restart this replica" in problem


CALLS = frozenset({"t"})


def fenced(now: WorkerState, timeline: str = "t", min_version: int = 2) -> str | None:
    found = fence(now, timeline, min_version)
    return None if found is None else found.reason


def test_law_4_a_call_needs_verified_weights_new_enough() -> None:
    assert fenced(worker_state()) is None
    assert fenced(worker_state(), min_version=3) == "stale"
    assert fenced(worker_state(), timeline="u") == "timeline"
    assert fenced(worker_state(weights=("u", 9))) == "timeline"
    assert fenced(worker_state(weights=None)) == "unhealthy"
    assert fenced(worker_state(torn=True)) == "unhealthy"
    # as when the refit that failed its proof is not yet over
    assert fenced(worker_state(torn=True, weights=None, refitting=True)) == "unhealthy"
    for state in ("STALE", "DEAD", "QUARANTINED"):
        assert fenced(worker_state(state)) == "unhealthy"


def test_a_refit_drains_calls_as_leases_and_takes_no_new_ones() -> None:
    announced = epoch()
    assert decide(worker_state(epoch=announced, calls=CALLS)) == []
    assert fenced(worker_state(epoch=announced, calls=CALLS)) == "refit"
    acknowledged = epoch(acknowledged=(ME,))
    assert fenced(worker_state(epoch=acknowledged)) == "refit"
    transfer = msgspec.structs.replace(acknowledged, state="transfer")
    assert fenced(worker_state(epoch=transfer, attempted="e1", refitting=True)) == "refit"


def test_in_flight_updates_take_calls_until_the_engine_is_paused() -> None:
    announced = epoch(acknowledged=(ME,))
    now = worker_state(epoch=announced, calls=CALLS, in_flight_updates=True)
    assert fenced(now) is None
    assert decide(dataclasses.replace(now, reply=worker_state(epoch=epoch()).reply)) == [Acknowledge(epoch())]
    paused = dataclasses.replace(now, attempted="e1", refitting=True, weights=None)
    assert fenced(paused) == "refit"


def test_law_4_calls_of_an_abandoned_timeline_are_ended_first() -> None:
    transfer = epoch(state="transfer", acknowledged=(ME,))
    both = frozenset({"t", "u"})
    ended = EndCalls(frozenset({"u"}))
    assert decide(worker_state(epoch=transfer, calls=both, in_flight_updates=True)) == [ended, TakePart(transfer)]
    assert decide(worker_state(calls=both, max_groups=0)) == [ended]


def test_a_replica_that_is_no_longer_of_the_fleet_ends_its_calls() -> None:
    assert decide(worker_state("DEAD", held=HELD, calls=CALLS)) == [Abort(HELD), EndCalls(CALLS), Rejoin()]
    assert decide(worker_state("DEAD", calls=CALLS, refitting=True)) == [Abort(frozenset()), EndCalls(CALLS)]
    assert decide(worker_state("QUARANTINED", calls=CALLS)) == [EndCalls(CALLS)]
    assert decide(worker_state("HEALTHY", torn=True, attempted="e1", calls=CALLS)) == [EndCalls(CALLS), Rejoin()]
    assert decide(worker_state("STALE", calls=CALLS)) == []
