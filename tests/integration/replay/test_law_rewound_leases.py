"""Leases that go on after a rewind, because what their replicas hold is what the new weights descend from."""

from __future__ import annotations

import pytest

from headrace.base.errors import NotVerified, WrongTimeline
from headrace.replay import Lease, ReplayClient
from tests.support.buffer import (
    contents,
    enqueue,
    generate,
    group_of,
    healthy_replica,
    make_trajectory,
    nonce,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
)


@pytest.fixture
async def near(replay: ReplayClient) -> str:
    """A replica that has written the batch of step 0, and holds version 1."""
    replica = await healthy_replica(replay)
    await enqueue(replay, range(12))
    await train(replay, replica, 0)
    return replica


async def train(replay: ReplayClient, replica: str, step: int) -> None:
    """The replica writes the batch of a step, and gets the next weights."""
    assert len(await generate(replay, replica, 2)) == 2
    await reserve(replay, step)
    await refit(replay, step + 1, [replica])


async def is_void(replay: ReplayClient, lease: Lease) -> None:
    """It is queued again, and nothing that is done under the lease changes anything."""
    assert (await group_of(replay, lease))["state"] == "queued"
    before = await contents(replay)
    for call in (
        replay.push(lease, make_trajectory(lease, 1)),
        replay.save(lease, make_trajectory(lease, 1)),
        replay.release(lease, "it drains", failed=False),
        replay.abandon(lease, 1, "no"),
    ):
        with pytest.raises(WrongTimeline):
            await call
    assert await contents(replay) == before


async def test_law_1_what_is_generated_by_the_weights_of_a_rewind_goes_on(replay: ReplayClient, near: str) -> None:
    first, second = await replay.lease(near, 2)
    await replay.push(first, make_trajectory(first, 0))
    await replay.save(second, make_trajectory(second, 0, length=2))
    assert (await rewind(replay, 1)).counts["open"] == 2
    told = await replay.heartbeat(near, [first.token, second.token], [1, 1])
    assert (told.state, told.lost) == ("STALE", ())
    with pytest.raises(NotVerified):  # no more until it has the weights of this timeline
        await replay.lease(near, 2)
    await replay.push(first, make_trajectory(first, 1))
    assert (await group_of(replay, first))["state"] == "scoring"
    before = await contents(replay)
    await replay.push(first, make_trajectory(first, 1))  # its answer was lost
    assert await contents(replay) == before
    await refit(replay, 1, [near])
    await push_all(replay, second)
    await score_all(replay)
    batch = await reserve(replay, 1)
    assert batch.groups == (first.group.id, second.group.id)
    assert [(await replay.group(id_) or {})["attempt"] for id_ in batch.groups] == [1, 1]


async def test_law_1_a_lease_that_went_on_is_given_back_as_ever(replay: ReplayClient, near: str) -> None:
    first, second = await replay.lease(near, 2)
    await replay.save(first, make_trajectory(first, 0, length=2))
    await rewind(replay, 1)
    await replay.release(first, "it leaves", failed=False)
    assert not await replay.abandon(second, 0, "too long")
    assert (await replay.state()).counts["open"] == 1
    (again,) = await replay.lease(await healthy_replica(replay, 1), 1)
    assert (again.group.id, list(again.prefixes)) == (first.group.id, [0])


async def test_law_2_what_later_weights_write_is_void(replay: ReplayClient, near: str) -> None:
    await train(replay, near, 1)
    (lease,) = await replay.lease(near, 1)
    await rewind(replay, 1)
    await is_void(replay, lease)


@pytest.mark.parametrize("hands_in", ["push", "save"])
async def test_law_2_what_was_begun_by_later_weights_is_void(replay: ReplayClient, near: str, hands_in: str) -> None:
    """Another one goes on with it, whose own weights are those of the rewind."""
    far, offered = nonce(), nonce()
    await replay.register_puller(far, {})
    await replay.offer(offered, 1, (await replay.state()).timeline, {}, [-1.0], 1e-3, 1e-3)
    assert (await replay.verify(far, offered, [-1.0])).verified
    await train(replay, near, 1)
    (begun,) = await replay.lease(near, 1)
    await getattr(replay, hands_in)(begun, make_trajectory(begun, 0))
    await replay.release(begun, "it leaves", failed=False)
    (lease,) = await replay.lease(far, 1)
    assert (lease.group.id, lease.version) == (begun.group.id, 1)
    await rewind(replay, 1)
    await is_void(replay, lease)


async def test_law_2_a_refit_that_has_begun_leaves_nothing_to_go_on_with(replay: ReplayClient, near: str) -> None:
    (lease,) = await replay.lease(near, 1)
    epoch = await replay.open_epoch(nonce(), 2, (await replay.state()).timeline, {})
    await replay.acknowledge(near, epoch.id)
    await replay.begin_epoch(epoch.id, {}, [0.0], 1e-3)
    await rewind(replay, 1)
    await is_void(replay, lease)


async def test_law_4_a_second_rewind_before_the_weights_came_ends_it(replay: ReplayClient, near: str) -> None:
    (lease,) = await replay.lease(near, 1)
    await rewind(replay, 1)
    await rewind(replay, 1)
    await is_void(replay, lease)
