"""Law 4: a call under what is no longer valid is refused, and changes nothing."""

from __future__ import annotations

import math

import pytest

from headrace.base.errors import Fenced, InvalidCall, LeaseLost, NotVerified, WrongStep, WrongTimeline
from headrace.records.score import Score
from headrace.replay import Limits, RefitVerdict, ReplayClient
from tests.support.buffer import (
    begin,
    contents,
    enqueue,
    generate,
    make_group,
    make_trajectory,
    nonce,
    push_all,
    refusals,
    reserve,
    rewind,
    tighten,
)
from tests.support.waiting import eventually

# The trainer's log-probabilities.
PROBE = [-1.0, -2.0]


async def test_law_4_fencing_an_expired_lease_may_not_push(replay: ReplayClient, limits: Limits) -> None:
    replica = await begin(replay, 2)
    await tighten(replay, limits, lease_s=0.05)
    (lease,) = await replay.lease(replica, 1)
    await eventually(lambda: _is_passed_on(replay, lease.group.id))
    before = await contents(replay)
    for call in (
        replay.push(lease, make_trajectory(lease, 0)),
        replay.release(lease, "late", failed=True),
        replay.reject(lease, "late"),
    ):
        with pytest.raises(LeaseLost):
            await call
    assert await contents(replay) == before
    assert (await refusals(replay))["HR_LEASE_LOST"] == 3


async def _is_passed_on(replay: ReplayClient, group_id: str) -> bool:
    await replay.heartbeat("nobody", [])  # any call ends what is due
    group = await replay.group(group_id)
    return group is not None and group["replica"] == ""


async def test_law_4_fencing_a_second_lease_ends_the_first(replay: ReplayClient) -> None:
    replica = await begin(replay, 2)
    (lease,) = await replay.lease(replica, 1)
    await replay.push(lease, make_trajectory(lease, 0))
    await replay.release(lease, "engine died", failed=True)
    (again,) = await replay.lease(replica, 1)
    assert (again.group.id, again.attempt) == (lease.group.id, 2)
    before = await contents(replay)
    with pytest.raises(LeaseLost):
        await replay.push(lease, make_trajectory(lease, 0))
    assert await contents(replay) == before
    with pytest.raises(InvalidCall, match="attempt"):
        await replay.push(again, make_trajectory(lease, 0))


async def test_law_4_fencing_another_timeline(replay: ReplayClient) -> None:
    replica = await begin(replay, 4)
    leases = await replay.lease(replica, 3)
    await push_all(replay, leases[0])
    (job, _) = await replay.take_scoring({"math": 64})
    old = leases[0].timeline
    epoch = nonce()
    await replay.open_epoch(epoch, 1, old, {})
    await replay.begin_epoch(epoch, {}, [0.0], 1e-3)  # else its leases would outlive the timeline
    await rewind(replay, 0)
    before = await contents(replay)
    for call, error in (
        (replay.push(leases[1], make_trajectory(leases[1], 0)), WrongTimeline),
        (replay.release(leases[1], "drain", failed=True), WrongTimeline),
        (replay.score(job, Score("SCORED", 1.0)), LeaseLost),
        (replay.reserve(0, old), WrongTimeline),
        (replay.commit(0, old), WrongTimeline),
        (replay.enqueue([make_group(9)], old), WrongTimeline),
        (replay.close(old), WrongTimeline),
        (replay.drop_validation(old, 1), WrongTimeline),
        (replay.open_epoch(nonce(), 0, old, {}), WrongTimeline),
        (replay.acknowledge(replica, epoch), WrongTimeline),
        (replay.lease(replica, 1), NotVerified),
    ):
        with pytest.raises(error):
            await call
    assert await contents(replay) == before
    assert sum((await refusals(replay)).values()) == 11


async def test_law_4_fencing_another_incarnation(replay: ReplayClient) -> None:
    replica = await begin(replay, 4)
    (lease,) = await replay.lease(replica, 1)
    state = await replay.restore(3, nonce(), nonce(), enqueued=3)
    assert (state.next_step, state.committed, state.enqueued, state.counts) == (3, 3, 3, {"trained": 6})
    before = await contents(replay)
    for call in (replay.push(lease, make_trajectory(lease, 0)), replay.release(lease, "drain", failed=False)):
        with pytest.raises(WrongTimeline):
            await call
    with pytest.raises(NotVerified):
        await replay.lease(replica, 1)
    assert await contents(replay) == before
    assert (await replay.heartbeat(replica, [lease.token])).state == "DEAD"


async def test_law_4_fencing_steps_are_reserved_and_committed_in_turn(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    await generate(replay, await begin(replay, 8))
    before = await contents(replay)
    for call in (replay.reserve(1, timeline), replay.commit(1, timeline), replay.rewind(1, nonce())):
        with pytest.raises(WrongStep):
            await call
    assert await contents(replay) == before
    first = await reserve(replay, 0)
    assert await reserve(replay, 0) == first  # the reply was lost: the same batch again
    await reserve(replay, 1)
    with pytest.raises(WrongStep, match="the next step is 2"):
        await replay.reserve(0, timeline)
    await replay.commit(2, timeline)
    with pytest.raises(WrongStep):
        await replay.reserve(1, timeline)
    assert (await refusals(replay))["HR_STEP"] == 5


async def test_law_4_fencing_only_a_verified_replica_leases(replay: ReplayClient) -> None:
    await enqueue(replay, range(4))
    replica, late = nonce(), nonce()
    timeline = (await replay.state()).timeline
    with pytest.raises(NotVerified):
        await replay.lease(replica, 1)
    await replay.register(replica, {})
    with pytest.raises(NotVerified):
        await replay.lease(replica, 1)
    epoch = nonce()
    await replay.open_epoch(epoch, 0, timeline, {})
    await replay.register(late, {})
    with pytest.raises(Fenced):
        await replay.acknowledge(late, epoch)
    with pytest.raises(Fenced):
        await replay.verify(replica, epoch, PROBE)  # not begun
    await replay.acknowledge(replica, epoch)
    await replay.begin_epoch(epoch, {}, PROBE, 1e-3)
    for apart in ([-1.0, -2.002], [-0.998, -2.0], [1e308, -1e308]):
        verdict = await replay.verify(replica, epoch, apart)
        assert (verdict.verified, verdict.difference > 1e-3) == (False, True)
        with pytest.raises(Fenced):
            await replay.verify(replica, epoch, PROBE)  # torn out: the next epoch
        with pytest.raises(NotVerified):
            await replay.lease(replica, 1)
        await replay.end_epoch(epoch, aborted=False)
        epoch = nonce()
        await replay.open_epoch(epoch, 0, timeline, {})
        await replay.acknowledge(replica, epoch)
        await replay.begin_epoch(epoch, {}, PROBE, 1e-3)
    verdict = await replay.verify(replica, epoch, [-1.0001, -2.0])
    assert verdict == RefitVerdict(True, pytest.approx(1e-4), pytest.approx(5e-5), 1e-3, 1e-3)  # type: ignore[arg-type]
    assert len(await replay.lease(replica, 1)) == 1
    await replay.register(replica, {})  # again: it stays as it is
    assert len(await replay.lease(replica, 1)) == 1
    await replay.deregister(replica)
    with pytest.raises(Fenced, match="register under a new name"):
        await replay.register(replica, {})
    with pytest.raises(NotVerified):
        await replay.lease(replica, 1)


async def test_law_4_fencing_the_mean_difference_has_a_tolerance_of_its_own(replay: ReplayClient) -> None:
    replica, timeline = nonce(), (await replay.state()).timeline
    await replay.register(replica, {})
    cases = ([-1.4, -2.0], True), ([-1.4, -2.4], False), ([-2.4, -2.0], False)
    for version, (far, verified) in enumerate(cases):
        epoch = nonce()
        await replay.open_epoch(epoch, version, timeline, {})
        await replay.acknowledge(replica, epoch)
        await replay.begin_epoch(epoch, {}, PROBE, 1.0, 0.3)
        verdict = await replay.verify(replica, epoch, far)
        assert (verdict.verified, verdict.tolerance, verdict.mean_tolerance) == (verified, 1.0, 0.3)
        epochs = await replay.end_epoch(epoch, aborted=False)
        assert verified or "0.3" in epochs.refused[replica]
        assert ("tolerance 1 (first at token 2), and by" in epochs.refused.get(replica, "")) is (far[0] == -2.4)


async def test_law_4_fencing_incomparable_log_probabilities_prove_nothing(replay: ReplayClient) -> None:
    replica, epoch, timeline = nonce(), nonce(), (await replay.state()).timeline
    await replay.register(replica, {})
    await replay.open_epoch(epoch, 0, timeline, {})
    await replay.acknowledge(replica, epoch)
    for bad in ([], [math.nan], [math.inf], ["-1.0"], [None, -1.0]):
        with pytest.raises(InvalidCall, match=r"logprobs|no log-probabilities"):
            await replay.begin_epoch(epoch, {}, bad, 1e-3)  # type: ignore[arg-type]
    for tolerances in ((math.nan,), (1e-3, math.nan)):
        with pytest.raises(InvalidCall, match="tolerance"):
            await replay.begin_epoch(epoch, {}, PROBE, *tolerances)
    await replay.begin_epoch(epoch, {}, PROBE, 1e-3)
    assert await replay.begin_epoch(epoch, {}, [0.0], 9.0) == await replay.epoch()  # again: it stays as it is
    before = await contents(replay)
    for bad in ([math.nan, -2.0], [-1.0, -math.inf], [-1.0], [*PROBE, -3.0], [], ["x", -2.0], [None, -2.0], "\0\xff"):
        with pytest.raises(InvalidCall, match=r"logprobs|log-probabilities.*2"):
            await replay.verify(replica, epoch, bad)  # type: ignore[arg-type]
    assert await contents(replay) == before
    assert (await replay.verify(replica, epoch, PROBE)).verified
