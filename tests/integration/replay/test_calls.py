"""Repeats, wrong arguments and malformed bytes: a repeat changes nothing, and neither does a refusal."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest
from redis.exceptions import ResponseError

from headrace.base.errors import CodecError, InvalidCall, LeaseLost
from headrace.records.score import SCORE_BYTES, Score
from headrace.records.trajectory import Trajectory
from headrace.replay import Lease, Limits, ReplayClient
from headrace.replay.connection import function_name
from headrace.replay.leases import CARRIED_BYTES
from headrace_services.replay import library
from tests.support.buffer import (
    begin,
    contents,
    enqueue,
    generate,
    group_of,
    healthy_replica,
    lease_one,
    make_trajectory,
    nonce,
    payloads,
    push_all,
    refusals,
    reserve,
    rewind,
    score_all,
    tighten,
)

FUNCTIONS = library.built_in().transitions
GARBAGE: list[list[bytes]] = [
    [b""],
    [b"\x00\xff\n"] * 3,
    [b"-1", b"nan", b"inf", b"1e999"],
    [b"9" * 40] * 5,
    [b"x" * 100_000] * 6,
    [b"{run}", b"*", b"?", b"a b", b"..", b"--", b"0x10"],
    [b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b"10", b"11", b"12"],
    [b"\x80"],
    [msgspec.msgpack.encode([1, "a", {}])],
    [msgspec.msgpack.encode({"timeline": 7}), b"x"],
    [b"\x91" * 100_000],
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0.5,
    2**63,
    float("nan"),
    "",
    "a b",
    "{run}",
    "x" * 100_000,
    f"{10**25}-2",
    f"2-{10**25}",
    [],
    [[]],
    [{}],
    {"a": 1},
]
# What may be answered without an error: nothing was asked for, nothing was known, or each entry was refused by itself.
HARMLESS = (None, 0, [])


def text_of(function: str) -> str:
    return library.built_in().text(function)


def push_entry(lease: Lease, index: int, name: str, size: int) -> dict[str, Any]:
    """What `push` is told of a trajectory of 4 tokens besides its payload, staged or carried under the nonce `name`."""
    lasting = {"length": 4, "oldest": 0, "newest": 0}
    return {"group": lease.group.id, "index": index, "token": lease.token, "nonce": name, "bytes": size, **lasting}


def in_columns(*entries: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [entry[name] for entry in entries] for name in entries[0]}


async def test_garbage_arguments_get_a_typed_error_and_change_nothing(replay: ReplayClient) -> None:
    replica = await begin(replay, 6)
    leases = await replay.lease(replica, 3)
    await push_all(replay, leases[0])
    await replay.take_scoring({"math": 1})
    before = await contents(replay)
    for function in sorted({*FUNCTIONS} - {"open_run"}):
        for args in GARBAGE:
            command = ("FCALL", function_name(function), 1, f"hr:{{{replay.run_id}}}", *args)
            pipe = replay.redis.pipeline(transaction=False)
            (reply,) = await pipe.execute_command(*command).execute(raise_on_error=False)
            if isinstance(reply, ResponseError):
                assert str(reply).startswith("HR_"), (function, args, reply)
            else:
                assert reply in HARMLESS or reply[0] == b"DEAD", (function, args, reply)
        assert await contents(replay) == before, function


@pytest.mark.parametrize("function", sorted({*FUNCTIONS} - {"open_run"}))
async def test_garbage_in_an_argument_is_a_typed_error_and_changes_nothing(replay: ReplayClient, function: str) -> None:
    replica = await begin(replay, 6)
    (lease, *_) = await replay.lease(replica, 3)
    good: dict[str, Any] = {
        **{"timeline": lease.timeline, "incarnation": lease.incarnation, "replica": replica, "group": lease.group.id},
        **{"token": lease.token, "epoch": "aa", "step": 0, "version": 0, "nonce": "aa", "index": 0, "how": "failed"},
    }
    spec = re.search(r"register\w*\('\w+', \{(.*?)\}, function", text_of(function), re.DOTALL)
    names = re.findall(r"(\w+) =", spec[1]) if spec else []

    async def call(arguments: dict[str, Any]) -> Any:
        command = ("FCALL", function_name(function), 1, f"hr:{{{replay.run_id}}}", msgspec.msgpack.encode(arguments))
        (reply,) = await replay.redis.pipeline(False).execute_command(*command).execute(raise_on_error=False)
        return reply

    whole = {name: good.get(name, 1) for name in names}
    before = await contents(replay)
    for wrong in (whole | {"more": 1}, *({**whole, name: {"a": {}}} for name in names)):
        assert re.match(r"HR_(INVALID|TIMELINE|FENCED) ", str(await call(wrong))), wrong
    for missing in names:
        reply = await call({name: value for name, value in whole.items() if name != missing})
        assert str(reply).startswith("HR_INVALID "), missing
    assert await contents(replay) == before
    for name in names:
        for value in VALUES:
            reply = await call({**whole, name: value})
            assert not isinstance(reply, ResponseError) or str(reply).startswith("HR_"), (name, value, reply)


async def test_wrong_keys_are_refused(replay: ReplayClient) -> None:
    for keys in ([], ["hr:{a}", "hr:{b}"], ["other"], ["hr:{*}"], [f"hr:{{{replay.run_id}}}:events"]):
        for function in ("state", "push", "open_run"):
            with pytest.raises(ResponseError, match=r"^HR_(INVALID|UNAVAILABLE) "):
                await replay.redis.execute_command("FCALL", function_name(function), len(keys), *keys)
    with pytest.raises(ResponseError, match=r"^HR_UNAVAILABLE .*no run nowhere"):
        await replay.redis.execute_command("FCALL", function_name("state"), 1, "hr:{nowhere}")


async def test_limits_are_checked(replay: ReplayClient, limits: Limits) -> None:
    before = await contents(replay)
    for changes in ({"prompts_per_step": 0}, {"max_age": -1}, {"max_bytes": 0}):
        with pytest.raises(InvalidCall, match=next(iter(changes))):
            await tighten(replay, limits, **changes)
    with pytest.raises(InvalidCall, match=r'staleness_policy.*"loose".*mask'):
        await tighten(replay, limits, staleness_policy="loose")  # type: ignore[arg-type]
    assert await contents(replay) == before


async def test_malformed_trajectories_do_not_get_past_the_client(replay: ReplayClient) -> None:
    await enqueue(replay, [0, 1])
    first, second = await replay.lease(await healthy_replica(replay), 2)
    before = await contents(replay)
    good = make_trajectory(first, 0)
    with pytest.raises(CodecError, match="logprobs has 2 entries"):
        await replay.push(first, msgspec.structs.replace(good, logprobs=good.logprobs[:2]))
    with pytest.raises(InvalidCall, match="under the lease of"):
        await replay.push(second, make_trajectory(first, 0))
    assert await contents(replay) == before


async def test_a_refused_push_leaves_nothing_behind(replay: ReplayClient) -> None:
    replica = await begin(replay, 2)
    _, gone = await replay.lease(replica, 2)
    await replay.release(gone, "drain", failed=False)
    before = await contents(replay)
    # one travels in the call, one is too large for that and staged before it
    large = msgspec.structs.replace(make_trajectory(gone, 1), text="7" * CARRIED_BYTES)
    errors = await replay.push_many([(gone, make_trajectory(gone, 0)), (gone, large)])
    assert [type(error) for error in errors] == [LeaseLost, LeaseLost]
    assert await contents(replay) == before
    assert (await refusals(replay)) == {"HR_LEASE_LOST": 2}


async def test_one_bad_entry_of_a_push_does_not_take_the_others_with_it(replay: ReplayClient) -> None:
    replica = await begin(replay, 2)
    good, gone = await replay.lease(replica, 2)
    await replay.release(gone, "drain", failed=False)
    torn = msgspec.structs.replace(make_trajectory(good, 0), loss_mask=np.ones(3, dtype=np.uint8))
    large = msgspec.structs.replace(make_trajectory(good, 1), text="7" * CARRIED_BYTES)
    good_one, gone_one = make_trajectory(good, 0), make_trajectory(gone, 0)
    for _ in range(2):  # what came in stays, and is known when it comes again
        errors = await replay.push_many(
            [(good, torn), (good, good_one), (gone, gone_one), (gone, good_one), (good, large)]
        )
        assert [type(error) for error in errors] == [CodecError, type(None), LeaseLost, InvalidCall, type(None)]
    assert (await refusals(replay)) == {"HR_LEASE_LOST": 2}
    first, second = [await replay.trajectory(good.group.id, index) for index in range(2)]
    assert first is not None
    assert second is not None
    assert (first[0].text, second[0].text) == ("7", large.text)


@pytest.mark.parametrize("staged", [False, True], ids=["carried", "staged"])
async def test_a_push_delivered_twice_keeps_the_first_payload(replay: ReplayClient, staged: bool) -> None:
    """Whole repeats of the client (a new nonce), and repeats of its bytes by the connection (the same nonce), at any time; of a payload
    that the call carries, and of one that was staged before it."""
    (lease,) = await replay.lease(await begin(replay, 2), 1)
    state = await replay.state()
    key = f"hr:{{{replay.run_id}}}"
    payload = f"{key}:{state.incarnation}:p:"
    trajectories = [make_trajectory(lease, index) for index in range(2)]

    async def deliver(index: int, name: str, timeline: str = state.timeline) -> bytes:
        data = trajectories[index].encode()
        if staged:
            await replay.redis.set(payload + name, data, nx=True, ex=60)
        entry = push_entry(lease, index, name, len(data))
        fence = {"timeline": timeline, "incarnation": state.incarnation}
        (answer,) = await replay._connection.call("push", b"" if staged else data, **fence, **in_columns(entry))
        return bytes(answer)

    assert await deliver(0, "aa") == b""
    assert await deliver(1, "bb") == b""
    before = await contents(replay)
    for index, name in ((0, "aa"), (1, "bb"), (0, "cc"), (1, "dd")):
        assert await deliver(index, name) == b""
    assert await contents(replay) == before
    await score_all(replay)
    await rewind(replay, 0)
    before = await contents(replay)
    for name in ("aa", "ee"):  # the group is still the one of this lease
        assert await deliver(0, name) == b""
    assert await contents(replay) == before
    assert await replay.redis.ttl(payload + "aa") == -1
    assert await replay.redis.exists(payload + "ee", payload + "cc") == 0
    found = await replay.trajectory(lease.group.id, 0)
    assert found is not None


@pytest.mark.parametrize("function", ["push", "save"])
@pytest.mark.parametrize("payload", [b"", b"mine"], ids=["staged", "carried"])
async def test_a_call_leaves_another_ones_payload_alone(replay: ReplayClient, function: str, payload: bytes) -> None:
    victim, mine, gone = await replay.lease(await begin(replay, 3), 3)
    await replay.release(gone, "drain", failed=False)
    await replay.push(victim, make_trajectory(victim, 0))
    await replay.save(victim, make_trajectory(victim, 1))
    held = await payloads(replay)
    assert len(held) == 2
    state = await replay.state()
    good = {"timeline": state.timeline, "incarnation": state.incarnation}
    ended = {"timeline": "ended", "incarnation": state.incarnation}
    for key in held:
        name = key.decode().rpartition(":p:")[2]
        for fence, lease in ((good, mine), (good, gone), (ended, mine)):
            entry = push_entry(lease, 0, name, 4)
            (answer,) = await replay._connection.call(function, payload, **fence, **in_columns(entry))
            assert answer.startswith((b"HR_UNSTAGED", b"HR_INVALID", b"HR_LEASE_LOST", b"HR_TIMELINE")), answer
    assert await payloads(replay) == held
    assert [Trajectory.decode(data).group_id for data in await replay.redis.mget(held)] == [victim.group.id] * 2
    assert await replay.redis.ttl(held[0]) == -1


async def test_a_malformed_entry_refuses_the_call_and_changes_nothing(replay: ReplayClient) -> None:
    replica = await begin(replay, 2)
    done, lease = await replay.lease(replica, 2)
    await push_all(replay, done)
    (job, *_) = await replay.take_scoring({"math": 1})
    before = await contents(replay)
    fence = {"timeline": lease.timeline, "incarnation": lease.incarnation}
    data = make_trajectory(lease, 0).encode()
    good = push_entry(lease, 0, "aa", len(data))
    one = push_entry(lease, 1, "aa", 1)
    for bad, said in (
        ({"index": "1"}, 'index is "1", not a whole number'),
        ({"index": 0.5}, 'index is "0.5"'),
        ({"index": -1}, 'index is "-1"'),
        ({"index": 10**16}, 'index is "1e+16"'),
        ({"length": 0}, "length is 0"),
        ({"group": "a b"}, 'group is "a b"'),
        ({"token": 7}, 'token is "7", not text'),
        ({"bytes": 7}, "has 1 bytes, not 7"),
    ):
        with pytest.raises(InvalidCall, match=re.escape(said)):
            await replay._connection.call("push", data, b"x", **fence, **in_columns(good, one | bad))
    with pytest.raises(InvalidCall, match=r"1 payloads.*2 entries"):
        await replay._connection.call("push", data, **fence, **in_columns(good, one))
    with pytest.raises(InvalidCall, match=r"1 payloads.*0 entries"):
        await replay._connection.call("push", data, **fence, **in_columns(good) | {"newest": []})
    score = {"group": job.group.id, "index": job.trajectory.index, "token": job.token, "status": "FAILED"}
    for record in (b"", b"\xc1", msgspec.msgpack.encode({"status": "FAILED"}), msgspec.msgpack.encode({"message": 7})):
        with pytest.raises(InvalidCall, match="what went wrong"):
            await replay._connection.call("score", record, scores=[score])
    for bad, said in (
        ({"status": "SCORED"}, 'reward is "nil", not a finite number'),
        ({"status": "SCORED", "reward": float("nan")}, "not a finite number"),
        ({"reward": 0.0}, 'status FAILED with reward "0" and build "nil"; only SCORED has them'),
        ({"status": "LOST"}, 'status is "LOST", not one of SCORED, FAILED'),
    ):
        with pytest.raises(InvalidCall, match=re.escape(said)):
            await replay._connection.call("score", Score("FAILED").encode(), scores=[{**score, **bad}])
    with pytest.raises(InvalidCall, match=f"bytes, more than {SCORE_BYTES}"):
        await replay._connection.call("score", msgspec.msgpack.encode({"message": "x" * SCORE_BYTES}), scores=[score])
    assert await contents(replay) == before
    await replay.score(job, Score("FAILED", message="the environment fell over"))


async def test_a_push_without_its_payload_is_refused(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    fence = {"timeline": lease.timeline, "incarnation": lease.incarnation}
    (answer,) = await replay._connection.call("push", b"", **fence, **in_columns(push_entry(lease, 0, "aa", 100)))
    assert answer.startswith(b"HR_UNSTAGED")
    assert (await group_of(replay, lease))["pushed"] == 0


@pytest.mark.parametrize("function", ["push", "save"])
async def test_a_staged_payload_that_is_gone_is_sent_again(
    replay: ReplayClient, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """The server lost it, or its time ran out, before the call that makes it permanent."""
    await enqueue(replay, [0])
    replica = await healthy_replica(replay)
    (lease,) = await replay.lease(replica, 1)
    trajectory = msgspec.structs.replace(make_trajectory(lease, 0), text="7" * 2 * CARRIED_BYTES)
    pipeline = replay._connection.pipeline

    async def lossy(commands: list[tuple[Any, ...]]) -> list[Any]:
        for command in commands:
            if command[0] == b"SET":
                commands = [*commands[:-1], ("UNLINK", command[1]), commands[-1]]
        return await pipeline(commands)

    monkeypatch.setattr(replay._connection, "pipeline", lossy)
    await getattr(replay, function)(lease, trajectory)
    monkeypatch.undo()
    if function == "push":
        (held, _) = await replay.trajectory(lease.group.id, 0) or (None, None)
    else:
        await replay.release(lease, "leaving", failed=False)
        (again,) = await replay.lease(replica, 1)
        held = again.prefixes[0]
    assert held
    assert held.text == trajectory.text
    assert await refusals(replay) == {"HR_UNSTAGED": 1}


async def test_a_payload_that_no_call_follows_is_gone_in_time(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    monitor = replay.redis.pipeline(transaction=False)
    key = f"hr:{{{replay.run_id}}}:{lease.incarnation}:p:aa"
    monitor.set(key, b"x", nx=True, ex=60)
    await monitor.execute()
    assert 0 < await replay.redis.ttl(key) <= 60


async def test_repeats_change_nothing(replay: ReplayClient) -> None:
    replica = await begin(replay, 6)
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
    await replay.drop_validation(timeline, 0)
    assert await contents(replay) == before
    with pytest.raises(InvalidCall, match="no longer held"):
        await replay.read([batch.trajectories[0].key])
    with pytest.raises(InvalidCall, match="not held"):
        await replay.read_groups(batch.groups)


async def test_a_repeated_score_changes_nothing(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    await push_all(replay, lease)
    jobs = await replay.take_scoring({"math": 64})
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
    lease = await lease_one(replay)
    await push_all(replay, lease)
    for _ in range(5):
        (old, _) = await replay.take_scoring({"math": 64})
        await replay.release_scoring()
    with pytest.raises(LeaseLost):
        await replay.score(old, Score("SCORED", 1.0))
    assert [job.scoring_attempt for job in await replay.take_scoring({"math": 64})] == [1, 1]


async def test_a_record_that_can_not_be_read_fails_its_group(replay: ReplayClient) -> None:
    state = await replay.state()
    fence = {"timeline": state.timeline, "incarnation": state.incarnation}
    group = {"id": "bad", "lane": "train", "order": 0, "env": "math", "n": 2, "worst": 1000, "nonce": "aa"}
    record = msgspec.msgpack.encode({"schema": 1})
    assert await replay._connection.call("enqueue", record, **fence, refill=False, validation=0, groups=[group]) == 1
    assert await replay.lease(await healthy_replica(replay), 4) == []
    ((letter),) = (await replay.stats())["failed"]
    assert letter["group"] == "bad"
    assert "missing" in letter["reason"]
