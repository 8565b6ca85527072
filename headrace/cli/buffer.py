"""The buffer of a run for people, whether the run is up or not."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from headrace.cli import plugins, runs
from headrace.config import Config
from headrace.errors import ReplayUnavailable, ServiceError
from headrace.replay import ReplayClient

_LOOK_S = 3.0


@contextlib.asynccontextmanager
async def opened(config: Config) -> AsyncIterator[ReplayClient]:
    """A client of the run's buffer. Of a run that is down, the embedded server is started on its append-only file for as long as the
    context is open; the run can't be taken up meanwhile.

    Raises `ReplayUnavailable` where there is neither, `ServiceError` while another process takes the run up.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await ReplayClient.connect(config.redis_url, config.run.id, timeout_s=0.0)
        except ReplayUnavailable:
            client = await _awakened(config, stack)
        stack.push_async_callback(client.aclose)
        yield client


async def _awakened(config: Config, stack: contextlib.AsyncExitStack) -> ReplayClient:
    folder = config.run_folder / "replay"
    if config.replay.redis_url is not None or not folder.is_dir():
        return await ReplayClient.connect(config.redis_url, config.run.id, timeout_s=_LOOK_S)
    make: Any = plugins.find("headrace.tools", "embedded-server", extra="replay")
    stack.enter_context(runs.locked(config))
    # a port of its own: another run may be up on the configured one
    server = make(folder, "127.0.0.1", _free_port(), config.replay.appendfsync)
    stack.push_async_callback(server.stop)
    await server.start()
    try:
        return await ReplayClient.connect(server.url, config.run.id, timeout_s=0.0)
    except ReplayUnavailable as error:
        raise ServiceError(f"{folder} holds no buffer of run {config.run.id}; was the run ever up?") from error


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
