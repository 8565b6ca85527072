"""The replay client's connections: from an address to a pool, function calls, refusals as exceptions, wake-ups.

    redis://[user:password@]host:port/0
    rediss://[user:password@]host:port/0?ssl_ca_certs=ca.pem&ssl_certfile=client.pem&ssl_keyfile=client.key
    sentinel://[user:password@]host:26379,host:26379,host:26379/SERVICE[/0][?ssl=true&…]
    unix:///path

After a failover the same address leads to another server. A connection whose server has become a replica is closed, so that the next one
resolves the name (or asks the sentinels) again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.base.errors import (
    ConfigError,
    EnvironmentBroken,
    EpisodeTooLarge,
    Fenced,
    InvalidCall,
    LeaseLost,
    NotVerified,
    ReplayDenied,
    ReplayError,
    ReplayFull,
    ReplayUnavailable,
    SamplingStarved,
    Surplus,
    Unstaged,
    WrongBuild,
    WrongStep,
    WrongTimeline,
)
from headrace.replay.build import BUILD

CONNECTIONS = 32
# How much asyncio reads from the socket at a time: replies contain megabytes of payloads.
READ_BYTES = 256 * 1024
_TIMEOUTS = {"socket_connect_timeout": 5.0, "socket_timeout": 30.0}
# Of a question to a Sentinel, which others can answer as well: one that is gone or hangs must not hold a failover up.
_SENTINEL_TIMEOUTS = {"socket_connect_timeout": 2.0, "socket_timeout": 2.0}
_TLS_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_SENTINEL = re.compile(r"sentinel://(?P<login>[^@/]*@)?(?P<hosts>[^/?]+)/(?P<service>[^/?]+)(?P<rest>.*)")
_SENTINEL_PORT = 26379
# OpenSSL's reasons for a refused handshake; a broken connection has others.
_NO_TLS = re.compile("_ALERT_|WRONG_VERSION|UNSUPPORTED|NO_SHARED|RECORD_LAYER")
T = TypeVar("T")

_pack = msgspec.msgpack.Encoder().encode

Unreachable = (RedisConnectionError, RedisTimeoutError, OSError)

_BY_CODE = {
    kind.code: kind
    for kind in (
        ReplayUnavailable,
        InvalidCall,
        Fenced,
        LeaseLost,
        Surplus,
        Unstaged,
        EpisodeTooLarge,
        WrongBuild,
        WrongTimeline,
        WrongStep,
        SamplingStarved,
        EnvironmentBroken,
        NotVerified,
    )
}
# Retries bridge a restart of the server on its append-only file; each function is safe to call again.
_RETRIES = 10
# Fallback for a wake-up that was lost with its connection.
_POLL_S = 1.0
# What a function answers if its caller lacks the right to a command inside it: this, and all commands that it lacks.
_DENIED_INSIDE = f"{ReplayDenied.code} "

_REPLICA = "the server has become a replica of another"
_NO_CLUSTER = (
    "it belongs to a Redis Cluster, which can't hold a buffer; let replay.redis_url lead to a server outside a cluster"
)
# What helps, by a part of the server's words, where a server is there but refuses calls. (redis-py takes the codes off some of them.)
_REMEDIES = {
    _REPLICA: "make it the primary with `REPLICAOF NO ONE`, or let replay.redis_url lead to the primary",
    "Link with MASTER is down": "let replay.redis_url lead to the primary, or connect this replica to it",
    "is loading the dataset": "it goes on by itself once its data is loaded",
    "MISCONF": "free space on the server's disk, or correct what the server's log names",
    "NOREPLICAS": "start the server's replicas, or lower its min-replicas-to-write",
    "BUSY Redis is busy": "wait for the script that keeps it busy, or end it with `FUNCTION KILL` or `SCRIPT KILL`",
    "The cluster is down": _NO_CLUSTER,
    "Hash slot not served": _NO_CLUSTER,
    "the slot is on another node": _NO_CLUSTER,
    "Keys in request don't hash to the same slot": _NO_CLUSTER,
    "Multiple keys request during rehashing": _NO_CLUSTER,
    "No matching script": "let nothing else run scripts through this login; Headrace calls functions only",
    "max number of clients reached": "raise the server's maxclients, or close other connections to it",
}


def hide_password(url: str) -> str:
    """Return the address without its password, for logs and messages."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    name = login.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{name}:***@{hosts}" if at else hosts, query=""))


def make_pool(url: str, retries: int) -> BlockingConnectionPool:
    """Return a pool of connections to `url`. Raises `ConfigError` for an address that can't be used, and `ReplayDenied` for a certificate
    file, which may be being renewed."""
    try:
        pool = _sentinel_pool(url, retries) if url.startswith("sentinel:") else _pool(parse_url(url), retries)
        # report a wrong option or file now, not at the first call
        probe = pool.connection_class(**pool.connection_kwargs)
        if isinstance(probe, SSLConnection):
            probe.ssl_context.get()
    except (ValueError, TypeError, OSError, RedisError) as error:
        kind = ReplayDenied if isinstance(error, OSError) else ConfigError
        raise kind(_unusable(url, error)) from error
    return pool


class _FollowPrimary(Connection):
    """A connection that closes if its server has become a replica, which would refuse all writes."""

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            response = await super().read_response(*args, **kwargs)
        except ReadOnlyError as error:
            await self.disconnect()
            raise RedisConnectionError(_REPLICA) from error
        # redis-py takes the ETIMEDOUT of a socket whose server's machine is gone for the end of its own wait for a message, at once and for
        # ever: its caller would never let others run
        if response is None and self._reader is not None and (broken := self._reader.exception()) is not None:
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"the connection broke: {broken}") from broken
        return response


class _TLS(_FollowPrimary, SSLConnection):
    pass


class _AskSentinels(_FollowPrimary):
    """A connection that asks the sentinels for the primary whenever it connects."""

    def __init__(self, *, primary: Callable[[], Awaitable[tuple[str, int]]], **options: Any) -> None:
        super().__init__(**options)
        self._primary = primary

    async def _connect(self) -> None:
        self.host, self.port = await self._primary()
        await super()._connect()


class _SentinelTLS(_AskSentinels, SSLConnection):
    pass


class _Retry(Retry):
    """Retries errors that may be temporary, but not a refused login or certificate."""

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        def may_pass(error: Exception) -> bool:
            return denial(error) is None and (is_retryable is None or is_retryable(error))

        return await super().call_with_retry(do, fail, may_pass, with_failure_count)


def denial(error: BaseException, user: str | None = None) -> ReplayDenied | None:
    """Return the error for the user to fix if `error` is a refused login or certificate; None if it may be temporary."""
    for cause in _causes(error):
        if isinstance(cause, AuthenticationError | AuthorizationError):
            return ReplayDenied(
                f"the Redis server refuses the login of user {user or 'default'!r} ({cause}); correct user and password in "
                "replay.redis_url, or the server's ACL (`headrace acl` prints one); `--run RUN` finds the credentials of a run here"
            )
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ReplayDenied(
                f"the Redis server's certificate is refused ({cause.verify_message}); correct ssl_ca_certs in replay.redis_url, "
                "or the host there to a name in the certificate"
            )
        if isinstance(cause, ssl.SSLError) and _NO_TLS.search(cause.reason or ""):
            return ReplayDenied(
                f"no TLS with the Redis server ({cause.reason}); if it requires a client certificate, give ssl_certfile and ssl_keyfile "
                "in replay.redis_url; if it has no TLS on this port, write redis:// instead of rediss://"
            )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _pool(options: Any, retries: int) -> BlockingConnectionPool:
    wanted = options.pop("connection_class", Connection)
    kinds = {Connection: _FollowPrimary, SSLConnection: _TLS, UnixDomainSocketConnection: UnixDomainSocketConnection}
    return BlockingConnectionPool(connection_class=kinds[wanted], **_settings(retries), **options)


def _sentinel_pool(url: str, retries: int) -> BlockingConnectionPool:
    match = _SENTINEL.fullmatch(url)
    if match is None:
        raise ValueError("not sentinel://host:port,host:port/SERVICE")
    options: Any = parse_url(f"redis://{match['login'] or ''}sentinel{match['rest']}")
    del options["host"]
    tls = str(options.pop("ssl", "")).lower() == "true"
    plain = {key: value for key, value in options.items() if key.startswith("ssl_")} | ({"ssl": True} if tls else {})
    addresses = [
        host.rpartition(":") if ":" in host else (host, ":", _SENTINEL_PORT) for host in match["hosts"].split(",")
    ]
    asking = {**_SENTINEL_TIMEOUTS, **plain, "retry": Retry(NoBackoff(), 0)}
    sentinel = Sentinel([(host, int(port)) for host, _, port in addresses], sentinel_kwargs=asking)
    return BlockingConnectionPool(
        connection_class=_SentinelTLS if tls else _AskSentinels,
        primary=functools.partial(sentinel.discover_master, match["service"]),
        **_settings(retries),
        **options,
    )


def _settings(retries: int) -> dict[str, Any]:
    # retries bridge a restart of the server on its append-only file, or a failover; each function is safe to call again
    retry = _Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), retries)
    # a call beyond the pool waits for a connection: hundreds of trajectories can finish at the same moment
    return {
        "max_connections": CONNECTIONS,
        "timeout": 60.0,
        "retry": retry,
        "retry_on_error": [RedisConnectionError, RedisTimeoutError],
        "socket_read_size": READ_BYTES,
        **_TIMEOUTS,
    }


def _unusable(url: str, error: Exception) -> str:
    reason = str(error)
    if isinstance(error, OSError):  # from a certificate file, which the ssl module's message does not name
        files = re.findall(rf"(?:{'|'.join(_TLS_FILES)})=[^&]+", url)
        reason = f"{error.strerror or error}: {', '.join(files)}"
    return (
        f"replay.redis_url {hide_password(url)} can't be used ({reason}); give redis://host:port/0, "
        "rediss://host:port/0?ssl_ca_certs=FILE, sentinel://host:port,host:port/SERVICE or unix:///path"
    )


def open_redis(url: str, retries: int = _RETRIES) -> Redis:
    """Return a client with a connection pool for `url` (in one of the forms above). Raises as `make_pool` does."""
    return Redis.from_pool(make_pool(url, retries))


def function_name(function: str) -> str:
    """Return the name of one of this build's functions on the server (_register.lua)."""
    return f"hr_{BUILD}_{function}"


def refusal(text: str) -> ReplayError:
    """Return the exception for `<code> <message>`, the text with which the functions refuse a call."""
    code, _, message = text.partition(" ")
    kind = _BY_CODE.get(code)
    if kind is not None:
        return kind(message)
    if "Function not found" in text:
        return ReplayUnavailable(
            f"the Redis server has no functions of this program's build {BUILD}; start the replay service of the same version"
        )
    remedy = _remedy(text)
    return ReplayUnavailable(f"the Redis server refused the call: {text}" + (f"; {remedy}" if remedy else ""))


def unavailable(error: BaseException, user: str | None = None) -> ReplayError:
    denied = denial(error, user)
    if denied is not None:
        return denied
    remedy = _remedy(str(error))
    if remedy is not None:  # it answers
        return ReplayUnavailable(f"the Redis server can't serve the call now ({error}); {remedy}")
    return ReplayUnavailable(f"the Redis server can't be reached ({error}); start it, or correct replay.redis_url")


def _remedy(text: str) -> str | None:
    """Return what helps a server that refuses calls with `text`; None for any other text."""
    return next((remedy for part, remedy in _REMEDIES.items() if part in text), None)


@contextlib.contextmanager
def keeping_cancellation() -> Iterator[None]:
    """Never lose a cancellation that arrives while the body runs.

    redis-py sends under `asyncio.wait_for`. Before Python 3.12 that drops a cancellation that arrives together with the awaited result, and
    the cancelled task would keep running.
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


class BufferConnection:
    """Calls on one run. `key` is the run's key, which every function takes."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self.redis = redis
        self.key = f"hr:{{{run_id}}}"
        self._user: str | None = redis.connection_pool.connection_kwargs.get("username")
        self._answered = False

    def fcall(self, function: str, *payloads: bytes, **arguments: Any) -> tuple[Any, ...]:
        """Return the command that calls a function with its named arguments, and with the bytes that belong to them."""
        named = (_pack(arguments),) if arguments else ()
        return ("FCALL", function_name(function), 1, self.key, *named, *payloads)

    async def call(self, function: str, *payloads: bytes, **arguments: Any) -> Any:
        return await self.command(*self.fcall(function, *payloads, **arguments))

    async def command(self, *command: Any) -> Any:
        try:
            with keeping_cancellation():
                reply = await self.redis.execute_command(*command)
        except ResponseError as error:
            await self._report(error, [command])
            raise self.make_refusal(error, command) from error
        except (RedisError, OSError) as error:
            raise self._make_error(error) from error
        self._answered = True
        return reply

    async def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Send commands together. Returns their replies in order. The first refusal is raised after all have run."""
        pipe = self.redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        try:
            with keeping_cancellation():
                replies = await pipe.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            raise self._make_error(error) from error
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, ResponseError):
                await self._report(reply, commands)
                raise self.make_refusal(reply, command) from reply
            if isinstance(reply, Exception):
                raise self._make_error(reply) from reply
        self._answered = True
        return replies

    async def _report(self, error: ResponseError, commands: Sequence[Sequence[Any]]) -> None:
        """Tell the buffer that its server was at its memory limit for these commands, so that it makes room, and doesn't count the wait
        against anyone. If a report is lost, the next refusal sends another."""
        if isinstance(error, OutOfMemoryError):
            refused = sum(len(word) for command in commands for word in command if isinstance(word, bytes))
            report = self.fcall("make_room", refused=refused, sheds=False)
            with contextlib.suppress(RedisError, OSError), keeping_cancellation():
                await self.redis.execute_command(*report)

    def _make_error(self, error: Exception) -> ReplayError:
        """Return the error for a call that got no reply."""
        return self._waited_for(unavailable(error, self._user))

    def make_refusal(self, error: ResponseError, command: Sequence[Any]) -> ReplayError:
        """Return the error for a call that the server refuses."""
        if isinstance(error, OutOfMemoryError):
            return ReplayFull(
                "the Redis server is at its maxmemory and accepts no more data; raise maxmemory (at least 1.25 x replay.max_bytes), free "
                "other data on it, or lower replay.max_bytes"
            )
        words = str(error)
        if isinstance(error, AskError):  # redis-py takes off the code, without which the words say nothing
            words = f"the slot is on another node: {words}"
        inside = words.startswith(_DENIED_INSIDE)
        if not isinstance(error, NoPermissionError) and not inside:
            return refusal(words)
        what = " ".join(map(str, command[:2] if command[0] == "FCALL" else command[:1]))
        why = f"inside it, the right to {words.removeprefix(_DENIED_INSIDE)} is missing" if inside else words
        denied = ReplayDenied(
            f"user {self._user or 'default'!r} of the Redis server may not run {what} ({why}); connect as the user of the right role, or "
            "load the ACL that `headrace acl` of this version prints"
        )
        return self._waited_for(denied)

    def _waited_for(self, error: ReplayError) -> ReplayError:
        """Return the error of a call as one that is waited for if it can be put right at the server: one that has answered before, and now
        refuses the login, the certificate or a right, is away like in any other outage."""
        return ReplayUnavailable(str(error)) if self._answered and isinstance(error, ReplayDenied) else error


class WakeupSubscription:
    """A client's subscriptions to its run's wake-ups. Each channel is subscribed at the first wait on it, because a message that wakes no
    task costs the server and its reader as much as one that does."""

    def __init__(self, connection: BufferConnection) -> None:
        self._connection = connection
        self._events: dict[str, asyncio.Event] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}

    async def wait(self, channel: str, timeout_s: float) -> None:
        """Return at a wake-up on `channel` since the last wait, or after `timeout_s` or a second, whichever is less. Raises `ReplayError`
        if the server refuses the subscription."""
        event = self._events.setdefault(channel, asyncio.Event())
        if channel not in self._readers:
            reader = self._readers[channel] = asyncio.create_task(self._read(channel, event))
            reader.add_done_callback(lambda _: event.set())
        with contextlib.suppress(TimeoutError):
            # not wait_for, which before Python 3.12 loses a cancellation that arrives with the wake-up
            async with asyncio.timeout(min(timeout_s, _POLL_S)):
                await event.wait()
        event.clear()
        if self._readers[channel].done():
            self._readers.pop(channel).result()  # the next wait subscribes again

    async def aclose(self) -> None:
        readers = [*self._readers.values()]  # one that waits meanwhile takes its own away
        for reader in readers:
            reader.cancel()
        for reader in readers:
            with contextlib.suppress(asyncio.CancelledError, ReplayError):  # a refusal matters to who waits
                await reader

    async def _read(self, channel: str, event: asyncio.Event) -> None:
        """Read wake-ups from the channel. While the server is away, waits fall back to polling, and their callers get the error."""
        command = ("SUBSCRIBE", f"{self._connection.key}:wake:{channel}")
        while True:
            async with self._connection.redis.pubsub() as pubsub:
                try:
                    with contextlib.suppress(*Unreachable):
                        with keeping_cancellation():
                            await pubsub.subscribe(command[1])
                        event.set()  # events before the subscription was active were missed
                        while True:
                            with keeping_cancellation():
                                message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5.0)
                            if message is not None:
                                event.set()
                except ResponseError as error:
                    raise self._connection.make_refusal(error, command) from error
            await asyncio.sleep(_POLL_S)
