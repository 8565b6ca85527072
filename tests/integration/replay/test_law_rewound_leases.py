"""Leases that go on after a rewind, because what their replicas hold is what the new weights descend from."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvalidCall, NotVerified, ReplayError, WrongTimeline
from headrace.records.score import Score
from headrace.replay import EnvironmentLimits, Lease, ReplayClient
from tests.support.buffer import (
    contents,
    enqueue,
    generate,
    group_of,
    healthy_replica,
    make_call,
    make_group,
    make_trajectory,
    nonce,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
    some,
)

# environments of episodes
pytestmark = pytest.mark.limits(environments={"game": EnvironmentLimits(episodes=True)})


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
    assert (told.state, told.lost, told.descends) == ("STALE", (), True)
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
    assert not (await replay.heartbeat(near, [])).descends  # nor do its calls of episodes go on


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
    assert not (await replay.heartbeat(near, [])).descends


async def test_law_4_a_second_rewind_before_the_weights_came_ends_it(replay: ReplayClient, near: str) -> None:
    (lease,) = await replay.lease(near, 1)
    await rewind(replay, 1)
    await rewind(replay, 1)
    await is_void(replay, lease)


# -- episodes


RUNNER = "runner"


@pytest.fixture
async def played(replay: ReplayClient) -> list[Lease]:
    """Of the batches of steps 1 and 2, under version 1. Of the first episode of each, a call was appended."""
    replica = await healthy_replica(replay)
    await enqueue(replay, range(2))
    await train(replay, replica, 0)
    groups = [make_group(order, env_name="game") for order in range(2, 6)]
    await replay.enqueue(groups, (await replay.state()).timeline)
    await replay.register_runner(RUNNER, {})
    leases = await replay.lease_episodes(RUNNER, 64)
    assert [lease.version for lease in leases] == [1] * 4
    for lease in leases:
        await replay.append(lease, 0, 0, nonce(), make_call(version=1))
    return leases


async def finish(replay: ReplayClient, lease: Lease, version: int = 1) -> None:
    for index in range(lease.count):
        await replay.finish(lease, index, make_trajectory(lease, index, [version]), Score("SCORED", float(index)))


async def train_episodes(replay: ReplayClient, step: int, leases: list[Lease]) -> None:
    for lease in leases:
        await finish(replay, lease)
    await reserve(replay, step)
    await refit(replay, step + 1, [each.id for each in await replay.replicas()])


async def refused(replay: ReplayClient, error: type[ReplayError], lease: Lease, version: int, timeline: str) -> None:
    """What weights wrote changes nothing: neither as the next call, nor as a trajectory."""
    before = await contents(replay)
    with pytest.raises(error):
        await replay.append(lease, 0, 1, nonce(), make_call(0, version), timeline)
    with pytest.raises(error):
        await replay.finish(lease, 0, make_trajectory(lease, 0, [version]), Score("SCORED", 1.0))
    assert await contents(replay) == before


async def test_law_1_episodes_go_on_with_the_weights_of_a_rewind(replay: ReplayClient, played: list[Lease]) -> None:
    first, *others = played
    state = await rewind(replay, 1)
    assert (state.counts["open"], state.alive_runners) == (4, 1)
    assert not (await replay.runner_heartbeat(RUNNER, [lease.token for lease in played], [1] * 4)).lost
    assert await replay.lease_episodes(RUNNER, 64) == []  # no more until a replica has the weights of this timeline
    await replay.append(first, 0, 1, nonce(), make_call(0, version=1))  # it was under way
    again = await replay.finish(first, 1, None, Score("FAILED", message="it raised"))  # under the lease that it has
    assert again is not None
    await refit(replay, 1, [each.id for each in await replay.replicas()])
    await replay.append(first, 0, 2, nonce(), make_call(1, version=1), state.timeline)
    await finish(replay, again)
    await finish(replay, others[0])
    batch = await reserve(replay, 1)
    assert batch.groups == (first.group.id, others[0].group.id)
    assert [(await replay.group(id_) or {})["attempt"] for id_ in batch.groups] == [1, 1]


async def test_law_1_episodes_go_on_over_several_rewinds(replay: ReplayClient, played: list[Lease]) -> None:
    """Nothing of them has to be verified again: what they have got is there."""
    for _ in range(2):
        await rewind(replay, 1)
    for lease in played[:2]:
        await finish(replay, lease)
    assert (await reserve(replay, 1)).groups == tuple(lease.group.id for lease in played[:2])


@pytest.mark.parametrize("hands_in", ["append", "finish"])
async def test_law_2_what_later_weights_wrote_of_episodes_is_void(
    replay: ReplayClient, played: list[Lease], hands_in: str
) -> None:
    *first, second, third = played
    await train_episodes(replay, 1, first)
    if hands_in == "append":
        await replay.append(second, 0, 1, nonce(), make_call(0, version=2))
    else:
        await replay.finish(second, 0, make_trajectory(second, 0, [2]), Score("SCORED", 1.0))
    timeline = (await replay.state()).timeline
    await rewind(replay, 1)
    told = await replay.runner_heartbeat(RUNNER, [second.token, third.token])
    assert told.lost == (second.token,)
    assert (await group_of(replay, second))["state"] == "queued"
    await refused(replay, WrongTimeline, second, 1, timeline)


async def test_law_2_a_lease_of_episodes_for_later_weights_alone_is_void(
    replay: ReplayClient, played: list[Lease]
) -> None:
    """Its place is of a step for which the weights of the rewind are too old, perhaps; no call could be sampled before."""
    await train_episodes(replay, 1, played[:2])
    groups = [make_group(order, env_name="game") for order in range(6, 8)]
    await replay.enqueue(groups, (await replay.state()).timeline)
    later = await replay.lease_episodes(RUNNER, 64)
    assert [lease.version for lease in later] == [2, 2]
    await replay.release(played[3], "it drains", failed=False)
    (passed_on,) = await replay.lease_episodes(RUNNER, 64)
    assert (passed_on.group.id, passed_on.version) == (played[3].group.id, 2)
    await rewind(replay, 1)
    tokens = [lease.token for lease in (played[2], passed_on, *later)]
    assert (await replay.runner_heartbeat(RUNNER, tokens)).lost == tuple(tokens[1:])


async def test_law_2_what_an_abandoned_timeline_wrote_enters_no_episode(
    replay: ReplayClient, played: list[Lease]
) -> None:
    """Not even once the run has come as far again, under a lease that went on."""
    before = (await replay.state()).timeline
    await train_episodes(replay, 1, played[:2])
    lease, other = played[2:]
    state = await rewind(replay, 1)
    await refused(replay, InvalidCall, lease, 2, before)
    assert (await reserve(replay, 1)).groups == tuple(each.group.id for each in played[:2])
    await refit(replay, 2, [each.id for each in await replay.replicas()])
    await refused(replay, InvalidCall, lease, 2, before)
    with pytest.raises(InvalidCall):
        await replay.append(lease, 0, 1, nonce(), make_call(0, version=1), "unknown")
    await replay.append(lease, 0, 1, nonce(), make_call(0, version=1), before)  # of version 1 they descend
    for index, number in ((0, 2), (1, 0)):
        await replay.append(lease, index, number, nonce(), make_call(number - 1, version=2), state.timeline)
    await finish(replay, lease, 2)
    await finish(replay, other)
    assert (await reserve(replay, 2)).groups == (lease.group.id, other.group.id)


async def test_law_4_episodes_that_wait_for_a_runner_start_over(replay: ReplayClient, played: list[Lease]) -> None:
    await replay.deregister_runner(RUNNER)
    await rewind(replay, 1)
    assert some((await replay.state()).counts) == {"queued": 4, "trained": 2}
