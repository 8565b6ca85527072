"""Async client of the replay buffer: each method is one call of a server-side function (`services/replay/functions/`).

The buffer's state machine and its seven laws are in Redis, so every caller gets the same answer. The client encodes arguments, decodes
replies and turns refusals into the types of `headrace.base.errors`. Large payloads are separate values, written before the call that makes
them visible: a function moves ids, never megabytes.
"""

from __future__ import annotations

import logging
import secrets

from redis.asyncio import Redis

from headrace.base.errors import InvalidCall, ReplayError, ReplayUnavailable, WrongBuild
from headrace.replay.connection import BufferConnection, hide_password, open_redis
from headrace.replay.episodes import EpisodesClient
from headrace.replay.inspection import InspectionClient
from headrace.replay.records import Limits, RunState
from headrace.replay.retry import BufferRetry
from headrace.replay.rollout import RolloutClient
from headrace.replay.scoring import ScoringClient
from headrace.replay.trainer import TrainerClient

# This key has the id of the server's current run.
CURRENT_RUN = "headrace:run"


class ReplayClient(TrainerClient, RolloutClient, EpisodesClient, ScoringClient, InspectionClient):
    """One connection pool to the buffer of one run. Safe for concurrent use by tasks of one event loop.

    Every method raises `ReplayUnavailable` when the server can't be reached (after redis-py's own retries), `InvalidCall` on arguments that
    no correct caller sends, and the `Fenced` family (law 4) where stated.
    """

    def __init__(self, redis: Redis, run_id: str) -> None:
        """Make a client of run `run_id` on `redis`; `open_run` creates the run if necessary. Normally use `connect`."""
        super().__init__(redis, run_id)
        self._opened = ""  # the nonce of this client's newest `open_run`

    @classmethod
    async def connect(cls, url: str, run_id: str | None = None, timeout_s: float = 30.0) -> ReplayClient:
        """Connect, waiting up to `timeout_s` for server, functions and run. `run_id` None means the server's current run.

        Raises `ReplayUnavailable` with the remedy if the server is unreachable, older than 7.0, or has no such run opened by this build.
        """
        redis = open_redis(url, retries=0)
        retry = BufferRetry(timeout_s, first_pause_s=0.1, last_pause_s=0.1, log_level=logging.DEBUG)
        try:
            return await retry(lambda: cls._join(redis, url, run_id))
        except ReplayUnavailable as error:
            raise ReplayUnavailable(f"{hide_password(url)}: {error}") from error
        finally:
            await redis.aclose()

    @classmethod
    async def _join(cls, redis: Redis, url: str, run_id: str | None) -> ReplayClient:
        probe = BufferConnection(redis, run_id or "none")
        version = str((await probe.command("INFO", "server"))["redis_version"])
        if int(version.split(".")[0]) < 7:
            raise InvalidCall(f"{hide_password(url)}: Redis {version} is too old; run Redis 7.0 or later, or Valkey")
        if run_id is None:
            current = await probe.command("GET", CURRENT_RUN)
            if current is None:
                raise ReplayUnavailable("the server holds no run; start the replay service")
            run_id = current.decode()
        client = cls(open_redis(url), run_id)
        try:
            await client.state()
        except ReplayError as error:
            await client.aclose()
            if isinstance(error, WrongBuild):  # may pass: the replay service of this build may still open the run
                raise ReplayUnavailable(str(error)) from error
            raise
        return client

    async def open_run(self, limits: Limits) -> RunState:
        """Create the run, or update the limits of an existing one, and make it the current run. Called by the replay service."""
        self._opened = secrets.token_hex(16)
        return await self._open(limits)

    async def reopen_run(self, limits: Limits, opened: str) -> bool:
        """Call `open_run` again if the server lost it; returns whether it had. `opened` is the value from `stats`.

        Raises `WrongTimeline` if nothing was lost: another start of the replay service has set the limits since.
        """
        if opened == self._opened:
            return False
        await self._open(limits)
        return True

    async def _open(self, limits: Limits) -> RunState:
        reply = await self._connection.call(
            "open_run", timeline=self._opened, incarnation=secrets.token_hex(16), **limits.arguments()
        )
        if await self._connection.command("GET", CURRENT_RUN) != self.run_id.encode():
            await self._connection.command("SET", CURRENT_RUN, self.run_id)
        await self._sweep_old_incarnations()
        return self._note(reply)
