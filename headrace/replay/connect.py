"""From an address to connections: TLS, Redis Sentinel, and what a person must mend told apart from what passes.

    redis://[user:password@]host:port/0
    rediss://[user:password@]host:port/0?ssl_ca_certs=ca.pem&ssl_certfile=client.pem&ssl_keyfile=client.key
    sentinel://[user:password@]host:26379,host:26379,host:26379/SERVICE[/0][?ssl=true&…]
    unix:///path

After a failover the same address leads to another server. A connection that finds itself on a server that became a replica is
closed, so that the next one asks the name (or the sentinels) again.
"""

from __future__ import annotations

import functools
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.errors import ConfigError, ReplayDenied

CONNECTIONS = 32
# Replies are megabytes of payloads; what asyncio takes from the socket at a time.
READ_BYTES = 256 * 1024
_TIMEOUTS = {"socket_connect_timeout": 5.0, "socket_timeout": 30.0}
_TLS_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_SENTINEL = re.compile(r"sentinel://(?P<login>[^@/]*@)?(?P<hosts>[^/?]+)/(?P<service>[^/?]+)(?P<rest>.*)")
_SENTINEL_PORT = 26379
# What OpenSSL calls a refused handshake; a connection that breaks off has other words.
_NO_TLS = re.compile("_ALERT_|WRONG_VERSION|UNSUPPORTED|NO_SHARED|RECORD_LAYER")
T = TypeVar("T")


def shown(url: str) -> str:
    """The address without its password, for logs and messages."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    name = login.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{name}:***@{hosts}" if at else hosts, query=""))


def pool_of(url: str, retries: int) -> BlockingConnectionPool:
    """Connections to `url`. Raises `ConfigError` for an address or a certificate file that can't be used."""
    try:
        pool = _sentinel_pool(url, retries) if url.startswith("sentinel:") else _pool(parse_url(url), retries)
        # a wrong option or file is told now, not by the first call
        probe = pool.connection_class(**pool.connection_kwargs)
        if isinstance(probe, SSLConnection):
            probe.ssl_context.get()
    except (ValueError, TypeError, OSError, RedisError) as error:
        raise ConfigError(_unusable(url, error)) from error
    return pool


class _FollowPrimary(Connection):
    """Leaves a server that has become a replica: writes would be refused there for ever."""

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except ReadOnlyError as error:
            await self.disconnect()
            raise RedisConnectionError("the server has become a replica of another") from error


class _TCP(_FollowPrimary):
    pass


class _TLS(_FollowPrimary, SSLConnection):
    pass


class _AskSentinels(_FollowPrimary):
    """Goes where the sentinels say the primary is, whenever it connects."""

    def __init__(self, *, primary: Callable[[], Awaitable[tuple[str, int]]], **options: Any) -> None:
        super().__init__(**options)
        self._primary = primary

    async def _connect(self) -> None:
        self.host, self.port = await self._primary()
        await super()._connect()


class _SentinelTCP(_AskSentinels):
    pass


class _SentinelTLS(_AskSentinels, SSLConnection):
    pass


class _Retry(Retry):
    """Tries again what may pass; a refused login or certificate stays refused."""

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
    """What a person must mend if `error` is a refused login or certificate; None if it may pass by itself."""
    for cause in _causes(error):
        if isinstance(cause, AuthenticationError | AuthorizationError):
            return ReplayDenied(
                f"the Redis server refuses the login of user {user or 'default'!r} ({cause}); correct user and password in "
                "replay.redis_url, or the server's ACL (`headrace acl` prints one)"
            )
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ReplayDenied(
                f"the Redis server's certificate is refused ({cause.verify_message}); correct ssl_ca_certs in replay.redis_url, "
                "or the host there to a name in the certificate"
            )
        if isinstance(cause, ssl.SSLError) and _NO_TLS.search(cause.reason or ""):
            return ReplayDenied(
                f"no TLS with the Redis server ({cause.reason}); if it asks for a client's certificate, give ssl_certfile "
                "and ssl_keyfile in replay.redis_url; if it speaks no TLS there, write redis:// for rediss://"
            )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _pool(options: Any, retries: int) -> BlockingConnectionPool:
    wanted = options.pop("connection_class", Connection)
    kinds = {Connection: _TCP, SSLConnection: _TLS, UnixDomainSocketConnection: UnixDomainSocketConnection}
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
    sentinel = Sentinel([(host, int(port)) for host, _, port in addresses], sentinel_kwargs={**_TIMEOUTS, **plain})
    return BlockingConnectionPool(
        connection_class=_SentinelTLS if tls else _SentinelTCP,
        primary=functools.partial(sentinel.discover_master, match["service"]),
        **_settings(retries),
        **options,
    )


def _settings(retries: int) -> dict[str, Any]:
    # a restart of the server on its append-only file, or a failover, is bridged; each function is safe to call again
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
    if isinstance(error, OSError):  # of a certificate; the message of the ssl module names no file
        files = re.findall(rf"(?:{'|'.join(_TLS_FILES)})=[^&]+", url)
        reason = f"{error.strerror or error}: {', '.join(files)}"
    return (
        f"replay.redis_url {shown(url)} can't be used ({reason}); give redis://host:port/0, rediss://host:port/0?ssl_ca_certs=FILE, "
        "sentinel://host:port,host:port/SERVICE or unix:///path"
    )
