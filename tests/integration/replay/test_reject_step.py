"""A batch that breaks a law, as the trainer read it, is given back: that one step is reopened, and nothing else."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvalidCall, WrongStep, WrongTimeline
from headrace.replay import End, Limits, ReplayClient, Reservation
from tests.support.buffer import begin, contents, generate, nonce, refusals, reserve, rewind, some, tighten, total


async def reject(replay: ReplayClient, batch: Reservation, *named: str, name: str | None = None) -> None:
    attempts = {group: batch.attempts[batch.groups.index(group)] for group in named}
    timeline = (await replay.state()).timeline
    await replay.reject_step(batch.step, timeline, name or nonce(), attempts, "its score is another's (law 7)")


async def test_survivors_keep_the_step_and_the_hole_is_filled_in_order(replay: ReplayClient) -> None:
    replica = await begin(replay, 8)
    made = await generate(replay, replica)
    first = await reserve(replay, 0)
    assert (first.groups, first.attempts) == (tuple(made[:2]), (1, 1))
    await reject(replay, first, made[0])
    state = await replay.state()
    assert (state.next_step, some(state.counts)) == (0, {"queued": 5, "ready": 3})
    # the rejected group is the next that is leased, before all that never were; the others of the step are still admitted
    (lease,) = await replay.lease(replica, 64)
    assert (lease.group.id, lease.attempt) == (made[0], 2)
    again = await reserve(replay, 0)
    assert again.groups == (made[1], made[2])
    assert again.attempts == (1, 1)
    group = await replay.group(made[0])
    assert group is not None
    assert group["failures"] == 1
    assert (await replay.stats())["requeues"] == {"invariant": 1}
    assert await total(replay) == 8


async def test_each_rejection_costs_the_group_an_attempt_until_it_fails(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_attempts=2)
    replica = await begin(replay, 2)
    poison, innocent = await generate(replay, replica)
    for attempt in (1, 2):
        batch = await reserve(replay, 0)
        assert batch.groups == ((poison, innocent) if attempt == 1 else (innocent, poison))
        if attempt == 2:
            with pytest.raises(WrongStep, match="does not hold attempt 1"):
                await replay.reject_step(0, (await replay.state()).timeline, nonce(), {poison: 1}, "comes late")
        await reject(replay, batch, poison)
        await generate(replay, replica)
    state = await replay.state()
    assert some(state.counts) == {"failed": 1, "ready": 1}
    ended = await replay.read_ended()
    assert (ended.failed, ended.bitmap) == (1, b"\x80")
    group = await replay.group(poison)
    assert group is not None
    assert group["reason"] == "its score is another's (law 7) (attempt 2 of 2)"
    await replay.close(state.timeline)
    assert await replay.reserve(0, state.timeline) == End(1)


async def test_law_4_a_rejection_that_comes_again_or_late_changes_nothing(replay: ReplayClient) -> None:
    replica = await begin(replay, 8)
    made = await generate(replay, replica)
    timeline = (await replay.state()).timeline
    batch = await reserve(replay, 0)
    await reject(replay, batch, made[1], name="first")
    before = await contents(replay)
    await reject(replay, batch, made[1], name="first")  # its reply was lost
    assert await contents(replay) == before
    second = await reserve(replay, 0)
    assert second.groups == (made[0], made[2])
    await reject(replay, second, made[2], name="second")
    assert (await generate(replay, replica))[:2] == [made[1], made[2]]
    third = await reserve(replay, 0)
    before = await contents(replay)
    for late, named, name in ((batch, made[1], "first"), (second, made[2], "another")):
        with pytest.raises(WrongStep, match=rf"step 0.*attempt 1.*{named}"):
            await reject(replay, late, named, name=name)
    with pytest.raises(WrongStep, match="rejection of step 1"):
        await replay.reject_step(1, timeline, nonce(), {made[0]: 1}, "")
    with pytest.raises(WrongTimeline):
        await replay.reject_step(0, "another", nonce(), {made[0]: 1}, "")
    with pytest.raises(InvalidCall, match="names no group"):
        await replay.reject_step(0, timeline, nonce(), {}, "")
    assert await contents(replay) == before
    assert await refusals(replay) == {"HR_STEP": 3, "HR_TIMELINE": 1, "HR_INVALID": 1}
    await replay.commit(1, timeline)
    with pytest.raises(WrongStep, match="rejection of step 0"):
        await reject(replay, third, third.groups[0])


@pytest.mark.parametrize("how", ["announced", "offered"])
async def test_law_6_a_step_that_was_trained_stays_reserved(replay: ReplayClient, how: str) -> None:
    """Taken back again and again, it would wait for groups that later weights wrote, and they for room."""
    await generate(replay, await begin(replay, 8))
    batch, timeline = await reserve(replay, 0), (await replay.state()).timeline
    if how == "announced":
        await replay.open_epoch(nonce(), 1, timeline, {})
    else:
        await replay.offer(nonce(), 1, timeline, {}, [-1.0], 1e-3, 1e-3)
    before = await contents(replay)
    with pytest.raises(WrongStep, match="rejection of step 0"):
        await reject(replay, batch, batch.groups[0])
    assert await contents(replay) == before
    await rewind(replay, 0)
    await reject(replay, await reserve(replay, 0), batch.groups[0])


async def test_a_rewind_to_a_step_that_was_reopened_finds_its_survivors(replay: ReplayClient) -> None:
    replica = await begin(replay, 8)
    made = await generate(replay, replica)
    await reject(replay, await reserve(replay, 0), made[0])
    await rewind(replay, 0)
    assert (await reserve(replay, 0)).groups == (made[1], made[2])
