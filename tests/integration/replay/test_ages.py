"""The age policies `drop` and `mask`: law 2 without an order of generation."""

from __future__ import annotations

import pytest

from headrace.replay import Lease, Limits, ReplayClient, Waiting
from tests.support.buffer import begin, push_all, refit, reserve, rewind, score_all, tighten, total

pytestmark = pytest.mark.limits(staleness_policy="drop", max_age=1, ahead_steps=2)


async def finish(replay: ReplayClient, lease: Lease, *versions: int) -> None:
    await push_all(replay, lease, versions or None)
    await score_all(replay)


async def requeues(replay: ReplayClient) -> dict[str, int]:
    return dict((await replay.stats())["requeues"])


@pytest.mark.parametrize(("policy", "ahead", "granted"), [("ordered", 2, 4), ("drop", 2, 6), ("mask", 3, 8)])
async def test_law_2_age_admission_runs_ahead_by_what_the_policy_may(
    replay: ReplayClient, limits: Limits, policy: str, ahead: int, granted: int
) -> None:
    """R + O < (v + ahead + 1) * P, where only `ordered` takes the age bound for `ahead`."""
    await tighten(replay, limits, staleness_policy=policy, ahead_steps=ahead)  # type: ignore[arg-type]
    replica = await begin(replay, 20)
    leases = await replay.lease(replica, 64)
    assert len(leases) == granted
    for lease in leases:
        await finish(replay, lease)
    await reserve(replay, 0)
    assert await replay.lease(replica, 64) == []  # the step has gone, the version has not come
    await refit(replay, 1, [replica])
    assert len(await replay.lease(replica, 64)) == 2


@pytest.mark.parametrize("policy", ["drop", "mask"])
async def test_law_6_liveness_a_hung_group_holds_nobody_back(replay: ReplayClient, limits: Limits, policy: str) -> None:
    """Any ready groups make the batch, the lowest tickets among them; `ordered` would wait for the first."""
    await tighten(replay, limits, staleness_policy=policy)  # type: ignore[arg-type]
    hung, *others = await replay.lease(await begin(replay, 6), 6)
    for lease in reversed(others):
        await finish(replay, lease)
    assert (await reserve(replay, 0)).groups == ("e0-train-1", "e0-train-2")
    await finish(replay, hung)
    assert (await reserve(replay, 1)).groups == ("e0-train-0", "e0-train-3")
    assert await requeues(replay) == {}


async def test_law_2_age_drop_requeues_what_is_over_age(replay: ReplayClient) -> None:
    replica = await begin(replay, 6)
    leases = await replay.lease(replica, 6)
    for lease in leases[:5]:
        await finish(replay, lease)
    for step in (0, 1):
        await reserve(replay, step)
        await refit(replay, step + 1, [replica])
    # one that was ready all along, and one with a single token of version 0
    await finish(replay, leases[5], 0, 1, 2)
    timeline = (await replay.state()).timeline
    assert await replay.reserve(2, timeline) == Waiting(0, 2)
    assert await requeues(replay) == {"over_age": 2}
    # they leave the line at once, and are generated again first
    again = await replay.lease(replica, 2)
    assert [lease.group.id for lease in again] == ["e0-train-4", "e0-train-5"]
    assert [lease.attempt for lease in again] == [2, 2]
    for lease in again:
        await finish(replay, lease, 1, 2)
    batch = await reserve(replay, 2)
    assert {t.oldest_version for t in batch.trajectories} == {1}
    assert await total(replay) == 6


async def test_law_2_age_drop_looks_past_groups_over_age_for_a_batch(replay: ReplayClient) -> None:
    """More over age than a batch: the fresh ones behind them are found in the same call."""
    replica = await begin(replay, 12)
    for lease in await replay.lease(replica, 6):
        await finish(replay, lease)
    await reserve(replay, 0)
    await refit(replay, 1, [replica])
    old = [lease.group.id for lease in await replay.lease(replica, 2)]
    await reserve(replay, 1)
    await refit(replay, 2, [replica])
    fresh = await replay.lease(replica, 2)
    for lease in fresh:
        await finish(replay, lease)
    batch = await reserve(replay, 2)
    assert batch.groups == tuple(lease.group.id for lease in fresh)
    assert old == ["e0-train-6", "e0-train-7"]
    assert await requeues(replay) == {"over_age": 2}


async def test_law_2_age_mask_keeps_a_group_with_one_token_that_counts(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, staleness_policy="mask")  # type: ignore[arg-type]
    replica = await begin(replay, 6)
    leases = await replay.lease(replica, 6)
    for lease in leases[:4]:
        await finish(replay, lease)
    for step in (0, 1):
        await reserve(replay, step)
        await refit(replay, step + 1, [replica])
    await finish(replay, leases[4], 0, 1)  # at step 2 version 1 counts
    await finish(replay, leases[5], 0)  # and version 0 does not
    timeline = (await replay.state()).timeline
    assert await replay.reserve(2, timeline) == Waiting(1, 2)
    assert await requeues(replay) == {"over_age": 1}
    (again,) = await replay.lease(replica, 1)
    await finish(replay, again)
    batch = await reserve(replay, 2)
    assert batch.groups == ("e0-train-4", "e0-train-5")
    assert [(t.oldest_version, t.newest_version) for t in batch.trajectories] == [(0, 1)] * 2 + [(2, 2)] * 2


@pytest.mark.parametrize("policy", ["drop", "mask"])
async def test_law_5_order_survivors_of_a_rewind_go_first(replay: ReplayClient, limits: Limits, policy: str) -> None:
    await tighten(replay, limits, staleness_policy=policy, max_age=2)  # type: ignore[arg-type]
    replica = await begin(replay, 8)
    first, *leases = await replay.lease(replica, 6)
    for lease in leases:
        await finish(replay, lease)
    step_0, step_1 = await reserve(replay, 0), await reserve(replay, 1)
    await finish(replay, first)  # a lower ticket than any of theirs
    await rewind(replay, 0)
    assert await reserve(replay, 0) == step_0
    assert await reserve(replay, 1) == step_1
    assert (await reserve(replay, 2)).groups == ("e0-train-0", "e0-train-5")
    assert await total(replay) == 8


@pytest.mark.parametrize("policy", ["drop", "mask"])
async def test_law_2_age_no_policy_takes_tokens_of_an_abandoned_timeline(
    replay: ReplayClient, limits: Limits, policy: str
) -> None:
    await tighten(replay, limits, staleness_policy=policy)  # type: ignore[arg-type]
    replica = await begin(replay, 8)
    leases = await replay.lease(replica, 6)
    for lease in leases[:3]:
        await finish(replay, lease)
    await reserve(replay, 0)
    await refit(replay, 1, [replica])
    await finish(replay, leases[3], 0, 1)
    await rewind(replay, 0)
    assert (await requeues(replay))["rewind"] == 3  # that one, and the two that were open
    await reserve(replay, 0)
    assert await replay.reserve(1, (await replay.state()).timeline) == Waiting(1, 2)
