"""The hub's end of a stream of `Attach` with two kinds of work: neither spends, waits for or gives back what is the other's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import CodecError
from headrace.v1 import environment_pb2, episode_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb
from headrace_services.reward.attached import AttachedStream

KINDS = (pb.WORK_KIND_SCORE, pb.WORK_KIND_EPISODE)
KIND = st.sampled_from(KINDS)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), KIND, st.integers(1, 4)),
        st.tuples(st.just("send"), KIND, st.integers(1, 4)),
        st.tuples(st.just("answer"), KIND, st.just(0)),
    ),
    max_size=40,
)


def register(*offers: tuple[Any, int], build: str = "1") -> pb.Register:
    described = environment_pb2.DescribeResponse(name="Mine", build=build)
    made = [pb.Offer(environment=described, capacity=capacity, name="mine", kind=kind) for kind, capacity in offers]
    return pb.Register(process_id="p", offers=made)


@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), EVENTS)
async def test_each_kind_has_credit_of_its_own(capacities: tuple[int, int], events: list[tuple[str, Any, int]]) -> None:
    stream = AttachedStream(register(*zip(KINDS, capacities, strict=True)), 1024**2)
    credit = dict.fromkeys(KINDS, 0)
    held: dict[Any, list[tuple[str, int, asyncio.Future[pb.Answer]]]] = {kind: [] for kind in KINDS}
    for name, kind, amount in events:
        most = capacities[KINDS.index(kind)]
        if name == "grant":
            event = pb.AttachRequest(credit=pb.Credit(name="mine", kind=kind, amount=amount))
            if credit[kind] + sum(size for _, size, _ in held[kind]) + amount > most:
                with pytest.raises(CodecError, match="overdraft"):
                    stream.receive(event)
            else:
                stream.receive(event)
                credit[kind] += amount
        elif name == "send":
            size = 1 if kind == pb.WORK_KIND_EPISODE else amount
            if size > credit[kind]:
                continue
            if kind == pb.WORK_KIND_EPISODE:
                work_id, answer = stream.send_episode("mine", episode_pb2.Episode(), 1.0)
            else:
                work_id, answer = stream.send("mine", [trajectory_pb2.Trajectory()] * size, 1.0)
            credit[kind] -= size
            held[kind].append((work_id, size, answer))
        elif held[kind]:
            work_id, _, answer = held[kind].pop(0)
            stream.receive(pb.AttachRequest(answer=pb.Answer(work_id=work_id)))
            assert answer.done()
        assert {of: stream.room("mine", of) for of in KINDS} == credit
        assert stream.count_held("mine") == sum(size for pieces in held.values() for _, size, _ in pieces)


@pytest.mark.parametrize(
    ("registered", "said"),
    [
        (register((pb.WORK_KIND_STEP, 1)), "its kind is 2"),
        (register((pb.WORK_KIND_EPISODE, 1), (pb.WORK_KIND_EPISODE, 1)), "offered twice for WORK_KIND_EPISODE"),
        (register((pb.WORK_KIND_EPISODE, 0)), "its capacity is 0"),
    ],
)
def test_offers_that_cannot_be_taken(registered: pb.Register, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        AttachedStream(registered, 1024**2)


def test_two_builds_under_one_name_are_refused() -> None:
    both = register((pb.WORK_KIND_SCORE, 1))
    both.offers.extend(register((pb.WORK_KIND_EPISODE, 1), build="2").offers)
    with pytest.raises(CodecError, match=r"'mine'.*'1' and '2'"):
        AttachedStream(both, 1024**2)
