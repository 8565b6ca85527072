"""Keeps the append-only file of an external server (`replay.redis_url`) readable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from headrace.base.errors import ReplayUnavailable
from headrace.replay.connection import BufferConnection

_log = logging.getLogger("headrace.replay")
_LOOK_S = 1.0
# The pause before a rewrite that failed or was refused is requested again.
_AGAIN_S = 60.0


class AofRewrites:
    """Has the server rewrite its append-only file from memory after each start and after a failed write, because it may then continue a
    damaged file, which its next start reads wrongly or not at all:

    - Redis, and Valkey without https://github.com/valkey-io/valkey/pull/4342, cut off a command that a crash has left incomplete, but keep
      the commands before it in the same transaction. At the start after that, they execute this half together with what was written behind
      it. The writes of a function are such a transaction. (The embedded server has the correction.)
    - A full disk can leave a gap of zeros, which can't be loaded. (`embedded.py` cuts the file off there.)
    """

    def __init__(self, connection: BufferConnection, clock: Callable[[], float] = time.monotonic) -> None:
        self._command = connection.command
        self._clock = clock
        self._too_early = 0  # this many rewrites since the server's start began before its newest failed write
        self._next_at = 0.0
        self._warned = False

    async def watch(self) -> None:
        unseen = False
        while True:
            try:
                await self.look()
                unseen = False
            except ReplayUnavailable as error:
                if not unseen:
                    _log.warning("can't see whether the server's append-only file is in order: %s", error)
                unseen = True
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Request a rewrite if one is due. Raises `ReplayUnavailable`."""
        info = await self._command("INFO", "persistence")
        if info["loading"] or not info["aof_enabled"]:
            return
        rewrites, failed = info["aof_rewrites"], info["aof_last_bgrewrite_status"] != "ok"
        if rewrites < self._too_early:  # the server was restarted
            self._too_early = 0
        if info["aof_last_write_status"] != "ok":
            self._too_early = rewrites
            return
        if info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]:
            return
        if rewrites > self._too_early and not failed:
            self._next_at, self._warned = 0.0, False
            return
        if self._clock() >= self._next_at:
            await self._request(failed)

    async def _request(self, failed: bool) -> None:
        """Request a rewrite. `failed`: the newest one failed."""
        if failed:
            self._back_off("the newest rewrite failed; see the server's log")
        try:
            await self._command("BGREWRITEAOF")
        except ReplayUnavailable as error:
            self._back_off(str(error))

    def _back_off(self, why: str) -> None:
        """Wait before the next request, and log why, once until a rewrite succeeds."""
        self._next_at = self._clock() + _AGAIN_S
        if not self._warned:
            _log.warning(
                "the server's append-only file can't be rewritten (%s); run BGREWRITEAOF after each restart of the server, or it may read "
                "the file wrongly after its next crash",
                why,
            )
        self._warned = True
