"""The server's append-only file as a crash, a power cut or a full disk can leave it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from headrace.base.errors import ReplayUnavailable, ServiceError
from headrace.replay.connection import BufferConnection
from headrace_services.replay.aof import AofRewrites
from headrace_services.replay.embedded import EmbeddedServer
from tests.support.ports import free_port
from tests.support.waiting import eventually

ZEROS = b"\0" * 500
LATER = b"*3\r\n$3\r\nSET\r\n$1\r\nb\r\n$1\r\n2\r\n"


@pytest.fixture
async def killed(tmp_path: Path, redis_binary: str | None) -> AsyncIterator[EmbeddedServer]:
    """A server that wrote `a` and was killed."""
    server = EmbeddedServer(tmp_path / "replay", "127.0.0.1", free_port(), "always", binary=redis_binary)
    await server.start()
    async with Redis.from_url(server.url) as redis:
        await redis.set("a", 1)
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    yield server
    await server.stop()


def file_of(server: EmbeddedServer, kind: str) -> Path:
    (path,) = server.folder.glob(f"appendonlydir/*.{kind}")
    return path


@pytest.mark.parametrize("damage", [ZEROS, ZEROS + LATER], ids=["at the end", "in the middle"])
async def test_law_1_zeros_in_the_file_are_cut_off_and_kept_aside(
    killed: EmbeddedServer, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    good = file_of(killed, "incr.aof").read_bytes()
    file_of(killed, "incr.aof").write_bytes(good + damage)
    with caplog.at_level(logging.WARNING):
        await killed.start()
    async with Redis.from_url(killed.url) as redis:
        assert (await redis.get("a"), await redis.get("b")) == (b"1", None)
        await redis.set("b", 3)
    (copy,) = killed.folder.glob("damaged-*.aof")
    assert copy.read_bytes() == good + damage
    assert f"{len(damage)} bytes were cut off, and {copy}" in caplog.text
    # what is written from here on is read again
    await killed.stop()
    await killed.start()
    async with Redis.from_url(killed.url) as redis:
        assert await redis.get("b") == b"3"


async def test_a_file_damaged_elsewhere_is_left_to_a_person(killed: EmbeddedServer) -> None:
    base, newest = file_of(killed, "base.rdb"), file_of(killed, "incr.aof")
    base.write_bytes(ZEROS)
    before = newest.read_bytes()
    with pytest.raises(ServiceError, match="did not start"):
        await killed.start()
    assert (base.read_bytes(), newest.read_bytes()) == (ZEROS, before)
    assert list(killed.folder.glob("damaged-*")) == []


async def test_a_file_that_another_server_has_open_is_left_alone(killed: EmbeddedServer) -> None:
    await killed.start()
    newest = file_of(killed, "incr.aof")
    newest.write_bytes(newest.read_bytes() + ZEROS)
    other = EmbeddedServer(killed.folder, killed.host, killed.port)
    with pytest.raises(ServiceError, match="address already in use"):
        await other.start()
    assert newest.read_bytes().endswith(ZEROS)


async def rewritten(server: EmbeddedServer) -> None:
    """What the replay service does once a second, until there is nothing more to do."""
    async with Redis.from_url(server.url) as redis:
        rewrites = AofRewrites(BufferConnection(redis, "run"))

        async def done() -> bool:
            await rewrites.look()
            info = await redis.info("persistence")
            return info["aof_rewrites"] == 1 and not info["aof_rewrite_in_progress"]

        await eventually(done)


async def test_law_1_half_a_transaction_is_not_carried_out_at_a_later_start(killed: EmbeddedServer) -> None:
    """Redis 7.0 does, unless its file is rewritten."""
    await killed.start()
    async with Redis.from_url(killed.url) as redis:
        await redis.eval("redis.call('SET', 'half', '1') redis.call('SET', 'other half', '2')", 0)
    killed.kill()
    await killed.wait()
    newest = file_of(killed, "incr.aof")
    os.truncate(newest, newest.stat().st_size - 20)
    for later in ("c", "d"):
        await killed.start()
        await rewritten(killed)
        async with Redis.from_url(killed.url) as redis:
            assert await redis.mget("a", "half", "other half") == [b"1", None, None]
            await redis.eval("redis.call('SET', KEYS[1], '1') redis.call('SET', 'e', '2')", 1, later)
        killed.kill()
        await killed.wait()
    await killed.start()
    async with Redis.from_url(killed.url) as redis:
        assert await redis.mget("half", "c", "d", "e") == [None, b"1", b"1", b"2"]


class SaidServer:
    """A connection to a server that says `info`. `refuses` is its answer to a request for a rewrite."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {
            "loading": 0, "aof_enabled": 1, "aof_last_write_status": "ok", "aof_rewrite_in_progress": 0,
            "aof_rewrite_scheduled": 0, "aof_last_bgrewrite_status": "ok", "aof_rewrites": 0,
        }  # fmt: skip
        self.asked = 0
        self.refuses: Exception | None = None

    async def command(self, *words: str) -> Any:
        if words[0] == "INFO":
            return self.info
        self.asked += 1
        if self.refuses is not None:
            raise self.refuses
        self.info |= {"aof_rewrite_in_progress": 1, "aof_rewrites": self.info["aof_rewrites"] + 1}
        return b"Background append only file rewriting started"


DONE = {"aof_rewrite_in_progress": 0}
RESTARTED = {"aof_rewrites": 0, "aof_rewrite_in_progress": 0, "loading": 1}


async def test_a_file_is_rewritten_once_after_a_start_or_a_failed_write() -> None:
    server = SaidServer()
    rewrites = AofRewrites(server, lambda: 0.0)  # type: ignore[arg-type]
    story: list[tuple[dict[str, Any], int]] = [
        ({}, 1),
        ({}, 1),
        (DONE, 1),
        ({"aof_last_write_status": "err"}, 1),
        ({}, 1),  # no room yet
        ({"aof_last_write_status": "ok"}, 2),
        (DONE, 2),
        (RESTARTED, 2),
        ({"loading": 0}, 3),
        # one that began before the write failed leaves what the failed write left
        ({"aof_last_write_status": "err"}, 3),
        ({"aof_last_write_status": "ok"}, 3),
        (DONE, 4),
        # a server that ends during its rewrite starts over
        (RESTARTED, 4),
        ({"loading": 0}, 5),
        (DONE, 5),
        ({**RESTARTED, "loading": 0, "aof_enabled": 0}, 5),
    ]
    for then, asked in story:
        server.info |= then
        await rewrites.look()
        assert server.asked == asked, then
    # another start of the replay service asks the server, and needs no memory of its own
    server.info |= {"aof_enabled": 1, "aof_rewrites": 1}
    await AofRewrites(server).look()  # type: ignore[arg-type]
    assert server.asked == 5


@pytest.mark.parametrize("refuses", [None, ReplayUnavailable("user 'run-replay' may not")], ids=["fails", "is refused"])
async def test_a_failed_rewrite_is_requested_again_a_minute_later(
    refuses: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    server, now = SaidServer(), [1000.0]
    server.refuses = refuses
    rewrites = AofRewrites(server, lambda: now[0])  # type: ignore[arg-type]
    await rewrites.look()
    server.info |= {"aof_last_bgrewrite_status": "err" if refuses is None else "ok"}
    if refuses is None:  # the first failure may be a fork that found no memory
        server.info |= DONE
        await rewrites.look()
    before = server.asked
    for later_s, asked in [(1.0, 0), (58.0, 0), (2.0, 1), (30.0, 1), (31.0, 2)]:
        server.info |= DONE
        now[0] += later_s
        await rewrites.look()
        assert server.asked == before + asked
    (record,) = caplog.records
    why = "user 'run-replay' may not" if refuses else "the newest rewrite failed; see the server's log"
    assert f"({why}); run BGREWRITEAOF" in record.getMessage()
