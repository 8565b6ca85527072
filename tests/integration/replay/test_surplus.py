"""Over-sampling: a group starts n + r trajectories, and the first n that are scored complete it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from headrace.base.errors import InvalidCall, LeaseLost, Surplus
from headrace.records.score import Score
from headrace.replay import Lease, Limits, ReplayClient
from tests.support.buffer import (
    begin,
    contents,
    group_of,
    healthy_replica,
    lease_one,
    make_group,
    make_trajectory,
    payload_bytes,
    payloads,
    push_all,
    refit,
    refusals,
    reserve,
    rewind,
    tighten,
    total,
)

N, R = 2, 2

pytestmark = pytest.mark.limits(redundant=R)


async def push(replay: ReplayClient, lease: Lease, indices: Iterable[int], versions: list[int] | None = None) -> None:
    for index in indices:
        await replay.push(lease, make_trajectory(lease, index, versions))


async def score(replay: ReplayClient, indices: Iterable[int], status: str = "SCORED") -> None:
    """Score these of what waits, the rest is given back."""
    wanted = set(indices)
    for job in await replay.take_scoring({"math": 64}):
        if job.trajectory.index in wanted:
            reward = float(job.trajectory.index) if status == "SCORED" else None
            await replay.score(job, Score(status, reward, message="no"))  # type: ignore[arg-type]
    await replay.release_scoring()


async def fill(replay: ReplayClient, replica: str, indices: Iterable[int]) -> Lease:
    (lease,) = await replay.lease(replica, 1)
    await push(replay, lease, indices)
    await score(replay, indices)
    return lease


async def test_law_3_completeness_the_first_n_scored_are_the_group(replay: ReplayClient) -> None:
    replica = await begin(replay, 2)
    first, second = await replay.lease(replica, 2)
    assert (first.count, second.count) == (N + R, N + R)
    await push(replay, first, [3, 1])
    await score(replay, [3])
    assert (await group_of(replay, first))["state"] == "open"
    await score(replay, [1])
    assert (await group_of(replay, first))["state"] == "ready"
    await push(replay, second, [0, 1, 2, 3])
    await score(replay, [0, 2])
    batch = await reserve(replay, 0)
    assert [(t.group_id, t.index, t.reward) for t in batch.trajectories] == [
        (first.group.id, 1, 1.0),
        (first.group.id, 3, 3.0),
        (second.group.id, 0, 0.0),
        (second.group.id, 2, 2.0),
    ]
    pairs = await replay.read([t.key for t in batch.trajectories])
    assert [(t.group_id, t.index, s.reward) for t, s in pairs] == [
        (t.group_id, t.index, t.reward) for t in batch.trajectories
    ]
    # nothing of the others is left, neither bytes nor a place with the scorer
    assert len(await payloads(replay)) == 2 * N
    assert (await replay.stats())["scoring"]["waiting"] == 0
    assert (await replay.stats())["bytes"] == sum(len(t.encode()) for t, _ in pairs)
    assert (await replay.stats())["leases"] == 0


async def test_law_4_fencing_what_comes_after_the_n_is_surplus(replay: ReplayClient) -> None:
    replica = await begin(replay, 2)
    lease = await fill(replay, replica, [0, 2])
    before = await contents(replay)
    with pytest.raises(Surplus, match="has its 2 trajectories"):
        await push(replay, lease, [1])
    await push(replay, lease, [0])  # one that counts, again: known
    assert await contents(replay) == before
    assert (await refusals(replay))["HR_SURPLUS"] == 1
    reply = await replay.heartbeat(replica, [lease.token])
    assert (reply.lost, reply.complete) == ((lease.token,), (lease.token,))


async def test_law_4_fencing_a_score_that_comes_after_the_n_is_refused(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    await push(replay, lease, range(4))
    jobs = await replay.take_scoring({"math": 64})
    errors = await replay.score_many([(job, Score("SCORED", 1.0)) for job in jobs[:3]])
    assert [type(error) for error in errors] == [type(None), type(None), LeaseLost]
    before = await contents(replay)
    with pytest.raises(LeaseLost):
        await replay.score(jobs[3], Score("SCORED", 1.0))
    with pytest.raises(LeaseLost):
        await replay.score(jobs[3], Score("UNSENDABLE"))
    assert await contents(replay) == before


async def test_law_2_age_counts_the_tokens_of_those_that_are_kept(replay: ReplayClient) -> None:
    replica = await begin(replay, 4)
    leases = [await fill(replay, replica, [0, 1]) for _ in range(2)]
    (straddling,) = await replay.lease(replica, 1)
    await push(replay, straddling, [0], versions=[0])
    await reserve(replay, 0)
    await refit(replay, 1, [replica])
    await push(replay, straddling, [1, 2], versions=[1])
    await score(replay, [1, 2])
    group = await replay.group(straddling.group.id) or {}
    assert (group["state"], group["oldest"], group["newest"]) == ("ready", 1, 1)
    assert len(leases) == 2


async def test_law_7_a_trajectory_that_fails_for_good_costs_surplus(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    await push(replay, lease, [0, 1])
    await score(replay, [0, 1], "UNSENDABLE")
    group = await replay.group(lease.group.id) or {}
    assert (group["state"], group["dropped"], group["trajectories"]) == ("open", 2, [])
    await push(replay, lease, [0])  # the answer to the first push was lost: known, and still dropped
    assert len(await payloads(replay)) == 0
    await push(replay, lease, [2, 3])
    assert (await group_of(replay, lease))["state"] == "scoring"
    await score(replay, [2, 3])
    group = await replay.group(lease.group.id) or {}
    assert (group["state"], [t["index"] for t in group["trajectories"]]) == ("ready", [2, 3])
    assert (await replay.stats())["bytes"] == await payload_bytes(replay)


async def test_law_7_the_group_fails_once_fewer_than_n_are_left(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    await push(replay, lease, range(4))
    await score(replay, [0], "UNSENDABLE")
    await score(replay, [3], "SCORED")
    await score(replay, [1], "UNSENDABLE")
    assert (await group_of(replay, lease))["state"] == "scoring"
    await score(replay, [2], "UNSENDABLE")
    group = await replay.group(lease.group.id) or {}
    assert (group["state"], group["reason"]) == ("failed", "it can't be scored: no")
    assert (await replay.stats())["bytes"] == len(await payloads(replay)) == 0


async def test_law_6_liveness_a_group_does_without_what_cant_be_generated(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    assert await replay.abandon(lease, 1, "cut off")
    assert await replay.abandon(lease, 1, "cut off")  # again: it costs no second one
    assert await replay.abandon(lease, 3, "cut off")
    await push(replay, lease, [0, 2])
    assert (await group_of(replay, lease))["state"] == "scoring"
    await score(replay, [0, 2])
    assert (await group_of(replay, lease))["state"] == "ready"


async def test_law_6_liveness_with_too_few_left_the_whole_group_is_retried(replay: ReplayClient) -> None:
    replica = await begin(replay, 1)
    (lease,) = await replay.lease(replica, 1)
    await push(replay, lease, [2])
    assert await replay.abandon(lease, 0, "cut off")
    assert await replay.abandon(lease, 1, "cut off")
    with pytest.raises(InvalidCall, match="index 4"):
        await replay.abandon(lease, 4, "cut off")
    assert not await replay.abandon(lease, 3, "engine is odd")
    with pytest.raises(LeaseLost):
        await replay.abandon(lease, 3, "engine is odd")
    group = await replay.group(lease.group.id) or {}
    assert (group["state"], group["failures"], group["reason"]) == ("queued", 1, "engine is odd")
    (again,) = await replay.lease(replica, 1)
    await push(replay, again, range(4))  # the indices dropped in the first attempt are as good as any
    await score(replay, [0, 1])
    assert (await group_of(replay, lease))["state"] == "ready"


async def test_without_surplus_an_abandoned_trajectory_fails_the_attempt(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, redundant=0, max_attempts=2)
    replica = await begin(replay, 1)
    for state in ("queued", "failed"):
        (lease,) = await replay.lease(replica, 1)
        assert lease.count == N
        assert not await replay.abandon(lease, 0, "cut off")
        assert (await group_of(replay, lease))["state"] == state


async def test_law_1_conservation_survivors_of_a_rewind_keep_their_indices(replay: ReplayClient) -> None:
    replica = await begin(replay, 4)
    for indices in ([0, 3], [1, 2]):
        await fill(replay, replica, indices)
    batch = await reserve(replay, 0)
    await rewind(replay, 0)
    assert await reserve(replay, 0) == batch
    assert [t.index for t in batch.trajectories] == [0, 3, 1, 2]
    assert await total(replay) == 4
    await replay.commit(1, (await replay.state()).timeline)
    assert len(await payloads(replay)) == 0


async def test_memory_a_lease_counts_the_worst_case_of_all_it_starts(replay: ReplayClient, limits: Limits) -> None:
    replica = await begin(replay, 2)
    (plain,) = await _leased(replay, limits, replica, redundant=0)
    held = (await replay.stats())["bytes"]
    await replay.release(plain, "engine died", failed=True)
    (lease,) = await _leased(replay, limits, replica, redundant=R)
    assert (lease.count, (await replay.stats())["bytes"]) == (N + R, held * (N + R) / N)


async def _leased(replay: ReplayClient, limits: Limits, replica: str, redundant: int) -> list[Lease]:
    await tighten(replay, limits, redundant=redundant)
    return await replay.lease(replica, 1)


async def test_validation_groups_have_their_n_and_no_more(replay: ReplayClient) -> None:
    await replay.enqueue([make_group(0, lane="validation")], (await replay.state()).timeline)
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    assert lease.count == N
    await push_all(replay, lease)
    await score(replay, [0, 1])
    done, _, _ = await replay.read_evaluated([lease.group.id])
    assert [t.index for t, _ in done[0].trajectories] == [0, 1]


async def test_too_many_redundant_trajectories_are_refused(replay: ReplayClient, limits: Limits) -> None:
    with pytest.raises(InvalidCall, match=r"1025.*replay\.redundant_generations"):
        await tighten(replay, limits, redundant=1025)
