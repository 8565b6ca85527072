"""The server of the buffer and the service around it: kills, restarts, refusals to start, and the HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from redis import exceptions as redis_errors
from redis.asyncio import Redis

from headrace.base.errors import ConfigError, HeadraceError, ReplayDenied, ReplayUnavailable, ServiceError
from headrace.config import Config
from headrace.records.score import Score
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.replay import library, main
from headrace_services.replay.embedded import EmbeddedServer
from headrace_services.replay.library import check_server, risks
from headrace_services.replay.main import _kill_if_hung, make_limits
from tests.support.buffer import (
    begin,
    contents,
    enqueue,
    generate,
    healthy_replica,
    make_trajectory,
    push_all,
    reserve,
    score_all,
    total,
)
from tests.support.ports import free_port
from tests.support.processes import is_running
from tests.support.replay_service import config_of, serving
from tests.support.waiting import eventually


@pytest.fixture
async def server(tmp_path: Path, redis_binary: str | None) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "replay", "127.0.0.1", free_port(), "always", binary=redis_binary)
    await server.start()
    async with open_redis(server.url) as redis:
        await library.load(redis)
    yield server
    await server.stop()


async def test_law_1_conservation_across_a_servers_sigkill(server: EmbeddedServer, run_id: str, limits: Limits) -> None:
    """Killed in every state of a group and started again on its append-only file: nothing is lost, every token still counts."""
    replay = ReplayClient(open_redis(server.url), run_id)
    await replay.open_run(limits)
    replica = await begin(replay, 8)
    await generate(replay, replica, most=2)
    batch = await reserve(replay, 0)
    half, done = await replay.lease(replica, 64)
    await replay.push(half, make_trajectory(half, 0))
    await push_all(replay, done)
    jobs = await replay.take_scoring({"math": 2})
    before = await contents(replay)

    os.kill(server.pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    restarted = asyncio.create_task(server.start())
    assert await replay.heartbeat(replica, [half.token])  # the client bridges the restart
    await restarted

    after = await contents(replay)
    assert after.keys() == before.keys()
    assert await total(replay) == 8
    assert await reserve(replay, 0) == batch
    assert len(await replay.read([t.key for t in batch.trajectories])) == 4
    await replay.push(half, make_trajectory(half, 1))
    for error in await replay.score_many([(job, Score("SCORED", 1.0)) for job in jobs]):
        assert error is None
    await score_all(replay)
    assert (await reserve(replay, 1)).groups == (half.group.id, done.group.id)
    await replay.aclose()


async def test_a_server_that_is_away_is_said_to_be(server: EmbeddedServer, run_id: str, limits: Limits) -> None:
    replay = ReplayClient(open_redis(server.url, retries=0), run_id)
    await replay.open_run(limits)
    await replay.wait_ready(0.1)
    await server.stop()
    with pytest.raises(ReplayUnavailable, match="can't be reached"):
        await replay.state()
    await replay.wait_ready(0.1)  # waits only poll then
    await server.start()
    await replay.wait_ready(0.1)
    assert (await replay.state()).next_step == 0
    await replay.aclose()


async def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys, time; from pathlib import Path; from headrace_services.replay.embedded import EmbeddedServer\n"
        "server = EmbeddedServer(Path(sys.argv[1]), '127.0.0.1', int(sys.argv[2]))\n"
        "asyncio.run(server.start()); sys.stdout.write(f'{server.pid}\\n'); sys.stdout.flush(); time.sleep(600)"
    )
    port = free_port()
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), str(port), stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()

    async def gone() -> bool:
        return not is_running(pid)

    await eventually(gone)


async def test_a_busy_port_is_named(server: EmbeddedServer, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=rf"replay\.redis_port: .*{server.port}"):
        await EmbeddedServer(tmp_path / "other", "127.0.0.1", server.port).start()


async def test_a_server_that_can_not_start_gives_its_words(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, "127.0.0.1", free_port(), appendfsync="sometimes")
    with pytest.raises(ServiceError, match=r"server\.log"):
        await server.start()


async def test_a_server_that_evicts_is_refused(server: EmbeddedServer) -> None:
    async with open_redis(server.url) as redis:
        await check_server(redis, server.url, 1)
        await redis.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ReplayDenied, match="allkeys-lru would drop trajectories"):
            await check_server(redis, server.url, 1)


async def test_what_a_server_may_lose_is_said_at_start(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_redis(server.url) as redis:
        await check_server(redis, server.url, 1)
        assert not caplog.messages
        await redis.config_set("appendonly", "no")
        await check_server(redis, server.url.replace("://", "://me:secret@"), 1)
    (durability,) = caplog.messages
    assert "appendonly is off" in durability
    assert "secret" not in caplog.text


async def test_a_server_without_memory_beyond_the_payloads_is_refused(server: EmbeddedServer) -> None:
    async with open_redis(server.url) as redis:
        await redis.config_set("maxmemory", 5 * 2**28)
        await check_server(redis, server.url, 2**30)
        with pytest.raises(ReplayDenied, match=r"maxmemory 1342177280 .*1\.25 x replay\.max_bytes 1073741825") as error:
            await check_server(redis, server.url, 2**30 + 1)
        assert "`CONFIG SET maxmemory 1342177282`" in str(error.value)


def test_a_server_that_loads_its_file_is_not_said_to_have_none() -> None:
    assert risks({"aof_enabled": 0, "loading": 1}) == []
    assert len(risks({"aof_enabled": 0, "loading": 0})) == 1


async def test_a_replica_is_refused(server: EmbeddedServer, tmp_path: Path, redis_binary: str | None) -> None:
    replica = EmbeddedServer(tmp_path / "replica", "127.0.0.1", free_port(), binary=redis_binary)
    await replica.start()
    async with open_redis(replica.url) as redis:
        await redis.replicaof("127.0.0.1", server.port)
        with pytest.raises(ReplayDenied, match=rf"127.0.0.1:{server.port}; .*primary"):
            await check_server(redis, replica.url, 1)
    await replica.stop()


async def test_a_server_too_old_is_refused(tmp_path: Path) -> None:
    """No server older than 7 can be installed here: one that answers as Redis 6 does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.strip().upper() in (b"HELLO", b"CLIENT"):
                writer.write(b"-ERR unknown command\r\n" if line.strip().upper() == b"HELLO" else b"+OK\r\n")
            if line.strip().upper() == b"INFO":
                info = b"# Server\r\nredis_version:6.2.14\r\n"
                writer.write(b"$%d\r\n%s\r\n" % (len(info), info))

    old = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{old.sockets[0].getsockname()[1]}/0?protocol=2"
    async with open_redis(url, retries=0) as redis:
        with pytest.raises(ReplayDenied, match=r"6\.2\.14.*7\.0"):
            await check_server(redis, url, 1)
    with pytest.raises(HeadraceError, match="too old"):
        await ReplayClient.connect(url, "x", timeout_s=0.2)
    old.close()


async def test_an_unreachable_server_ends_the_service(tmp_path: Path) -> None:
    config = config_of(tmp_path, redis_url="redis://127.0.0.1:1/0")
    with pytest.raises(ReplayUnavailable, match=r"reached.*replay\.redis_url"):
        async with serving(config):
            pass


def test_batches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = Config.model_validate({"replay": {"max_bytes": 1024**2}})
    with pytest.raises(ConfigError, match=r"replay\.max_bytes 1048576"):
        make_limits(config)


def test_a_limit_with_the_name_of_a_key_of_replay_has_its_value() -> None:
    keys = {"max_attempts": 5, "retain_steps": 7, "scoring_deadline_s": 240.0}
    limits = make_limits(Config.model_validate({"replay": keys}))
    assert {name: getattr(limits, name) for name in keys} == keys


def test_every_limit_has_a_value_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults are for tests and benchmarks; in the service, one would hide that a key is ignored."""
    without_defaults = dataclasses.make_dataclass("Limits", [field.name for field in dataclasses.fields(Limits)])
    monkeypatch.setattr(main, "Limits", without_defaults)
    make_limits(Config())


async def test_the_service_names_a_broken_environment_and_stays_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(config_of(tmp_path)) as (http, replay):
        await enqueue(replay, [0], n=8)
        (lease,) = await replay.lease(await healthy_replica(replay), 1)
        await push_all(replay, lease)
        no = Score("INVALID", message="no answer", traceback="Traceback: here")
        jobs = await replay.take_scoring({"math": 8})
        assert await replay.score_many([(job, no) for job in jobs]) == [None] * 8

        async def named() -> bool:
            return "waits_for" in (await http.get("/readyz")).json()

        await eventually(named)
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["waits_for"]) == (200, ["environment math: no answer"])
        metrics = (await http.get("/metrics")).text
        assert 'headrace_replay_environment_broken{environment="math"} 1.0' in metrics
    said = [record.getMessage() for record in caplog.records if "is broken" in record.getMessage()]
    assert len(said) == 1
    assert "Traceback: here" in said[0]


async def test_service_serves_the_run_over_http(tmp_path: Path) -> None:
    async with serving(config_of(tmp_path)) as (http, replay):
        assert (await http.get("/readyz")).json() == {"status": "ready"}
        assert (await http.get("/v1/run")).json()["run_id"] == "served"
        replica = await begin(replay, 3)
        (lease, _) = await replay.lease(replica, 2)
        await replay.push(lease, make_trajectory(lease, 0))
        await replay.publish_metrics("train", 1, {"reward": 0.5}, lease.timeline)

        group = (await http.get(f"/v1/groups/{lease.group.id}")).json()
        assert (group["state"], group["pushed"], group["group"]["prompt_token_ids"]) == ("open", 1, [1, 2, 3, 4])
        assert group["trajectories"][0]["length"] == 4
        trajectory = (await http.get(f"/v1/trajectories/{lease.group.id}/0")).json()
        assert trajectory["completion_token_ids"] == [0, 1, 2, 3]
        assert trajectory["spans"] == [{"version": 0, "start": 0, "end": 4}]
        assert trajectory["score"] is None
        stats = (await http.get("/v1/stats")).json()
        assert stats["counts"]["train"]["open"] == 2
        (entry,) = (await http.get("/v1/metrics")).json()
        assert (entry["kind"], entry["step"], entry["metrics"]) == ("train", 1, {"reward": 0.5})

        async def shown() -> bool:
            return 'headrace_replay_groups{lane="train",state="open"} 2.0' in (await http.get("/metrics")).text

        await eventually(shown)


async def test_http_refuses_what_it_can_not_answer(tmp_path: Path) -> None:
    async with serving(config_of(tmp_path)) as (http, _):
        for path, status in (
            ("/v1/groups/none", 404),
            ("/v1/groups/a%20b%0A", 400),
            ("/v1/trajectories/none/0", 404),
            ("/v1/trajectories/none/x", 422),
            ("/v1/metrics?after=;", 422),
            ("/v1/metrics?count=0", 422),
            ("/v1/events?after=x", 422),
        ):
            reply = await http.get(path)
            assert reply.status_code == status, path
            assert reply.json()["detail"]


async def test_events_stream_as_they_happen(tmp_path: Path) -> None:
    async with serving(config_of(tmp_path)) as (http, replay):
        async with http.stream("GET", "/v1/events") as stream:
            lines = stream.aiter_lines()
            registering = asyncio.create_task(replay.register("r1", {}))
            seen = {}
            async for line in lines:
                name, _, value = line.partition(": ")
                seen[name] = value
                if name == "data":
                    break
            await registering
        assert seen["event"] == "replica"
        assert json.loads(seen["data"]) == {"replica": "r1", "state": "STALE"}
        reply = http.stream("GET", "/v1/events", headers={"Last-Event-ID": "0"})
        async with reply as stream:
            async for line in stream.aiter_lines():
                if line.startswith("event"):
                    assert line == "event: opened"
                    break


async def test_service_goes_on_after_its_server_was_killed(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    async with serving(config) as (http, replay):
        await enqueue(replay, range(3))
        pid = (await replay.redis.info("server"))["process_id"]
        os.kill(pid, signal.SIGKILL)
        assert (await replay.state()).counts["queued"] == 3
        assert (await replay.redis.info("server"))["process_id"] != pid

        async def ready() -> bool:
            return (await http.get("/readyz")).status_code == 200

        await eventually(ready)
    # started again, the run goes on
    async with serving(config) as (_, replay):
        assert (await replay.state()).counts["queued"] == 3


async def test_service_has_a_server_of_the_users_own_rewrite_its_file(server: EmbeddedServer, tmp_path: Path) -> None:
    async with serving(config_of(tmp_path, redis_url=server.url)) as (_, replay):

        async def rewritten() -> bool:
            return int((await replay.redis.info("persistence"))["aof_rewrites"]) == 1

        await eventually(rewritten)


async def test_the_watch_for_a_hung_server_ends_when_it_is_cancelled(server: EmbeddedServer) -> None:
    """Before Python 3.12, redis-py loses a cancellation that arrives with an error. The service then neither went on nor ended."""
    pinging = asyncio.Event()

    class Losing(Redis):
        async def ping(self, **_: object) -> bool:  # type: ignore[override]
            pinging.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            raise redis_errors.ConnectionError("refused")

    async with Losing.from_url(server.url) as redis:
        watching = asyncio.create_task(_kill_if_hung(server, redis, 60.0))
        await pinging.wait()
        watching.cancel()
        await asyncio.wait([watching])
        assert watching.cancelled()


async def test_service_remakes_the_run_on_a_server_that_came_back_empty(server: EmbeddedServer, tmp_path: Path) -> None:
    async with serving(config_of(tmp_path, redis_url=server.url)) as (_, replay):
        before = await replay.state()
        await replay.redis.flushall()
        await replay.redis.function_flush()

        async def again() -> bool:
            try:
                return (await replay.state()).incarnation != before.incarnation
            except ReplayUnavailable:
                return False

        await eventually(again)


def test_service_process_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    config = config_of(tmp_path, port=free_port())
    path = tmp_path / "run.json"
    path.write_text(config.model_dump_json())
    program = (
        "import sys; from pathlib import Path; from headrace.config import Config; from headrace_services.replay.main import main\n"
        "main(Config.model_validate_json(Path(sys.argv[1]).read_text()))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)])
    url = f"http://127.0.0.1:{config.replay.port}/readyz"
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                break
    process.terminate()
    assert process.wait() == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(url)
