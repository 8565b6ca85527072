"""The embedded server's append-only file as a power cut or a full disk can leave it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from headrace.errors import ServiceError
from headrace_services.replay.embedded import EmbeddedServer
from tests.support.ports import free_port

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
    await server.ended()
    yield server
    await server.stop()


def file_of(server: EmbeddedServer, kind: str) -> Path:
    (path,) = server.folder.glob(f"appendonlydir/*.{kind}")
    return path


@pytest.mark.parametrize("damage", [ZEROS, ZEROS + LATER], ids=["at the end", "in the middle"])
async def test_law_1_zeros_in_the_file_are_cut_off_with_what_follows_and_kept(
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
    assert f"its last {len(damage)} bytes were cut off, and {copy} is a copy of it" in caplog.text
    # what is written from here on is read again
    await killed.stop()
    await killed.start()
    async with Redis.from_url(killed.url) as redis:
        assert await redis.get("b") == b"3"


async def test_a_file_that_is_damaged_elsewhere_is_left_as_it_is_to_a_person(killed: EmbeddedServer) -> None:
    base, newest = file_of(killed, "base.rdb"), file_of(killed, "incr.aof")
    base.write_bytes(ZEROS)
    before = newest.read_bytes()
    with pytest.raises(ServiceError, match="the embedded server did not start"):
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
