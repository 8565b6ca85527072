"""Going back to a checkpoint older than the newest, and steps that are kept after they were trained."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvalidCall, WrongStep, WrongTimeline
from headrace.replay import Limits, ReplayClient, Waiting
from tests.support.buffer import (
    begin,
    generate,
    make_group,
    nonce,
    refill,
    refit,
    reserve,
    rewind,
    some,
    tighten,
    total,
)

GROUPS = 16


async def train(replay: ReplayClient, replica: str, steps: range) -> list[tuple[str, ...]]:
    """Each step's groups; every one is committed."""
    batches = []
    for step in steps:
        await refit(replay, step, [replica])
        await generate(replay, replica)
        batches.append((await reserve(replay, step)).groups)
        await replay.commit(step + 1, (await replay.state()).timeline)
    return batches


async def refill_all(replay: ReplayClient, trained: list[tuple[str, ...]]) -> int:
    """As the trainer does it: every prompt up to the watermark that its ledger does not hold."""
    state = await replay.state()
    known = {group for batch in trained for group in batch}
    new = await refill(replay, [order for order in range(state.enqueued + 1) if f"e0-train-{order}" not in known])
    await replay.end_refill(state.timeline)
    return new


async def test_law_1_conservation_a_rewind_behind_commits_and_its_refill(replay: ReplayClient) -> None:
    replica = await begin(replay, GROUPS)
    batches = await train(replay, replica, range(4))
    assert (await replay.state()).counts["trained"] == 8
    state = await rewind(replay, 1)
    assert (state.next_step, state.committed, state.refill) == (1, 1, True)
    assert state.counts["trained"] == 2
    assert sum(state.counts.values()) == GROUPS - 6  # the buffer holds no more of steps 1 to 3
    assert await refill_all(replay, batches[:1]) == 6
    assert not (await replay.state()).refill
    assert await total(replay) == GROUPS
    again = await train(replay, replica, range(1, 8))
    # law 5: the order is that of the prompts, as before
    assert again[:3] == batches[1:]
    trained = [group for batch in [*batches[:1], *again] for group in batch]
    assert sorted(trained) == sorted(f"e0-train-{order}" for order in range(GROUPS))
    assert some((await replay.state()).counts) == {"trained": GROUPS}
    assert (await replay.stats())["bytes"] == 0


async def test_law_1_conservation_a_refill_cut_off_is_asked_for_again(replay: ReplayClient) -> None:
    """The trainer was killed between the rewind and the end of its refill, and again."""
    replica = await begin(replay, GROUPS)
    batches = await train(replay, replica, range(3))
    state = await rewind(replay, 1)
    assert await replay.enqueue([make_group(2), make_group(3)], state.timeline, refill=True) == 2
    again = await rewind(replay, 1)
    assert again.refill
    with pytest.raises(WrongTimeline):
        await replay.end_refill(state.timeline)  # the first trainer has woken up
    assert (await replay.state()).refill
    assert await refill_all(replay, batches[:1]) == 2
    assert not (await replay.state()).refill
    assert not (await rewind(replay, 1)).refill
    assert await total(replay) == GROUPS


async def test_law_5_order_nothing_moves_before_a_refill_is_complete(replay: ReplayClient, limits: Limits) -> None:
    """What is still missing comes before what is there; and a refill that is delivered twice would bring back what was trained since."""
    await tighten(replay, limits, retain_steps=3)
    replica = await begin(replay, GROUPS)
    batches = await train(replay, replica, range(2))
    state = await rewind(replay, 1)
    assert state.refill
    await refit(replay, 1, [replica])
    assert await replay.lease(replica, 8) == []
    assert await replay.reserve(1, state.timeline) == Waiting(0, 2)
    await refill_all(replay, batches[:1])
    assert (await train(replay, replica, range(1, 2))) == batches[1:]


async def test_a_restore_asks_for_a_refill_and_an_ordinary_rewind_does_not(replay: ReplayClient) -> None:
    await generate(replay, await begin(replay, 4))
    await reserve(replay, 0)
    assert not (await rewind(replay, 1)).refill
    state = await replay.restore(1, nonce(), nonce(), 3)
    assert state.refill
    assert (await replay.state()).refill
    with pytest.raises(WrongStep, match=r"2 prompts.*missing"):
        await replay.end_refill(state.timeline)
    assert await refill(replay, range(2, 4)) == 2
    await replay.end_refill(state.timeline)
    assert not (await replay.state()).refill


async def test_law_5_order_retained_steps_come_back_unchanged(replay: ReplayClient, limits: Limits) -> None:
    """Those whose payloads are still held, and whose tokens the weights descend from."""
    await tighten(replay, limits, retain_steps=3, max_age=2)
    replica = await begin(replay, GROUPS)
    # the first round makes steps 0 to 2 of version 0: step 2 survives a rewind to 2, and step 3 does not
    batches = await train(replay, replica, range(5))
    assert batches[2] == ("e0-train-4", "e0-train-5")
    assert (await replay.group("e0-train-3")) is None  # step 1 is freed
    held = await replay.group("e0-train-4")
    assert held is not None
    assert (held["state"], held["step"]) == ("trained", 2)
    state = await rewind(replay, 2)
    assert state.counts["trained"] == 4
    assert await total(replay) == GROUPS  # nothing is missing: steps 2 to 4 were retained
    assert await refill_all(replay, batches[:2]) == 0
    assert (await reserve(replay, 2)).groups == batches[2]
    again = await train(replay, replica, range(2, 8))
    assert again[0] == batches[2]
    assert some((await replay.state()).counts) == {"trained": GROUPS}


async def test_retained_steps_are_freed_as_newer_ones_are_committed(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, retain_steps=2)
    replica = await begin(replay, GROUPS)
    batches = await train(replay, replica, range(5))
    for step, groups in enumerate(batches):
        for group in groups:
            assert ((await replay.group(group)) is not None) is (step >= 3)
    assert (await replay.state()).counts["trained"] == 10
    # fewer are asked for: the next commit frees what is beyond
    await tighten(replay, limits, retain_steps=0)
    await replay.commit(5, (await replay.state()).timeline)
    assert await replay.group(batches[4][0]) is None
    assert (await replay.state()).counts["trained"] == 10


async def test_law_6_liveness_retained_payloads_make_room_first(replay: ReplayClient, limits: Limits) -> None:
    """Leases never wait for payloads that are merely retained; the oldest go first."""
    await tighten(replay, limits, retain_steps=4)
    replica = await begin(replay, GROUPS)
    batches = await train(replay, replica, range(3))
    await refit(replay, 3, [replica])
    before = (await replay.stats())["bytes"]
    assert before > 0
    prefix = f"hr:{{{replay.run_id}}}:{(await replay.state()).incarnation}"
    (queued,) = await replay.redis.zrange(f"{prefix}:queue", 0, 0)
    worst = int(await replay.redis.hget(f"{prefix}:g:{queued.decode()}", "worst"))
    await tighten(replay, limits, retain_steps=4, max_bytes=before + worst - 1)
    assert len(await replay.lease(replica, 1)) == 1
    payloads = [len((await replay.group(batch[0]) or {})["trajectories"]) for batch in batches]
    assert payloads == [0, 2, 2]
    await tighten(replay, limits, retain_steps=4, max_bytes=1)
    assert await replay.lease(replica, 1) == []  # something is in flight: wait
    assert [len((await replay.group(batch[0]) or {})["trajectories"]) for batch in batches] == [0, 0, 0]
    # what was evicted can't keep its step: it is generated again, without a refill
    await rewind(replay, 1)
    assert await total(replay) == GROUPS
    assert await refill_all(replay, batches[:1]) == 0
    await tighten(replay, limits, retain_steps=4)
    assert await train(replay, replica, range(1, 3)) == batches[1:]


async def test_law_1_conservation_no_refill_while_steps_are_being_freed(replay: ReplayClient) -> None:
    """A group in the middle of being freed is known, and soon it is not: taken for held, it would be lost."""
    replica = await begin(replay, 4)
    await generate(replay, replica)
    await reserve(replay, 0)
    for version in (1, 0):  # the trainer is killed before it has freed step 0, and goes back behind it
        timeline = nonce()
        await replay._connection.call("rewind", version=version, timeline=timeline)
    with pytest.raises(InvalidCall, match="refill while"):
        await replay.enqueue([make_group(0)], timeline, refill=True)
    await rewind(replay, 0)
    assert await refill_all(replay, []) == 2
    assert await total(replay) == 4


async def test_the_buffer_knows_which_timeline_made_a_version(replay: ReplayClient) -> None:
    """A checkpoint of an abandoned timeline is not one of this history, though its version was trained in both."""
    replica = await begin(replay, GROUPS)
    first = (await replay.state()).timeline
    batches = await train(replay, replica, range(3))
    await rewind(replay, 2)
    state = await rewind(replay, 2)
    second = state.timeline
    assert len(state.timelines) == 2  # one that nothing was trained on is no part of the history
    assert [state.find_timeline(version) for version in (1, 2, 3)] == [first, first, second]
    await refill_all(replay, batches[:2])
    await train(replay, replica, range(2, 5))
    state = await rewind(replay, 1)
    assert [state.find_timeline(version) for version in (1, 2, 5)] == [first, state.timeline, state.timeline]
    assert second not in dict(state.timelines)
    restored = await replay.restore(3, nonce(), nonce(), 9)
    assert [restored.find_timeline(version) for version in (3, 4)] == [None, restored.timeline]


async def test_a_rewind_to_the_initial_model_takes_everything_back(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, retain_steps=1)
    replica = await begin(replay, 6)
    await train(replay, replica, range(2))
    state = await rewind(replay, 0)
    assert (state.committed, state.counts["trained"]) == (0, 0)
    assert await refill_all(replay, []) == 2
    assert await total(replay) == 6
    await train(replay, replica, range(3))
    assert some((await replay.state()).counts) == {"trained": 6}


async def test_law_6_liveness_retained_payloads_make_room_after_a_rewind(replay: ReplayClient, limits: Limits) -> None:
    """Those of steps before the checkpoint are held on, and must not hold leases up."""
    await tighten(replay, limits, retain_steps=4, max_age=0)
    replica = await begin(replay, GROUPS)
    await train(replay, replica, range(3))
    await rewind(replay, 3)
    await refit(replay, 3, [replica])
    assert (await replay.stats())["bytes"] > 0
    await tighten(replay, limits, retain_steps=4, max_age=0, max_bytes=1)
    assert len(await replay.lease(replica, 1)) == 1
