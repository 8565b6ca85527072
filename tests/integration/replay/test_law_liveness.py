"""Laws 6 and 7: nothing that hangs or fails stalls the run, and a failure never becomes a reward."""

from __future__ import annotations

import pytest

from headrace.base.errors import LeaseLost, NotVerified
from headrace.records.score import Score, Status
from headrace.replay import Limits, ReplayClient, ScoringJob, Waiting
from tests.support.buffer import (
    begin,
    died,
    enqueue,
    generate,
    group_of,
    healthy_replica,
    lease_one,
    make_group,
    make_trajectory,
    nonce,
    push_all,
    refit,
    reserve,
    rewind,
    tighten,
    total,
)
from tests.support.waiting import eventually
from tests.support.wake_ups import WakeUps


async def test_law_6_liveness_heartbeats_renew_a_lease(replay: ReplayClient) -> None:
    replica = await begin(replay, 2)
    (lease,) = await replay.lease(replica, 1)
    leases = f"hr:{{{replay.run_id}}}:{lease.incarnation}:leases"
    before = await replay.redis.zscore(leases, lease.group.id)

    async def renewed() -> bool:
        assert (await replay.heartbeat(replica, [lease.token])).lost == ()
        return await replay.redis.zscore(leases, lease.group.id) > before

    await eventually(renewed)
    # another replica's heartbeat does not
    assert (await replay.heartbeat(nonce(), [lease.token])).lost == (lease.token,)


async def test_law_6_liveness_no_heartbeat_renews_past_the_deadline(replay: ReplayClient, limits: Limits) -> None:
    replica = await begin(replay, 2)
    await tighten(replay, limits, lease_s=3600.0, group_deadline_s=0.5)
    (lease,) = await replay.lease(replica, 1)

    async def lost() -> bool:
        return (await replay.heartbeat(replica, [lease.token])).lost == (lease.token,)

    await eventually(lost)
    assert (await replay.stats())["requeues"] == {"deadline": 1}
    assert (await group_of(replay, lease))["failures"] == 1


async def test_law_6_liveness_a_shorter_deadline_holds_from_now_on(replay: ReplayClient, limits: Limits) -> None:
    """Though what began under the longer one is all that falls due."""
    hour = dict.fromkeys(("lease_s", "group_deadline_s", "scoring_deadline_s", "replica_dead_s"), 3600.0)
    await tighten(replay, limits, **hour)
    replica = await begin(replay, 2)
    scored, hung = await replay.lease(replica, 2)
    await push_all(replay, scored)
    jobs = await replay.take_scoring({"math": 64})
    await tighten(replay, limits, **hour | {"group_deadline_s": 0.5, "scoring_deadline_s": 0.5})
    assert (await replay.heartbeat(replica, [hung.token], [1])).lost == ()

    async def lost() -> bool:
        return (await replay.heartbeat(replica, [hung.token])).lost == (hung.token,)

    await eventually(lost)
    assert await replay.renew_scoring(jobs) == []
    await eventually(lambda: replay.take_scoring({"math": 64}))


async def test_law_6_liveness_a_poison_group_ends_as_failed(replay: ReplayClient, limits: Limits) -> None:
    replica = await begin(replay, 3)
    for attempt in (1, 2, 3):
        (lease,) = await replay.lease(replica, 1)
        assert (lease.group.order, lease.attempt) == (0, attempt)
        await replay.release(lease, "the engine refused it", failed=True)
    stats = await replay.stats()
    assert stats["failed"] == [
        {"group": "e0-train-0", "lane": "train", "reason": "the engine refused it (attempt 3 of 3)"}
    ]
    await generate(replay, replica)
    assert (await reserve(replay, 0)).groups == ("e0-train-1", "e0-train-2")


async def test_law_6_liveness_giving_back_costs_no_attempt(replay: ReplayClient) -> None:
    replica = await begin(replay, 2)
    for _ in range(5):
        (lease,) = await replay.lease(replica, 1)
        await replay.release(lease, "drain", failed=False)
        assert (await group_of(replay, lease))["failures"] == 0
    assert (await replay.state()).counts == {"queued": 1, "open": 1}


async def test_law_6_liveness_a_dead_replica_gives_its_groups_back(replay: ReplayClient, limits: Limits) -> None:
    await enqueue(replay, range(4))
    replica = await healthy_replica(replay)
    leases = await replay.lease(replica, 3)
    await replay.push(leases[0], make_trajectory(leases[0], 0))

    await died(replay, limits, replica)
    assert (await replay.state()).counts == {"queued": 1, "open": 3}
    reply = await replay.heartbeat(replica, [lease.token for lease in leases])
    assert reply.state == "DEAD"
    assert reply.lost == tuple(lease.token for lease in leases)
    with pytest.raises(NotVerified):
        await replay.lease(replica, 1)
    for lease in leases:
        assert [again.ticket for again in await replay.lease(await healthy_replica(replay), 3)] == [lease.ticket]


async def test_law_6_liveness_a_silent_scorers_work_goes_on_uncharged(replay: ReplayClient, limits: Limits) -> None:
    lease = await lease_one(replay)
    await push_all(replay, lease)
    await tighten(replay, limits, scoring_deadline_s=0.05)
    attempts = []

    async def taken_often() -> bool:
        jobs = await replay.take_scoring({"math": 64})
        attempts.extend(job.scoring_attempt for job in jobs if job.trajectory.index == 0)
        return len(attempts) > limits.max_scoring_attempts

    await eventually(taken_often)
    assert set(attempts) == {1}
    assert (await replay.state()).counts.get("failed", 0) == 0


async def test_law_6_liveness_a_scorer_keeps_what_it_renews(replay: ReplayClient, limits: Limits) -> None:
    lease = await lease_one(replay)
    await push_all(replay, lease)
    (kept,) = await replay.take_scoring({"math": 1})
    taken = f"hr:{{{replay.run_id}}}:{lease.incarnation}:taken:math"
    member = f"{lease.group.id}:{kept.trajectory.index}"
    before = await replay.redis.zscore(taken, member)
    await tighten(replay, limits, scoring_deadline_s=0.05)  # for what alone is to lapse
    (silent,) = await replay.take_scoring({"math": 1})
    await tighten(replay, limits)

    async def given_back() -> bool:
        assert await replay.renew_scoring([kept]) == []
        return bool(await replay.take_scoring({"math": 2}))

    await eventually(given_back)
    assert await replay.renew_scoring([kept, silent]) == [silent]
    assert await replay.redis.zscore(taken, member) > before
    await replay.score(kept, Score("SCORED", 1.0))


async def test_law_6_who_lacked_memory_is_woken_once_some_is_free(
    replay: ReplayClient, limits: Limits, woken: WakeUps
) -> None:
    replica = await begin(replay, 20)
    (lease,) = await replay.lease(replica, 1)
    await woken.take()
    await push_all(replay, lease)
    assert "work" not in await woken.take()  # there was room for all
    (lease,) = await replay.lease(replica, 1)
    await tighten(replay, limits, max_bytes=1)
    assert await replay.lease(await healthy_replica(replay), 1) == []
    await woken.take()
    await push_all(replay, lease)
    assert "work" in await woken.take()


async def test_law_6_liveness_leases_wait_for_memory_until_a_checkpoint(replay: ReplayClient, limits: Limits) -> None:
    replica = await begin(replay, 20)
    (lease,) = await replay.lease(replica, 1)
    worst = (await replay.stats())["bytes"]
    await tighten(replay, limits, max_bytes=max(int(2.5 * worst), 1))
    (second,) = await replay.lease(replica, 64)  # the third would not fit
    await push_all(replay, lease)  # complete: the unused part of its reservation is free again
    assert (await replay.stats())["bytes"] < 2 * worst
    await replay.release(second, "it drains", failed=False)
    await rewind(replay, 0)
    await tighten(replay, limits, max_bytes=int(2.01 * worst))
    # trained but uncommitted payloads fill the bound; the oldest go, so that the run reaches its checkpoint
    for step in range(7):
        await refit(replay, step, [replica])
        while isinstance(await replay.reserve(step, (await replay.state()).timeline), Waiting):
            assert await generate(replay, replica)
    events = [fields["kind"] for _, fields in await replay.events("0", 0.1)]
    assert "evicted" in events
    # a rewind has them made again
    await rewind(replay, 0)
    assert await total(replay) == 20
    await refit(replay, 0, [replica])
    await generate(replay, replica)
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-1")


@pytest.mark.parametrize("status", ["FAILED", "TIMED_OUT"])
async def test_law_7_failure_is_not_zero_retried_then_failed(
    replay: ReplayClient, limits: Limits, status: Status
) -> None:
    """The environment scores others meanwhile: it is the trajectory."""
    await tighten(replay, limits, max_scoring_attempts=2)
    lease = await lease_one(replay)
    await push_all(replay, lease)
    scored, job = await replay.take_scoring({"math": 64})
    no = Score(status, message="the sandbox is down")
    assert await replay.score_many([(scored, Score("SCORED", 1.0)), (job, no)]) == [None, None]
    taken: list[ScoringJob] = []

    async def again() -> bool:
        taken.extend(await replay.take_scoring({"math": 64}))
        return bool(taken)

    await eventually(again)
    (job,) = taken
    assert job.scoring_attempt == 2
    await replay.score(job, no)
    assert await replay.take_scoring({"math": 64}) == []
    group = await replay.group("e0-train-0")
    assert group is not None
    assert (group["state"], group["trajectories"]) == ("failed", [])
    assert "the sandbox is down" in group["reason"]
    with pytest.raises(LeaseLost):
        await replay.score(job, Score("SCORED", 1.0))


async def test_law_7_failure_is_not_zero_invalid_fails_at_once(replay: ReplayClient) -> None:
    groups = [make_group(0, n=1, lane="validation", group_id="e0-validation-v0-0"), make_group(0, n=4)]
    await replay.enqueue(groups, (await replay.state()).timeline)
    for lease in await replay.lease(await healthy_replica(replay), 2):
        await push_all(replay, lease)
    jobs = await replay.take_scoring({"math": 64})
    invalid = Score("INVALID", message="no such task")
    scores = [Score("SCORED", 1.0) if job.trajectory.index else invalid for job in jobs]
    assert await replay.score_many(list(zip(jobs, scores, strict=True))) == [None] * len(jobs)
    assert (await replay.state()).counts["failed"] == 1
    done, failed, unknown = await replay.read_evaluated(["e0-validation-v0-0"])
    assert (done, unknown) == ([], [])
    assert failed == {"e0-validation-v0-0": "scoring refused: INVALID: no such task"}


async def test_law_7_failure_is_not_zero_unreadable_bytes_fail_the_group(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    await push_all(replay, lease)
    group = await replay.group(lease.group.id)
    assert group is not None
    await replay.redis.set(group["trajectories"][1]["key"], b"\x00garbage")
    jobs = await replay.take_scoring({"math": 64})
    assert [job.trajectory.index for job in jobs] == [0]
    group = await replay.group(lease.group.id)
    assert group is not None
    assert group["state"] == "failed"
    assert "trajectory" in group["reason"]
