"""A replica whose engine is not up: the fleet is told that it comes, so that the trainer waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from headrace.config import Config
from headrace.credentials import buffer_url
from headrace.errors import ReplayError
from headrace.replay import ReplayClient

log = logging.getLogger(__name__)

# To leave the fleet, once the engine is up.
_LEAVING_S = 5.0


@contextlib.contextmanager
def announced(config: Config) -> Iterator[None]:
    """In the fleet as LOADING while the context is open, for `rollout.load_deadline_s` at most. On a thread: the engine's start blocks
    this one. A buffer that can't be reached is no error here, and is met by the replica itself."""
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(config, over), name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LEAVING_S)


def _beat(config: Config, over: threading.Event) -> None:
    try:
        asyncio.run(_live(config, over))
    except ReplayError as error:
        log.warning("the fleet isn't told that this replica loads: %s", error)


async def _live(config: Config, over: threading.Event) -> None:
    info = {"host": socket.gethostname(), "pid": os.getpid(), "model": config.policy.model_name}
    replay = await ReplayClient.connect(buffer_url(config, "rollout"), config.run.id)
    async with contextlib.aclosing(replay):
        ends = time.monotonic() + config.rollout.load_deadline_s
        replica, state = "", "DEAD"
        while not over.is_set() and time.monotonic() < ends:
            if state == "DEAD":  # not yet there, or its heartbeats were late
                replica = f"loading-{secrets.token_hex(6)}"
                await replay.register(replica, info, loading=True)
            await asyncio.to_thread(over.wait, config.rollout.heartbeat_s)
            state = (await replay.heartbeat(replica, [])).state
        if replica:
            await replay.deregister(replica)
