"""Repeats, wrong arguments and malformed bytes: a repeat changes nothing, and neither does a refusal."""

from __future__ import annotations

import asyncio
import re

import msgpack
import pytest
from redis.exceptions import ResponseError

from headrace.errors import (
    CodecError,
    ConfigError,
    Fenced,
    InvalidCall,
    LeaseLost,
    NotVerified,
    ReplayError,
    ReplayUnavailable,
    WrongTimeline,
)
from headrace.replay import Limits, ReplayClient, Reservation
from headrace.replay.wire import open_redis
from headrace.trajectory import Score
from services.replay import library
from tests.integration.replay.helpers import (
    contents,
    enqueue,
    generate,
    healthy_replica,
    make_group,
    make_trajectory,
    nonce,
    push_all,
    refit,
    refusals,
    reserve,
    rewind,
    score_all,
    tighten,
)

FUNCTIONS = re.findall(r"'(hr_\w+)'", library.source())
GARBAGE: list[list[bytes]] = [
    [b""],
    [b"\x00\xff\n"] * 3,
    [b"-1", b"nan", b"inf", b"1e999"],
    [b"9" * 40] * 5,
    [b"x" * 100_000] * 6,
    [b"{run}", b"*", b"?", b"a b", b"..", b"--", b"0x10"],
    [b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b"10", b"11", b"12"],
]
# What may be answered without an error: nothing was asked for, nothing was known, or each entry was refused by itself.
HARMLESS = (None, 0, [])


@pytest.mark.parametrize("function", sorted(set(FUNCTIONS) - {"hr_open_run"}))
async def test_garbage_arguments_get_a_typed_error_and_change_nothing(replay: ReplayClient, function: str) -> None:
    await enqueue(replay, range(6))
    replica = await healthy_replica(replay)
    leases = await replay.lease(replica, 3)
    await push_all(replay, leases[0])
    await replay.take_scoring("scorer", 1)
    before = await contents(replay)
    for args in GARBAGE:
        command = ("FCALL", function, 1, f"hr:{{{replay.run_id}}}", *args)
        pipe = replay.redis.pipeline(transaction=False)
        (reply,) = await pipe.execute_command(*command).execute(raise_on_error=False)
        if isinstance(reply, ResponseError):
            assert str(reply).startswith("HR_"), (args, reply)
        else:
            assert reply in HARMLESS or reply[0] == b"DEAD", (args, reply)
    assert await contents(replay) == before


async def test_wrong_keys_are_refused(replay: ReplayClient) -> None:
    for keys in ([], ["hr:{a}", "hr:{b}"], ["other"], ["hr:{*}"], [f"hr:{{{replay.run_id}}}:events"]):
        for function in ("hr_state", "hr_push", "hr_open_run"):
            with pytest.raises(ResponseError, match=r"^HR_(INVALID|UNAVAILABLE) "):
                await replay.redis.execute_command("FCALL", function, len(keys), *keys)
    with pytest.raises(ResponseError, match=r"^HR_UNAVAILABLE .*no run nowhere"):
        await replay.redis.execute_command("FCALL", "hr_state", 1, "hr:{nowhere}")


async def test_limits_are_checked(replay: ReplayClient, limits: Limits) -> None:
    before = await contents(replay)
    for changes in ({"prompts_per_step": 0}, {"max_age": -1}, {"max_bytes": 0}):
        with pytest.raises(InvalidCall, match=next(iter(changes))):
            await tighten(replay, limits, **changes)
    with pytest.raises(InvalidCall, match='staleness policy is "loose"'):
        await tighten(replay, limits, staleness_policy="loose")  # type: ignore[arg-type]
    assert await contents(replay) == before


async def test_malformed_trajectories_do_not_get_past_the_client(replay: ReplayClient) -> None:
    await enqueue(replay, [0, 1])
    first, second = await replay.lease(await healthy_replica(replay), 2)
    before = await contents(replay)
    good = make_trajectory(first, 0)
    object.__setattr__(good, "logprobs", good.logprobs[:2])
    with pytest.raises(CodecError, match="logprobs has 2 entries"):
        await replay.push(first, good)
    with pytest.raises(InvalidCall, match="under the lease of"):
        await replay.push(second, make_trajectory(first, 0))
    assert await contents(replay) == before


async def test_a_refused_push_leaves_nothing_behind(replay: ReplayClient) -> None:
    await enqueue(replay, range(2))
    replica = await healthy_replica(replay)
    good, gone = await replay.lease(replica, 2)
    await replay.release(gone, "drain", failed=False)
    before = await contents(replay)
    errors = await replay.push_many([(gone, make_trajectory(gone, 0)), (gone, make_trajectory(gone, 1))])
    assert [type(error) for error in errors] == [LeaseLost, LeaseLost]
    assert await contents(replay) == before
    # one bad entry does not take the others with it
    errors = await replay.push_many([(good, make_trajectory(good, 0)), (gone, make_trajectory(gone, 0))])
    assert [type(error) for error in errors] == [type(None), LeaseLost]
    assert (await refusals(replay)) == {"HR_LEASE_LOST": 3}


async def test_a_push_delivered_twice_keeps_the_first_payload(replay: ReplayClient) -> None:
    """Whole repeats of the client (a new nonce), and repeats of its bytes by the connection (the same nonce), at any time."""
    await enqueue(replay, range(2))
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    state = await replay.state()
    key = f"hr:{{{replay.run_id}}}"
    payload = f"{key}:{state.incarnation}:p:"
    trajectories = [make_trajectory(lease, index) for index in range(2)]

    async def deliver(index: int, name: str, timeline: str = state.timeline) -> bytes:
        await replay.redis.set(payload + name, trajectories[index].encode(), nx=True, ex=60)
        line = f"{lease.group.id} {index} {lease.token} {name} 100 4 0 0"
        (answer,) = await replay.redis.execute_command("FCALL", "hr_push", 1, key, timeline, state.incarnation, line)
        return bytes(answer)

    assert await deliver(0, "aa") == b""
    assert await deliver(1, "bb") == b""
    before = await contents(replay)
    for index, name in ((0, "aa"), (1, "bb"), (0, "cc"), (1, "dd")):
        assert await deliver(index, name) == b""
    assert await contents(replay) == before
    await score_all(replay)
    await rewind(replay, 0)
    assert (await deliver(0, "aa")).startswith(b"HR_TIMELINE")
    assert (await deliver(0, "ee")).startswith(b"HR_TIMELINE")
    assert await replay.redis.ttl(payload + "aa") == -1
    assert await replay.redis.exists(payload + "ee", payload + "cc") == 0
    found = await replay.trajectory(lease.group.id, 0)
    assert found is not None


async def test_a_push_without_its_payload_is_refused(replay: ReplayClient) -> None:
    await enqueue(replay, [0])
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    key = f"hr:{{{replay.run_id}}}"
    args = [lease.timeline, lease.incarnation, f"{lease.group.id} 0 {lease.token} aa 100 4 0 0"]
    (answer,) = await replay.redis.execute_command("FCALL", "hr_push", 1, key, *args)
    assert answer.startswith(b"HR_INVALID")
    assert (await replay.group(lease.group.id) or {})["pushed"] == 0


async def test_a_payload_that_no_call_follows_is_gone_in_time(replay: ReplayClient) -> None:
    await enqueue(replay, [0])
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    monitor = replay.redis.pipeline(transaction=False)
    key = f"hr:{{{replay.run_id}}}:{lease.incarnation}:p:aa"
    monitor.set(key, b"x", nx=True, ex=60)
    await monitor.execute()
    assert 0 < await replay.redis.ttl(key) <= 60


async def test_repeats_change_nothing(replay: ReplayClient) -> None:
    await enqueue(replay, range(6))
    replica = await healthy_replica(replay)
    await generate(replay, replica)
    timeline = (await replay.state()).timeline
    batch = await reserve(replay, 0)
    await replay.commit(1, timeline)
    await replay.close(timeline)
    before = await contents(replay)
    await replay.commit(1, timeline)
    await replay.commit(0, timeline)
    await replay.close(timeline)
    assert (await replay.rewind(0, timeline)).next_step == 1  # this timeline has begun: a repeat of that rewind
    state = await replay.state()
    assert await replay.restore(0, nonce(), state.incarnation, enqueued=-1) == state
    assert await enqueue(replay, range(6)) == 0
    await replay.deregister("nobody")
    await replay.drop_validation(timeline)
    assert await contents(replay) == before
    with pytest.raises(InvalidCall, match="not held"):
        await replay.read([batch.trajectories[0].key])
    with pytest.raises(InvalidCall, match="not held"):
        await replay.read_groups(batch.groups)


async def test_a_repeated_score_changes_nothing(replay: ReplayClient) -> None:
    await enqueue(replay, [0])
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    await push_all(replay, lease)
    jobs = await replay.take_scoring("scorer", 64)
    await replay.score(jobs[0], Score("SCORED", 1.0))
    await replay.score(jobs[0], Score("SCORED", 0.0))
    await replay.score(jobs[1], Score("SCORED", 1.0))
    before = await contents(replay)
    await replay.score(jobs[1], Score("SCORED", 0.0))
    assert await contents(replay) == before
    found = await replay.trajectory(lease.group.id, 1)
    assert found is not None
    assert found[1] is not None
    assert found[1].reward == 1.0


async def test_released_scoring_is_taken_again_at_no_cost(replay: ReplayClient) -> None:
    await enqueue(replay, [0])
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    await push_all(replay, lease)
    for _ in range(5):
        (old, _) = await replay.take_scoring("scorer", 64)
        await replay.release_scoring()
    with pytest.raises(LeaseLost):
        await replay.score(old, Score("SCORED", 1.0))
    assert [job.scoring_attempt for job in await replay.take_scoring("scorer", 64)] == [1, 1]


async def test_a_record_that_can_not_be_read_fails_its_group(replay: ReplayClient) -> None:
    state = await replay.state()
    key = f"hr:{{{replay.run_id}}}"
    await replay.redis.set(f"{key}:{state.incarnation}:d:aa", msgpack.packb({"schema": 1}), ex=60)
    args = [state.timeline, state.incarnation, 0, "bad", "train", 0, 2, 1000, "aa"]
    assert await replay.redis.execute_command("FCALL", "hr_enqueue", 1, key, *args) == 1
    assert await replay.lease(await healthy_replica(replay), 4) == []
    ((letter),) = (await replay.stats())["failed"]
    assert letter["group"] == "bad"
    assert "missing" in letter["reason"]


async def test_deregister_gives_back_and_leaves(replay: ReplayClient) -> None:
    await enqueue(replay, range(4))
    replica = await healthy_replica(replay)
    (lease, *_) = await replay.lease(replica, 3)
    await replay.deregister(replica)
    assert (await replay.state()).counts == {"queued": 1, "open": 3}
    assert (await replay.stats())["leases"] == 3  # by their deadlines
    assert await replay.replicas() == []
    assert (await replay.group(lease.group.id) or {})["failures"] == 0
    assert (await replay.heartbeat(replica, [lease.token])).lost == (lease.token,)


async def test_epoch_from_announcement_to_done(replay: ReplayClient) -> None:
    assert await replay.epoch() is None
    timeline = (await replay.state()).timeline
    one, two, mute = "one", "two", "mute"
    for replica in (one, two, mute):
        await replay.register(replica, {"pid": 1})
    assert (await replay.heartbeat(one, [])).epoch is None
    epoch = await replay.open_epoch("e1", 4, timeline, {"port": 1, "names": ["w"]})
    assert (epoch.state, epoch.members, epoch.rendezvous) == (
        "announced",
        (mute, one, two),
        {"port": 1, "names": ["w"]},
    )
    assert await replay.open_epoch("e1", 4, timeline, {}) == epoch
    assert (await replay.heartbeat(one, [])).epoch == epoch
    for replica in (one, two, two):
        await replay.acknowledge(replica, "e1")
    with pytest.raises(InvalidCall, match="not begun"):
        await replay.end_epoch("e1", aborted=False)
    epoch = await replay.begin_epoch("e1", {"port": 2})
    assert (epoch.state, epoch.members, epoch.acknowledged) == ("transfer", (one, two), (one, two))
    assert await replay.begin_epoch("e1", {"port": 3}) == epoch
    assert (await replay.heartbeat(one, [])).epoch == epoch
    with pytest.raises(Fenced):
        await replay.acknowledge(mute, "e1")
    with pytest.raises(Fenced):
        await replay.verify(mute, "e1", 0.0, 1e-3)
    assert await replay.verify(one, "e1", 1e-5, 1e-3)
    await replay.refuse(two, "e1", "out of memory")
    epoch = await replay.end_epoch("e1", aborted=False)
    assert (epoch.state, epoch.verified, epoch.refused) == ("done", (one,), {two: "out of memory"})
    assert await replay.end_epoch("e1", aborted=True) == epoch
    states = {replica.id: (replica.state, replica.version) for replica in await replay.replicas()}
    assert states == {one: ("HEALTHY", 4), two: ("STALE", -1), mute: ("STALE", -1)}
    with pytest.raises(Fenced):
        await replay.acknowledge(one, "e0")
    # a rewind ends the epoch and every replica's health
    await rewind(replay, 0)
    with pytest.raises(WrongTimeline):
        await replay.end_epoch("e1", aborted=True)
    assert {replica.state for replica in await replay.replicas()} == {"STALE"}


async def test_from_the_transfer_on_nobody_is_healthy_until_it_verifies(replay: ReplayClient) -> None:
    await enqueue(replay, range(8))
    member, absent = nonce(), nonce()
    for replica in (member, absent):
        await replay.register(replica, {})
    await refit(replay, 0, [member, absent])
    timeline = (await replay.state()).timeline
    await replay.open_epoch("next", 0, timeline, {})
    await replay.acknowledge(member, "next")
    assert len(await replay.lease(absent, 1)) == 1
    await replay.begin_epoch("next", {})
    for replica in (member, absent):
        with pytest.raises(NotVerified):
            await replay.lease(replica, 1)
    await replay.verify(member, "next", 0.0, 1e-3)
    assert len(await replay.lease(member, 1)) == 1
    await replay.end_epoch("next", aborted=False)
    with pytest.raises(NotVerified):
        await replay.lease(absent, 1)


async def test_validation_is_dropped_with_its_leases(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    groups = [make_group(i, n=1, lane="validation", group_id=f"v{i}") for i in range(600)]
    assert await replay.enqueue(groups, timeline) == 600
    assert await replay.enqueue(groups, timeline) == 0
    replica = await healthy_replica(replay)
    pushed, leased = await replay.lease(replica, 2)
    await replay.push(pushed, make_trajectory(pushed, 0))
    await score_all(replay)
    await replay.drop_validation(timeline)
    stats = await replay.stats()
    assert {k: v for k, v in stats["counts"]["validation"].items() if v} == {"evaluated": 1, "unused": 599}
    assert (stats["bytes"], stats["leases"]) == (0, 0)
    with pytest.raises(LeaseLost):
        await replay.push(leased, make_trajectory(leased, 0))
    with pytest.raises(InvalidCall, match="validation lane"):
        await replay.evaluated(["v0"])
    assert await replay.enqueue(groups[:1], timeline) == 1
    await rewind(replay, 0)
    assert await replay.lease(await healthy_replica(replay), 2) == []


async def test_restore_starts_from_the_checkpoint_alone(replay: ReplayClient) -> None:
    await enqueue(replay, range(8))
    replica = await healthy_replica(replay)
    await generate(replay, replica)
    await reserve(replay, 0)
    with pytest.raises(ReplayError, match="use restore"):
        await rewind(replay, 5)
    old = (await replay.state()).incarnation
    state = await replay.restore(5, nonce(), nonce(), enqueued=11)
    assert [key async for key in replay.redis.scan_iter(match=f"hr:{{{replay.run_id}}}:{old}:*")] == []
    # those the ledger does not hold come again, then new ones
    assert await replay.enqueue([make_group(10), make_group(11)], state.timeline) == 0
    assert await replay.enqueue([make_group(10), make_group(11)], state.timeline, refill=True) == 2
    assert await replay.enqueue([make_group(12)], state.timeline) == 1
    counts = (await replay.state()).counts
    assert {name: count for name, count in counts.items() if count} == {"trained": 10, "queued": 3}
    replica = await healthy_replica(replay, version=5)
    await generate(replay, replica)
    assert (await reserve(replay, 5)).groups == ("e0-train-10", "e0-train-11")


async def test_leftovers_come_back_when_the_run_goes_on(replay: ReplayClient) -> None:
    await enqueue(replay, range(3))
    timeline = (await replay.state()).timeline
    await replay.close(timeline)
    replica = await healthy_replica(replay)
    await generate(replay, replica)
    await reserve(replay, 0)
    await replay.reserve(1, timeline)
    with pytest.raises(InvalidCall, match="closed"):
        await replay.enqueue([make_group(3)], timeline)
    state = await rewind(replay, 1)
    assert (state.closed, state.counts["queued"], state.counts["unused"]) == (False, 1, 0)
    await enqueue(replay, [3])
    await refit(replay, 1, [replica])
    await generate(replay, replica)
    assert isinstance(await replay.reserve(1, state.timeline), Reservation)


async def test_two_trainers_can_not_both_go_on(replay: ReplayClient, redis_url: str) -> None:
    other = await ReplayClient.connect(redis_url, replay.run_id)
    first, second = await rewind(replay, 0), await rewind(other, 0)
    with pytest.raises(WrongTimeline):
        await replay.reserve(0, first.timeline)
    await other.close(second.timeline)
    await other.aclose()


async def test_connect_says_what_is_missing(redis_url: str, replay: ReplayClient) -> None:
    with pytest.raises(ReplayUnavailable, match="no run nowhere"):
        await ReplayClient.connect(redis_url, "nowhere", timeout_s=0.2)
    with pytest.raises(ReplayUnavailable, match="can't be reached"):
        await ReplayClient.connect("redis://127.0.0.1:1/0", "x", timeout_s=0.2)
    with pytest.raises(ConfigError, match="can't be used"):
        await ReplayClient.connect("http://127.0.0.1", "x", timeout_s=0.2)
    client = await ReplayClient.connect(redis_url)
    assert client.run_id == replay.run_id
    await client.aclose()


async def test_a_wake_up_ends_a_wait(replay: ReplayClient, redis_url: str, limits: Limits) -> None:
    """Waits end by the call that makes them worthwhile; a second's poll alone would make these four take four."""
    other = ReplayClient(open_redis(redis_url), replay.run_id)
    await other.open_run(limits)
    for wait in (other.wait_work, other.wait_ready, other.wait_scoring, other.wait_epoch):
        await wait(5.0)  # opens the subscription and drains what it brought
        await wait(0.01)
    replica = nonce()

    async def woken(channel: str) -> None:
        await asyncio.wait_for(other._wakeups._events[channel].wait(), 30)
        other._wakeups._events[channel].clear()

    await replay.register(replica, {})
    await woken("epoch")
    await refit(replay, 0, [replica])
    await enqueue(replay, [0])
    await woken("work")
    (lease,) = await replay.lease(replica, 1)
    await push_all(replay, lease)
    await woken("scoring")
    await score_all(replay)
    await woken("ready")
    await other.aclose()
