"""`headrace up` says what the run waits for while the buffer's server is away, from what the replay service says about it."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from headrace.base.errors import ReplayDenied, ReplayError, ReplayUnavailable, ServiceError
from headrace.launch import pipeline as watching
from tests.support.idle_pipeline import idle_pipeline

REASON = "it is a replica of 10.0.0.2:6379; give the primary"


class Replay:
    """The health pages of a replay service."""

    reason: str | None = "starting"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        ready = path == b"/healthz" or self.reason is None
        body = {"status": "ready"} if ready else {"status": "not ready", "reason": self.reason}
        writer.write(f"HTTP/1.0 {200 if ready else 503} \r\n\r\n{json.dumps(body)}".encode())
        await writer.drain()
        writer.close()


async def test_up_names_the_buffers_server_among_what_the_run_waits_for(tmp_path: Path) -> None:
    replay = Replay()
    server = await asyncio.start_server(replay.serve, "127.0.0.1", 0)
    with idle_pipeline(tmp_path) as pipeline:

        async def waits() -> list[tuple[str, str]]:
            await pipeline._probe(pipeline.children.replay, "127.0.0.1", server.sockets[0].getsockname()[1], 0.0)
            return [(wait.whom, wait.why) for wait in pipeline._waits()]

        async with server:
            assert await waits() == []  # it starts
            replay.reason = None
            assert await waits() == []
            replay.reason = REASON
            assert await waits() == [("the buffer's server", REASON)]
            (first,) = pipeline._waits()
            await waits()
            assert pipeline._waits()[0].seconds >= first.seconds >= 0
            replay.reason = None
            assert await waits() == []


@pytest.mark.parametrize(
    "error", [ReplayUnavailable("no answer"), ReplayDenied("user 'r-reader' may not run FCALL_RO")]
)
async def test_law_6_a_buffer_that_up_can_not_read_ends_no_run(tmp_path: Path, error: ReplayError) -> None:
    with idle_pipeline(tmp_path) as pipeline:
        await pipeline._poll(Mock(metrics=AsyncMock(side_effect=error)))
        assert pipeline.summary.buffer == str(error)


async def test_law_6_a_file_server_that_is_away_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = OSError(errno.ESTALE, "Stale file handle")
    buffer = Mock(metrics=AsyncMock(side_effect=ReplayUnavailable("no answer")))
    with idle_pipeline(tmp_path) as pipeline:
        monkeypatch.setattr(watching, "list_set_aside", Mock(side_effect=stale))
        await pipeline._poll(buffer)
        monkeypatch.setattr(watching, "list_set_aside", Mock(side_effect=ServiceError("not what was written")))
        with pytest.raises(ServiceError):
            await pipeline._poll(buffer)
