"""Code shared by all gRPC servers and clients: TLS and tokens, health, reflection, message limits, and INVALID_ARGUMENT for malformed
messages."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.base.addresses import target_is_local, with_port
from headrace.base.errors import CodecError, ConfigError, Unavailable
from headrace.base.tls import CertificateFiles, Reloading
from headrace.net.credentials import Credentials
from headrace.net.service import admitting, bind, most_connections

MAX_MESSAGE_BYTES = 64 * 1024**2
# In characters, each of up to 12 bytes on the wire. Beyond 8 KiB gRPC drops the answer, and the caller sees another status.
_LONGEST_REASON = 600
_HEALTH = f"/{health.SERVICE_NAME}/"
# For both ends of a long stream: a peer that answers no pings is detected within ten seconds, even if its host or a NAT failed silently.
_PING_MS, _PING_TIMEOUT_MS = 3000, 7000
_KEEP_ALIVE = [
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # otherwise a server treats a caller that pings this often as an attacker
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 2),
]
# For a server that may not accept pings: one an hour. gRPC also makes the timeout TCP's (TCP_USER_TIMEOUT): a connection is closed when
# what was sent is not acknowledged for so long. By itself, TCP gives up a machine that is gone after a quarter of an hour.
_WITHOUT_PINGS = [("grpc.keepalive_time_ms", 3_600_000), ("grpc.keepalive_timeout_ms", 10_000)]
# For every server, of callers of whom nothing is known yet. Metadata has a limit of its own in gRPC: 16 KiB, of which it promises 8.
_STRANGERS = [
    ("grpc.server_handshake_timeout_ms", 15_000),  # TLS and the first frame of HTTP/2
    ("grpc.max_connection_idle_ms", 300_000),  # without a call
    ("grpc.max_concurrent_streams", 1000),
]
REFLECTION = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"


class TlsSettings(Protocol):
    """A caller's requirements of a server: with `tls`, a certificate signed by an authority in file `tls_ca`. The `security` section is one
    implementation."""

    @property
    def tls(self) -> bool: ...
    @property
    def tls_ca(self) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class RpcAccess:
    """A server's requirements of its callers: a token of a role that may call the method. The health service is open to all.

    `roles` lists the roles that may call a method, by its full name (unlisted: the operator). `environment` stands for every
    environment.
    """

    credentials: Credentials
    roles: Mapping[str, tuple[str, ...]]

    def role(self, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        """Return the caller's role; None without a known token."""
        given = next((str(value) for key, value in metadata if key == "authorization"), "")
        scheme, _, token = given.partition(" ")
        return self.credentials.role(token.strip()) if scheme.lower() == "bearer" else None

    def refusal(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> tuple[grpc.StatusCode, str] | None:
        """Return why a call is refused, or None."""
        if method.startswith(_HEALTH):
            return None
        role = self.role(metadata)
        allowed = self.roles.get(method, ("operator",))
        if role is None:
            return grpc.StatusCode.UNAUTHENTICATED, f"{method}: give the token of {' or '.join(allowed)} (bearer)"
        if role not in allowed and not (role.startswith("environment ") and "environment" in allowed):
            return (
                grpc.StatusCode.PERMISSION_DENIED,
                f"{role!r} may not call {method}; it is for {' or '.join(allowed)}",
            )
        return None


def channel(
    target: str,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    *,
    security: TlsSettings | None = None,
    token: Callable[[], str] | None = None,
    keep_alive: bool = False,
    proxied: bool = False,
) -> grpc.aio.Channel:
    """Return a channel to `target` (host:port) that keeps trying to connect, at least every few seconds.

    It is encrypted if `security` requires it. `token` returns the caller's token for each call (not for streams). With `keep_alive` it
    detects a server that fell silent, also while it waits for an answer; the server must be Headrace's, as others don't accept so many
    pings. With `proxied`, for a user's own server, the proxy in the environment leads to a target that is not on this machine. Raises
    `ConfigError` for a `security.tls_ca` that can't be read.
    """
    options = [
        *_limits(max_message_bytes),
        *(_KEEP_ALIVE if keep_alive else _WITHOUT_PINGS),
        ("grpc.enable_http_proxy", int(proxied and not target_is_local(target))),
        ("grpc.max_reconnect_backoff_ms", 3000),
    ]
    interceptors = [] if token is None else [_PresentToken(token)]
    if security is None or not security.tls:
        return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
    try:
        authorities = None if security.tls_ca is None else Path(security.tls_ca).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"security.tls_ca {security.tls_ca} can't be read ({error.strerror}); give the ca.pem that `headrace certs` made"
        ) from error
    return grpc.aio.secure_channel(
        target, grpc.ssl_channel_credentials(authorities), options=options, interceptors=interceptors
    )


def bearer(token: str) -> tuple[str, str]:
    """Return the metadata that presents a token."""
    return "authorization", f"Bearer {token}"


def server(
    max_message_bytes: int = MAX_MESSAGE_BYTES, access: RpcAccess | None = None, *, keep_alive: bool = False
) -> grpc.aio.Server:
    """Return a server. Without `access` it requires no token. With `keep_alive` it detects callers that fell silent."""
    # With SO_REUSEPORT, a second server on a busy port would start and take half of the calls.
    options = [
        *_limits(max_message_bytes),
        *_STRANGERS,
        ("grpc.max_allowed_incoming_connections", most_connections()),
        *(_KEEP_ALIVE if keep_alive else []),
        ("grpc.so_reuseport", 0),
    ]
    # callers without permission are refused before their messages are decoded
    interceptors = [*([] if access is None else [_CheckToken(access)]), _RefuseMalformed()]
    return grpc.aio.server(options=options, interceptors=interceptors)


def listen(server: grpc.aio.Server, host: str, port: int, key: str, certificate: CertificateFiles | None = None) -> int:
    """Bind and return the port (0 chooses a free one), with TLS if there is a certificate. A `host` unix:PATH is a socket, which has no
    port (0 is returned). Raises `ServiceError` naming `key`, where the port was set, `ConfigError` for a certificate that can't be used."""
    if host.startswith("unix:"):
        server.add_insecure_port(host)
        return 0
    bind(host, port, key).close()  # gRPC would also log a busy port
    address = with_port(host, port)
    try:
        with admitting(port):
            bound: int = (
                server.add_insecure_port(address)
                if certificate is None
                else server.add_secure_port(address, _server_credentials(certificate))
            )
    except RuntimeError as error:
        raise Unavailable(f"{key}: can't listen on {address}; free the port or set {key} to another") from error
    return bound


async def add_health_and_reflection(server: grpc.aio.Server, services: Iterable[str]) -> health.aio.HealthServicer:
    """Register both for `services` (full names); everything is SERVING until `enter_graceful_shutdown`."""
    names = [*services, health.SERVICE_NAME]
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    for name in ("", *names):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return servicer


def time_to_answer(context: grpc.aio.ServicerContext, most_s: float = 1.0) -> float | None:
    """Return the seconds in which to answer, so that the answer reaches the caller before its deadline; None without a deadline."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else time_before(remaining, most_s)


def time_before(deadline_s: float, most_s: float = 1.0) -> float:
    """Return the seconds in which to answer, if the answer is due at the caller in `deadline_s`: a tenth less, but at most `most_s`."""
    return max(0.0, deadline_s - min(most_s, 0.1 * deadline_s))


def _limits(max_message_bytes: int) -> list[tuple[str, int]]:
    return [("grpc.max_receive_message_length", max_message_bytes), ("grpc.max_send_message_length", max_message_bytes)]


def _server_credentials(certificate: CertificateFiles) -> grpc.ServerCredentials:
    """Return the credentials of a server whose handshakes use the current certificate."""
    reloading = Reloading(certificate)

    def read() -> grpc.ServerCertificateConfiguration:
        pair = (certificate.key.read_bytes(), certificate.chain.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair])

    # gRPC calls this before each handshake; None keeps the certificate
    return grpc.dynamic_ssl_server_credentials(read(), lambda: read() if reloading.reload() else None)


class _PresentToken(grpc.aio.UnaryUnaryClientInterceptor):
    """Adds the caller's token to each call. It is read each time, so that a replaced token is used at once."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    async def intercept_unary_unary(
        self, continuation: Callable[..., Awaitable[Any]], details: Any, request: Any
    ) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(*bearer(self._token()))
        return await continuation(details._replace(metadata=metadata), request)


class _CheckToken(grpc.aio.ServerInterceptor):
    """Refuses calls without the token of a role that may call the method."""

    def __init__(self, access: RpcAccess) -> None:
        self._access = access

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        refused = self._access.refusal(details.method, details.invocation_metadata)
        if handler is None or refused is None:
            return handler
        code, reason = refused

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> Any:
            await context.abort(code, reason)
            yield  # never reached: gRPC requires a generator

        # a stream without deserializers, whatever the method is: no byte of the call is read or decoded
        return grpc.stream_stream_rpc_method_handler(refuse)


class _RefuseMalformed(grpc.aio.ServerInterceptor):
    """Answers bytes that don't decode, or a message with a malformed field, with INVALID_ARGUMENT and the reason.

    gRPC itself would answer INTERNAL, or UNKNOWN with a stack trace in the log.
    """

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or (handler.unary_unary is None and handler.stream_stream is None):
            return handler
        decode = handler.request_deserializer or (lambda request: request)

        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                return await handler.unary_unary(decode(request), context)
            except (DecodeError, CodecError) as error:
                await refuse(error, context)

        async def answer_stream(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[Any]:
            try:
                async for message in handler.stream_stream((decode(request) async for request in requests), context):
                    yield message
            except (DecodeError, CodecError) as error:
                await refuse(error, context)

        async def refuse(error: Exception, context: grpc.aio.ServicerContext) -> None:
            reason = (
                f"{details.method}: not a valid message ({error})" if isinstance(error, DecodeError) else str(error)
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason[:_LONGEST_REASON])

        if handler.unary_unary is None:
            return grpc.stream_stream_rpc_method_handler(answer_stream, response_serializer=handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)
