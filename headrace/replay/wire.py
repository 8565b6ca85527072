"""How the replay client talks to Redis: one connection pool, function calls, refusals as exceptions, wake-ups."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.errors import (
    Fenced,
    InvalidCall,
    LeaseLost,
    NotVerified,
    ReplayDenied,
    ReplayError,
    ReplayUnavailable,
    SamplingStarved,
    Surplus,
    WrongStep,
    WrongTimeline,
)
from headrace.replay.connect import denial, pool_of

Unreachable = (RedisConnectionError, RedisTimeoutError, OSError)

_BY_CODE = {
    kind.code: kind
    for kind in (
        ReplayUnavailable,
        InvalidCall,
        Fenced,
        LeaseLost,
        Surplus,
        WrongTimeline,
        WrongStep,
        SamplingStarved,
        NotVerified,
    )
}
# A restart of the server on its append-only file is bridged; each function is safe to call again.
_RETRIES = 10
# Fallback for a wake-up that was lost with its connection.
_POLL_S = 1.0
# A command inside a function that the caller's rights don't cover, as Redis 7.0 and as later ones say it.
_DENIED_INSIDE = re.compile(r"ACL failure in script|The user executing the script can't")


def open_redis(url: str, retries: int = _RETRIES) -> Redis:
    """A client with a connection pool for `url` (the forms of `connect`). Raises `ConfigError` on one that can't be used."""
    return Redis.from_pool(pool_of(url, retries))


def refusal(text: str) -> ReplayError:
    """The exception that `<code> <message>`, as the functions refuse, stands for."""
    code, _, message = text.partition(" ")
    kind = _BY_CODE.get(code)
    if kind is not None:
        return kind(message)
    if text.startswith("OOM"):
        return ReplayUnavailable("the Redis server is out of memory; raise its maxmemory or lower replay.max_bytes")
    if "Function not found" in text:
        return ReplayUnavailable("the Redis server holds no function library; start the replay service")
    return ReplayUnavailable(f"the Redis server refused the call: {text}")


def unavailable(error: BaseException, user: str | None = None) -> ReplayError:
    denied = denial(error, user)
    if denied is not None:
        return denied
    return ReplayUnavailable(f"the Redis server can't be reached ({error}); start it, or correct replay.redis_url")


@contextlib.contextmanager
def keeping_cancellation() -> Iterator[None]:
    """A cancellation that comes while the body runs is never lost.

    redis-py sends under `asyncio.wait_for`, which before Python 3.12 drops a cancellation that arrives together with the end of what it
    waits for; the task that was to stop would go on.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    except Exception as error:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task and task.cancelling() > before:
        raise asyncio.CancelledError


class Wire:
    """Calls on one run. `key` is the run's key, which every function takes."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self.redis = redis
        self.key = f"hr:{{{run_id}}}"
        self._user: str | None = redis.connection_pool.connection_kwargs.get("username")

    async def call(self, function: str, *args: Any) -> Any:
        return await self.command("FCALL", f"hr_{function}", 1, self.key, *args)

    async def command(self, *command: Any) -> Any:
        try:
            with keeping_cancellation():
                return await self.redis.execute_command(*command)
        except ResponseError as error:
            raise self._refused(error, command) from error
        except (RedisError, OSError) as error:
            raise unavailable(error, self._user) from error

    async def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Replies in order, of commands sent together; the first refusal is raised once all are through."""
        pipe = self.redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        try:
            with keeping_cancellation():
                replies = await pipe.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            raise unavailable(error, self._user) from error
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, ResponseError):
                raise self._refused(reply, command) from reply
            if isinstance(reply, Exception):
                raise unavailable(reply, self._user) from reply
        return replies

    def _refused(self, error: ResponseError, command: Sequence[Any]) -> ReplayError:
        if not isinstance(error, NoPermissionError) and not _DENIED_INSIDE.search(str(error)):
            return refusal(str(error))
        what = " ".join(map(str, command[:2] if command[0] == "FCALL" else command[:1]))
        return ReplayDenied(
            f"user {self._user or 'default'!r} of the Redis server may not do {what} ({error}); connect as the user of the right role, "
            "or load the ACL that `headrace acl` prints"
        )


class Wakeups:
    """One subscription of a client to its run's wake-ups; opened at the first wait."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._events = {channel: asyncio.Event() for channel in ("work", "ready", "scoring", "epoch")}
        self._reader: asyncio.Task[None] | None = None

    async def wait(self, channel: str, timeout_s: float) -> None:
        """Return at a wake-up on `channel` since the last wait, or after `timeout_s` or a second, whichever is less."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        event = self._events[channel]
        with contextlib.suppress(TimeoutError):
            # not wait_for: before Python 3.12 it loses a cancellation that comes with the wake-up
            async with asyncio.timeout(min(timeout_s, _POLL_S)):
                await event.wait()
        event.clear()

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    async def _read(self) -> None:
        """Follow the channels; while the server is away, waits fall back to polling and their callers meet the error."""
        prefix = f"{self._wire.key}:wake:"
        while True:
            async with self._wire.redis.pubsub() as pubsub:
                with contextlib.suppress(*Unreachable):
                    with keeping_cancellation():
                        await pubsub.subscribe(*(prefix + channel for channel in self._events))
                    # what happened before the subscription stood went unheard
                    for event in self._events.values():
                        event.set()
                    while True:
                        with keeping_cancellation():
                            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5.0)
                        if message is not None:
                            self._events[message["channel"].decode().removeprefix(prefix)].set()
            await asyncio.sleep(_POLL_S)
