"""The buffer of a run, which is up or not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from headrace.base.addresses import LOOPBACK, with_port
from headrace.base.errors import PortTaken, ReplayUnavailable, ServiceError
from headrace.config import Config
from headrace.launch.entry_points import load_entry_point
from headrace.launch.runs import lock, may_be_up
from headrace.net import credentials
from headrace.net.service import bind
from headrace.replay import ReplayClient
from headrace.run.folder import resume_hint

_CONNECT_S = 3.0
_PORT_TRIES = 5


@contextlib.asynccontextmanager
async def open_buffer(config: Config, role: str = "reader") -> AsyncIterator[ReplayClient]:
    """Open a client of the run's buffer, whether the run is up or not. With `role` "operator" the client may also change the buffer.

    If the run is down, its embedded server is started from the append-only file while the context is open; the run can't be started
    meanwhile. Raises `ReplayUnavailable` if neither a server nor a file exists, `ServiceError` while another process starts the run, or if
    another build of the buffer wrote the file.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            if not may_be_up(config):
                raise ReplayUnavailable("no process of the run is alive")
            client = await ReplayClient.connect(credentials.buffer_url(config, role), config.run.id, timeout_s=0.0)
        except ReplayUnavailable:
            client = await _start_embedded(config, role, stack)
        stack.push_async_callback(client.aclose)
        yield client


async def _start_embedded(config: Config, role: str, stack: contextlib.AsyncExitStack) -> ReplayClient:
    folder = config.run_folder / "replay"
    if config.replay.redis_url is not None or not folder.is_dir():
        try:
            return await ReplayClient.connect(credentials.buffer_url(config, role), config.run.id, timeout_s=_CONNECT_S)
        except ReplayUnavailable as error:
            if config.replay.redis_url is not None:
                raise
            address = with_port(config.replay.redis_host, config.replay.redis_port)
            raise ReplayUnavailable(
                f"run {config.run.id} is not up: its buffer can't be reached at {address}, and its folder {folder} doesn't exist. "
                f"To start the run: {resume_hint(config)}"
            ) from error
    make: Any = load_entry_point("headrace.tools", "embedded-server", extra="replay")
    stack.enter_context(lock(config))
    server = await _start_on_a_free_port(lambda port: make.of(config, LOOPBACK, port))
    stack.push_async_callback(server.stop)
    try:
        moved = config.change(replay={"redis_host": LOOPBACK, "redis_port": server.port})
        url = credentials.buffer_url(moved, role)
        return await ReplayClient.connect(url, config.run.id, timeout_s=0.0)
    except ReplayUnavailable as error:
        raise ServiceError(
            f"{folder} holds no buffer of run {config.run.id} that this version can read ({error}). Look at it with the version that the "
            f"run was last up with, or continue the run with this one: {resume_hint(config)}"
        ) from error


async def _start_on_a_free_port(make: Callable[[int], Any]) -> Any:
    """Start an embedded server, not on the configured port, where another run may be up. It takes the number of a port, and no socket, so
    another process may get the port first. Then another port is chosen. Raises `ServiceError`."""
    for _ in range(_PORT_TRIES):
        with bind(LOOPBACK, 0, "replay.redis_port") as free:
            server = make(free.getsockname()[1])
        with contextlib.suppress(PortTaken):
            await server.start()
            return server
    raise ServiceError(
        f"other processes took {_PORT_TRIES} free ports of {LOOPBACK} one after the other before the run's buffer could listen; try again"
    )
