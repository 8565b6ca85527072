"""Announces a replica to the fleet while its engine loads, so that the trainer waits for it."""

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

from headrace.base.errors import ReplayError
from headrace.config import Config
from headrace.net.credentials import buffer_url
from headrace.replay import ReplayClient

log = logging.getLogger(__name__)

# how long the announcement may take to leave the fleet once the engine is up
_LEAVING_S = 5.0


@contextlib.contextmanager
def announced(config: Config) -> Iterator[None]:
    """Keep a LOADING replica in the fleet while the context is open, for at most `rollout.load_deadline_s`.

    It runs on a thread, because the engine's start blocks the calling one. An unreachable buffer is not an error here: the replica itself
    deals with it.
    """
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
        log.warning("this replica can't be announced to the fleet while it loads: %s", error)


async def _live(config: Config, over: threading.Event) -> None:
    info = {"host": socket.gethostname(), "pid": os.getpid(), "model": config.policy.model_name}
    replay = await ReplayClient.connect(buffer_url(config, "rollout"), config.run.id)
    async with contextlib.aclosing(replay):
        ends = time.monotonic() + config.rollout.load_deadline_s
        replica, state = "", "DEAD"
        while not over.is_set() and time.monotonic() < ends:
            if state == "DEAD":  # not registered yet, or its heartbeats were late
                replica = f"loading-{secrets.token_hex(6)}"
                await replay.register(replica, info, loading=True)
            await asyncio.to_thread(over.wait, config.rollout.heartbeat_s)
            state = (await replay.heartbeat(replica, [])).state
        if replica:
            await replay.deregister(replica)
