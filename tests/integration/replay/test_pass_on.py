"""A group whose lease is lost goes on: its place, its trajectories and scores, and what was saved unfinished outlive their replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.base.errors import InvalidCall, LeaseLost, WrongTimeline
from headrace.records.score import Score
from headrace.records.trajectory import Trajectory
from headrace.replay import Lease, Limits, ReplayClient
from tests.support.buffer import (
    begin,
    contents,
    died,
    enqueue,
    generate,
    group_of,
    healthy_replica,
    lease_one,
    make_group,
    make_trajectory,
    payload_bytes,
    payloads,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
    tighten,
    total,
)
from tests.support.waiting import eventually


def prefix(lease: Lease, index: int, length: int = 3, versions: Sequence[int] | None = None) -> Trajectory:
    return msgspec.structs.replace(make_trajectory(lease, index, versions, length), finish_reason="length", text="")


async def test_law_1_conservation_trajectories_outlive_their_replica(replay: ReplayClient, limits: Limits) -> None:
    limits = dataclasses.replace(limits, generations_per_prompt=4)
    await replay.open_run(limits)
    await enqueue(replay, range(1), n=4)
    dying = await healthy_replica(replay)
    (lost,) = await replay.lease(dying, 1)
    assert (lost.missing, lost.prefixes) == ((0, 1, 2, 3), {})
    await replay.push(lost, make_trajectory(lost, 2))
    await score_all(replay)
    await replay.push(lost, make_trajectory(lost, 0))
    await replay.save(lost, prefix(lost, 3, length=5))
    before = await group_of(replay, lost)

    await died(replay, limits, dying)
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    assert (lease.group.id, lease.attempt, lease.ticket, lease.count) == (lost.group.id, 1, lost.ticket, 4)
    assert lease.token != lost.token
    assert lease.missing == (1, 3)
    assert list(lease.prefixes) == [3]
    saved = prefix(lost, 3, length=5)
    np.testing.assert_array_equal(lease.prefixes[3].completion_token_ids, saved.completion_token_ids)
    assert lease.prefixes[3].spans == saved.spans
    after = await group_of(replay, lease)
    assert (after["pushed"], after["scored"], after["failures"]) == (2, 1, 1)
    assert after["trajectories"] == before["trajectories"]
    await push_all(replay, lease)
    assert len(await payloads(replay)) == 4  # the prefix went with the trajectory that it became
    await score_all(replay)
    assert (await group_of(replay, lease))["state"] == "ready"
    assert await total(replay) == 1


async def test_law_5_order_a_group_passed_on_keeps_its_place(replay: ReplayClient) -> None:
    await enqueue(replay, range(8))
    await replay.enqueue([make_group(0, lane="validation")], (await replay.state()).timeline)
    replica = await healthy_replica(replay)
    validation, first, second = await replay.lease(replica, 3)
    await replay.release(second, "shutdown", failed=False)
    await replay.release(validation, "shutdown", failed=False)
    again = await replay.lease(replica, 64)
    # no admission: both were admitted once; the others are as many as without them
    assert [(lease.group.id, lease.ticket) for lease in again[:2]] == [
        ("e0-validation-0", -1),
        ("e0-train-1", second.ticket),
    ]
    assert len(again) == 4
    for lease in (first, *again):
        await push_all(replay, lease)
    await score_all(replay)
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-1")


async def test_law_5_order_admission_counts_a_group_without_a_lease(replay: ReplayClient) -> None:
    replica, other = await healthy_replica(replay), await begin(replay, 12)
    await refit(replay, 0, [replica, other])
    leases = await replay.lease(replica, 64)
    assert len(leases) == 4
    await replay.deregister(replica)
    assert {lease.group.id for lease in await replay.lease(other, 64)} == {lease.group.id for lease in leases}
    assert await replay.lease(other, 64) == []


async def test_law_4_fencing_the_old_lease_may_neither_push_nor_save(replay: ReplayClient) -> None:
    replica = await begin(replay, 1)
    (lost,) = await replay.lease(replica, 1)
    await replay.save(lost, prefix(lost, 0))
    await replay.release(lost, "shutdown", failed=False)
    (lease,) = await replay.lease(replica, 1)
    before = await contents(replay)
    for call in (replay.push, replay.save):
        with pytest.raises(LeaseLost):
            await call(lost, prefix(lost, 0, length=9))
    with pytest.raises(LeaseLost):
        await replay.abandon(lost, 0, "late")
    assert await contents(replay) == before
    assert (await replay.heartbeat(replica, [lost.token, lease.token])).lost == (lost.token,)


async def test_law_6_liveness_a_group_that_kills_its_replicas_fails(replay: ReplayClient, limits: Limits) -> None:
    await enqueue(replay, range(1))
    leases = []
    for length in (3, 4, 5):
        replica = await healthy_replica(replay)
        leases += await replay.lease(replica, 1)
        await replay.save(leases[-1], prefix(leases[-1], 0, length))
        await replay.deregister(replica, died=True)
    assert (await replay.state()).counts["failed"] == 1
    assert [lease.attempt for lease in leases] == [1, 1, 1]
    assert "attempt 3 of 3" in (await group_of(replay, leases[0]))["reason"]
    assert (await replay.stats())["bytes"] == len(await payloads(replay)) == 0


async def test_law_6_liveness_a_silent_replica_is_taken_its_group(replay: ReplayClient, limits: Limits) -> None:
    """It renews the lease and saves the same tokens, and so holds up nobody. What it did before stays."""
    replica = await begin(replay, 1)
    (lost,) = await replay.lease(replica, 1)
    await replay.push(lost, make_trajectory(lost, 0))
    await tighten(replay, limits, group_deadline_s=0.5)
    await replay.save(lost, prefix(lost, 1))

    async def taken() -> bool:
        (refused,) = await replay.save_many([(lost, prefix(lost, 1))])
        told = (await replay.heartbeat(replica, [lost.token], [0])).lost == (lost.token,)
        return told and isinstance(refused, LeaseLost)

    await eventually(taken)
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    assert (lease.attempt, lease.missing, set(lease.prefixes)) == (1, (1,), {1})
    assert "replay.group_deadline_s" in (await group_of(replay, lost))["reason"]


@pytest.mark.parametrize(("policy", "kept"), [("ordered", False), ("drop", False), ("mask", True)])
async def test_law_2_age_what_is_over_age_for_the_next_step_starts_over(
    replay: ReplayClient, limits: Limits, policy: str, kept: bool
) -> None:
    replica = await begin(replay, 8)
    (lost,) = await replay.lease(replica, 1)
    await generate(replay, replica)
    await replay.open_run(dataclasses.replace(limits, staleness_policy="drop", max_age=1, ahead_steps=3))
    timeline = (await replay.state()).timeline
    for step in range(2):
        await replay.reserve(step, timeline)
        await refit(replay, step + 1, [replica])
        await generate(replay, replica)
    await replay.open_run(dataclasses.replace(limits, staleness_policy=policy, max_age=0, ahead_steps=3))
    await replay.push(lost, make_trajectory(lost, 0, versions=[1, 2]))
    await replay.save(lost, prefix(lost, 1, versions=[1, 2]))
    await score_all(replay)
    await replay.release(lost, "shutdown", failed=False)
    (lease,) = await replay.lease(replica, 1)
    group = await group_of(replay, lease)
    if kept:
        assert (lease.missing, list(lease.prefixes), group["pushed"], group["scored"]) == ((1,), [1], 1, 1)
    else:
        assert (lease.missing, lease.prefixes, group["pushed"], group["scored"]) == ((0, 1), {}, 0, 0)
        assert "oldest" not in group
    assert lease.group.id == lost.group.id
    await push_all(replay, lease)
    await score_all(replay)
    assert (await group_of(replay, lease))["state"] == "ready"
    assert (await replay.stats())["bytes"] == await payload_bytes(replay)


async def test_law_2_age_a_rewind_starts_over_what_was_passed_on(replay: ReplayClient) -> None:
    replica = await begin(replay, 2)
    lost, other = await replay.lease(replica, 2)
    await replay.save(lost, prefix(lost, 0))
    for lease in (lost, other):
        await replay.release(lease, "shutdown", failed=False)
    await rewind(replay, 0)
    assert (await replay.state()).counts == {"queued": 2, "open": 0}
    assert (await replay.stats())["bytes"] == len(await payloads(replay)) == 0
    with pytest.raises(WrongTimeline):
        await replay.save(lost, prefix(lost, 0))
    await refit(replay, 0, [replica])
    assert [lease.attempt for lease in await replay.lease(replica, 2)] == [2, 2]


async def test_memory_a_prefix_is_counted_replaced_and_freed(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    held = (await replay.stats())["bytes"]
    for length in (3, 9, 6):
        await replay.save(lease, prefix(lease, 1, length))
    assert len(await payloads(replay)) == 1
    assert (await replay.stats())["bytes"] == held
    assert held >= len(prefix(lease, 1, 16).encode()) * 2
    await push_all(replay, lease)
    assert len(await payloads(replay)) == 2


async def test_a_shorter_prefix_changes_nothing(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    await replay.save(lease, prefix(lease, 0, 6))
    before = await contents(replay)
    await replay.save(lease, prefix(lease, 0, 6))
    await replay.save(lease, prefix(lease, 0, 2))
    assert await contents(replay) == before
    await replay.push(lease, make_trajectory(lease, 1))
    before = await contents(replay)
    await replay.save(lease, prefix(lease, 1, 9))  # its trajectory is in
    assert await contents(replay) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"index": 2}, "index 2 of group"),
        ({"versions": [0, 1]}, "the newest weights are 0"),
        ({"attempt": 7}, "attempt 7"),
    ],
)
async def test_a_prefix_that_can_not_be_is_refused(replay: ReplayClient, change: dict[str, Any], said: str) -> None:
    lease = await lease_one(replay)
    before = await contents(replay)
    saved = prefix(lease, change.get("index", 0), versions=change.get("versions"))
    with pytest.raises(InvalidCall, match=said):
        await replay.save(lease, msgspec.structs.replace(saved, attempt=change.get("attempt", 1)))
    assert await contents(replay) == before


async def test_law_3_completeness_of_a_group_passed_on_with_surplus(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, redundant=2))
    replica = await begin(replay, 1)
    (lost,) = await replay.lease(replica, 1)
    await replay.push(lost, make_trajectory(lost, 3))
    await score_all(replay)
    await replay.push(lost, make_trajectory(lost, 1))
    assert await replay.abandon(lost, 0, "cut off")
    await replay.save(lost, prefix(lost, 2))
    await replay.release(lost, "shutdown", failed=False)
    (lease,) = await replay.lease(replica, 1)
    assert (lease.missing, list(lease.prefixes), lease.count) == ((2,), [2], 4)
    await replay.release(lease, "shutdown", failed=False)
    await score_all(replay)  # the second score comes while nobody holds the group, and completes it
    group = await group_of(replay, lost)
    assert (group["state"], [t["index"] for t in group["trajectories"]]) == ("ready", [1, 3])
    assert await replay.lease(replica, 1) == []
    assert len(await payloads(replay)) == 2
    with pytest.raises(LeaseLost):
        await replay.save(lease, prefix(lease, 2, 9))


async def test_law_7_a_score_of_a_lost_lease_s_trajectory_counts(replay: ReplayClient) -> None:
    replica = await begin(replay, 1)
    (lost,) = await replay.lease(replica, 1)
    await replay.push(lost, make_trajectory(lost, 0))
    (job,) = await replay.take_scoring({"math": 1})
    await replay.release(lost, "shutdown", failed=False)
    await replay.score(job, Score("SCORED", 0.25))
    (lease,) = await replay.lease(replica, 1)
    assert lease.missing == (1,)
    await push_all(replay, lease)
    await score_all(replay)
    assert [t["reward"] for t in (await group_of(replay, lease))["trajectories"]] == [0.25, 2.0]


async def test_law_6_a_validation_that_was_given_back_goes_first(replay: ReplayClient) -> None:
    """It has no place in line: the next refit waits for it, however late it began."""
    replica = await begin(replay, 1)
    (training,) = await replay.lease(replica, 1)
    await replay.enqueue([make_group(0, lane="validation")], (await replay.state()).timeline)
    (validation,) = await replay.lease(replica, 1)
    for lease in (training, validation):
        await replay.release(lease, "it drains", failed=False)
    assert [lease.group.lane for lease in await replay.lease(replica, 2)] == ["validation", "train"]
