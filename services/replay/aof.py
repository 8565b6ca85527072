"""Keeping the append-only file of a server of the user's own readable. (The embedded server is newer than the first fault, and
`embedded.py` repairs the second.)"""

from __future__ import annotations

import logging
import time

from headrace.errors import ReplayDenied, ReplayUnavailable
from headrace.replay.connection import BufferConnection

_log = logging.getLogger("headrace.replay")
# The pause before a rewrite that failed or was refused is requested again.
_AGAIN_S = 60.0


class AofRewrites:
    """Has the server rewrite its append-only file from memory, where it may have continued a damaged one: after each start, and after a
    failed write. Otherwise its next start may read the file wrongly:

    - Redis, and Valkey without https://github.com/valkey-io/valkey/pull/4342, cut off a command that a crash has left incomplete, but keep
      the commands before it in the same transaction. At the start after that, they execute this half together with what was written behind
      it. A function call is such a transaction.
    - A full disk can leave a gap of zeros, which can't be loaded (docs/replay.md).
    """

    def __init__(self, connection: BufferConnection) -> None:
        self._connection = connection
        self._rewritten = (
            f"{connection.key}:rewritten"  # holds the server process that has rewritten its file since it started
        )
        self._requested: str | None = None  # the server process that was asked to
        self._write_failed = False
        self._refused = False
        self._next_at = 0.0

    async def look(self) -> None:
        """Request a rewrite if one is due, or note that it is done. Raises `ReplayUnavailable`."""
        command = self._connection.command
        info = await command("INFO", "server", "persistence")
        if info["loading"] or not info["aof_enabled"]:
            return
        if info["aof_last_write_status"] != "ok":
            self._requested, self._write_failed = None, True
        elif info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]:
            return
        elif self._requested == info["run_id"] and info["aof_last_bgrewrite_status"] == "ok":
            await command("SET", self._rewritten, info["run_id"])
            self._requested, self._write_failed, self._next_at = None, False, 0.0
        elif time.monotonic() >= self._next_at and (self._write_failed or await self._is_due(info["run_id"])):
            self._next_at = time.monotonic() + _AGAIN_S
            await self._request(info["run_id"])

    async def _is_due(self, server: str) -> bool:
        return bool(await self._connection.command("GET", self._rewritten) != server.encode())

    async def _request(self, server: str) -> None:
        try:
            await self._connection.command("BGREWRITEAOF")
            self._requested, self._refused = server, False
        except (ReplayUnavailable, ReplayDenied) as error:
            _log.log(
                logging.DEBUG if self._refused else logging.WARNING,
                "the server's append-only file can't be rewritten (%s); run BGREWRITEAOF after each restart of the server, or it may read "
                "the file wrongly after its next crash",
                error,
            )
            self._refused = True
