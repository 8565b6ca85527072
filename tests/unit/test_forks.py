"""The processes of the tests themselves."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import grpc
import pytest


async def test_grpc_does_nothing_in_a_fork_of_a_process_of_the_tests(capfd: pytest.CaptureFixture[str]) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
        for _ in range(5):
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", ""], preexec_fn=lambda: None, check=True)
    await server.stop(None)
    assert "fork" not in capfd.readouterr().err
