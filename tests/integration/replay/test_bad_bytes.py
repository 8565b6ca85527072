"""Bytes in the buffer that nobody can read: they are shown for what they are, where they are, and are in nobody else's way."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.base.errors import CodecError, InvalidCall
from headrace.cli.status import show
from headrace.records.score import Score
from headrace.replay import ReplayClient
from headrace.run import export
from headrace.run.lineage import LineageFiles
from headrace_services.refit.rendezvous import Announcement
from headrace_services.replay.http import build_app
from tests.support.buffer import contents, generate, healthy_replica, make_group, nonce, push_all


async def overwrite(replay: ReplayClient, key: str) -> None:
    await replay.redis.set(key, b"\xc1")


async def test_an_evaluated_group_that_cant_be_read_has_failed_alone(replay: ReplayClient) -> None:
    ids = [f"e0-validation-{order}" for order in range(3)]
    await replay.enqueue([make_group(order, lane="validation") for order in range(3)], (await replay.state()).timeline)
    await generate(replay, await healthy_replica(replay))
    group = await replay.group(ids[1])
    assert group is not None
    keys = [trajectory["key"] for trajectory in group["trajectories"]]
    await overwrite(replay, keys[0])
    (bad, good) = await replay.read_each(keys)
    assert isinstance(bad, CodecError)
    assert not isinstance(good, CodecError)
    done, failed, unknown = await replay.read_evaluated(ids)
    assert ([one.group.id for one in done], unknown) == ([ids[0], ids[2]], [])
    assert list(failed) == [ids[1]]
    assert str(bad) in failed[ids[1]]


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"url": b"\xff"}, "not a msgpack map"),
        ({"load": float("nan")}, 'load is "nan", not a finite number'),
        ({"pid": [1]}, "pid is"),
        ({7: "seven"}, 'a name in info is "7", not text'),
        (["here"], 'a name in info is "1", not text'),
        (b"\xc1", "not a msgpack map"),
        (7, 'info is "7", not a map'),
    ],
    ids=["bytes", "nan", "list", "number as a name", "no map", "binary", "number"],
)
async def test_a_replica_that_describes_itself_badly_is_refused(replay: ReplayClient, info: Any, says: str) -> None:
    before = await contents(replay)
    with pytest.raises(InvalidCall, match=says):
        await replay.register("liar", info)
    assert await contents(replay) == before


async def test_an_unreadable_replica_is_shown_as_such_and_hides_no_other(replay: ReplayClient) -> None:
    """An earlier build took any bytes."""
    good = await healthy_replica(replay)
    prefix = f"hr:{{{replay.run_id}}}:{(await replay.state()).incarnation}:r:"
    stored = {
        "empty": b"",
        "torn": b"\x81\xa3url",
        "none": b"\xc1",
        "list": msgspec.msgpack.encode([1]),
        "nested": msgspec.msgpack.encode({"pid": [1]}),
        "infinite": msgspec.msgpack.encode({"load": float("inf")}),
        "binary": msgspec.msgpack.encode({"url": b"\xff"}),
        "garbled": b"\x81\xa3url\xa1\xff",
    }
    for name, data in stored.items():
        await replay.register(name, {})
        await replay.redis.hset(f"{prefix}{name}", "info", data)
    fleet = {replica.id: replica.info for replica in await replay.replicas()}
    assert fleet.pop(good) == {"host": "here"}
    assert fleet.keys() == stored.keys()
    assert all(list(info) == ["unreadable"] for info in fleet.values()), fleet
    stats = await replay.stats()
    assert msgspec.json.decode(msgspec.json.encode(stats["replicas"])) == stats["replicas"]
    out = io.StringIO()
    show(out, await replay.state(), await replay.replicas(), [], await replay.bias(), None)
    assert out.getvalue().count("can't be read (") == len(stored)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x01",
        msgspec.msgpack.encode([1]),
        b"\x81",
        b"\x81\xa1a",
        b"\x81\xa1a\xc1",
        b"\x80\x80",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xa1\xff",
        b"\x81\xa1a\xcb\x00",
    ],
)
async def test_a_rendezvous_that_is_no_msgpack_is_refused(replay: ReplayClient, packed: bytes) -> None:
    timeline = (await replay.state()).timeline
    await replay.open_epoch("good", 0, timeline, {})
    before = await contents(replay)
    with pytest.raises(InvalidCall, match=r"rendezvous.*msgpack"):
        await replay._connection.call("open_epoch", packed, epoch=nonce(), version=0, timeline=timeline)
    with pytest.raises(InvalidCall, match=r"rendezvous.*msgpack"):
        await replay._connection.call(
            "begin_epoch", packed, epoch="good", logprobs=[-1.0], tolerance=1.0, mean_tolerance=1.0
        )
    assert await contents(replay) == before


@pytest.mark.parametrize(
    "value",
    [
        *({"a": item} for item in (None, True, 0, -1, 127, 128, -33, 2**16, 2**63, -(2**63), 0.5, b"\xff" * 9)),
        *({"a": ["b"] * size, "c" * size: {str(i): i for i in range(size)}} for size in (0, 15, 16, 300, 70_000)),
        *({"a" * size: b"\xff" * size} for size in (31, 32, 255, 256, 70_000)),
        {"ä": {"日本": [{}, [], {"": b""}]}},
    ],
    ids=lambda value: f"{value!r:.40}",
)
async def test_any_msgpack_map_is_a_rendezvous(replay: ReplayClient, value: Any) -> None:
    epoch = await replay.open_epoch("good", 0, (await replay.state()).timeline, value)
    assert epoch.rendezvous == value


async def test_an_unreadable_rendezvous_is_refused_by_its_readers_alone(replay: ReplayClient) -> None:
    replica = await healthy_replica(replay)
    state = await replay.state()
    await replay.open_epoch("bad", 1, state.timeline, {})
    await replay.redis.hset(f"hr:{{{replay.run_id}}}:{state.incarnation}:epoch", "rendezvous", b"\xc1")
    for epoch in (await replay.epoch(), (await replay.heartbeat(replica, [])).epoch):
        assert epoch is not None
        assert (epoch.id, epoch.rendezvous) == ("bad", b"\xc1")
        with pytest.raises(CodecError, match="announcement: "):
            Announcement.decode(epoch.rendezvous)
    await replay.stats()


ODD: Any = {
    "bytes": b"\xff\x00",
    "nested": [{"image": b"\x89PNG"}, (1, 2), [], {}, None, True, 2**63],
    "numbers": [float("inf"), float("-inf"), 0.5],
    "keys": {1: "one", b"\xff": {"two": b""}, (3, 4): 3.5},
    "names of tags": {"__bytes__": "no base64", "__map__": 7, "more": {"__float__": "x"}},
}


async def test_values_that_json_lacks_are_exported_and_come_back_exactly(replay: ReplayClient, tmp_path: Path) -> None:
    group = msgspec.structs.replace(make_group(0), extra_env_info=ODD, messages=({"role": "user", "content": b"\xff"},))
    await replay.enqueue([group], (await replay.state()).timeline)
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    await push_all(replay, lease)
    jobs = await replay.take_scoring({"math": 2})
    scores = [Score("SCORED", 1.0, metadata={"odd": ODD}), Score("SCORED", 0.0, metadata={"nan": float("nan")})]
    assert await replay.score_many(list(zip(jobs, scores, strict=True))) == [None, None]

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = [line async for line in export.lines(replay, ["ready"])]
    for line in lines:
        json.loads(line, parse_constant=no_constant)
    back = [export.from_line(line) for line in lines]
    assert [each.group.encode() for each in back] == [jobs[0].group.encode()] * 2
    assert [each.score.encode() for each in back if each.score] == [score.encode() for score in scores]

    async def ready() -> None:
        return None

    app = build_app(replay, ready, LineageFiles(tmp_path))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http:
        exported = await http.get("/v1/export", params={"state": "ready"})
        assert exported.text.splitlines() == lines
        for page in (f"/v1/groups/{group.id}", f"/v1/trajectories/{group.id}/0", f"/v1/trajectories/{group.id}/1"):
            shown = await http.get(page)
            assert shown.status_code == 200, shown.text
            json.loads(shown.text, parse_constant=no_constant)
