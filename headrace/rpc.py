"""Shared by all gRPC servers and clients: TLS and tokens, health, reflection, message limits, and INVALID_ARGUMENT for malformed
messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.addresses import with_port
from headrace.credentials import Credentials
from headrace.errors import CodecError, ConfigError, ServiceError
from headrace.service import bind
from headrace.tls import CertificateFiles, Reloading

if TYPE_CHECKING:
    from headrace.config.security import SecurityConfig

MAX_MESSAGE_BYTES = 64 * 1024**2
# In characters, each of up to 12 bytes as it travels. Past 8 KiB gRPC drops the answer, and the caller sees another status.
_LONGEST_REASON = 600
_HEALTH = f"/{health.SERVICE_NAME}/"
REFLECTION = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"


@dataclasses.dataclass(frozen=True)
class RpcAccess:
    """What a server asks of its callers: a token of a role that the method is for. Anybody may call the health service.

    `roles` are those that may call a method, by its full name (the operator, if it isn't there); `environment` stands for every
    environment.
    """

    credentials: Credentials
    roles: Mapping[str, tuple[str, ...]]

    def refusal(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> tuple[grpc.StatusCode, str] | None:
        """Why a call is not answered, or None."""
        if method.startswith(_HEALTH):
            return None
        given = next((str(value) for key, value in metadata if key == "authorization"), "")
        scheme, _, token = given.partition(" ")
        role = self.credentials.role(token.strip()) if scheme.lower() == "bearer" else None
        allowed = self.roles.get(method, ("operator",))
        if role is None:
            return grpc.StatusCode.UNAUTHENTICATED, f"{method}: give the token of {' or '.join(allowed)} (bearer)"
        if role not in allowed and not (role.startswith("environment ") and "environment" in allowed):
            return grpc.StatusCode.PERMISSION_DENIED, f"{method} is not for {role!r}, but for {' or '.join(allowed)}"
        return None


def channel(
    target: str,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    *,
    security: SecurityConfig | None = None,
    token: Callable[[], str] | None = None,
) -> grpc.aio.Channel:
    """A channel to `target` (host:port) that keeps trying to connect, at least every few seconds.

    It is encrypted if `security` says so; `token` gives the caller's token for each call. Raises `ConfigError` for a `security.tls_ca` that
    can't be read.
    """
    options = [*_limits(max_message_bytes), ("grpc.max_reconnect_backoff_ms", 3000)]
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


def server(max_message_bytes: int = MAX_MESSAGE_BYTES, access: RpcAccess | None = None) -> grpc.aio.Server:
    """A server that asks nobody for a token if `access` is None."""
    # With SO_REUSEPORT, a second server on a busy port would start and take half of the calls.
    options = [*_limits(max_message_bytes), ("grpc.so_reuseport", 0)]
    # who may not call is refused before a message of theirs is looked at
    interceptors = [*([] if access is None else [_CheckToken(access)]), _RefuseMalformed()]
    return grpc.aio.server(options=options, interceptors=interceptors)


def listen(server: grpc.aio.Server, host: str, port: int, key: str, certificate: CertificateFiles | None = None) -> int:
    """Bind and return the port (0 takes a free one), with TLS if there is a certificate. Raises `ServiceError` naming `key`, where the port
    was set, `ConfigError` for a certificate that can't be used."""
    bind(host, port, key).close()  # gRPC would also log a busy port
    address = with_port(host, port)
    try:
        bound: int = (
            server.add_insecure_port(address)
            if certificate is None
            else server.add_secure_port(address, _server_credentials(certificate))
        )
    except RuntimeError as error:
        raise ServiceError(f"{key}: can't listen on {address}; free the port or set {key} to another") from error
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


def time_to_answer(context: grpc.aio.ServicerContext) -> float | None:
    """Seconds in which to answer, so that the answer reaches the caller before its deadline; None without a deadline."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else max(0.0, remaining - min(1.0, 0.1 * remaining))


def _limits(max_message_bytes: int) -> list[tuple[str, int]]:
    return [("grpc.max_receive_message_length", max_message_bytes), ("grpc.max_send_message_length", max_message_bytes)]


def _server_credentials(certificate: CertificateFiles) -> grpc.ServerCredentials:
    """Those of a server whose handshakes show the current certificate."""
    reloading = Reloading(certificate)

    def read() -> grpc.ServerCertificateConfiguration:
        pair = (certificate.key.read_bytes(), certificate.chain.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair])

    # gRPC asks before each handshake; None keeps what it has
    return grpc.dynamic_ssl_server_credentials(read(), lambda: read() if reloading.changed() else None)


class _PresentToken(grpc.aio.UnaryUnaryClientInterceptor):
    """Adds the caller's token to each call; it is asked for anew, so that a replaced one is used at once."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    async def intercept_unary_unary(
        self, continuation: Callable[..., Awaitable[Any]], details: Any, request: Any
    ) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add("authorization", f"Bearer {self._token()}")
        return await continuation(details._replace(metadata=metadata), request)


class _CheckToken(grpc.aio.ServerInterceptor):
    """Refuses calls without the token of a role that the method is for."""

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

        async def refuse_stream(_: Any, context: grpc.aio.ServicerContext) -> Any:
            await context.abort(code, reason)
            yield  # never reached: gRPC requires a generator

        # without deserializers: no byte of theirs is decoded
        if handler.request_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.response_streaming
                else grpc.stream_unary_rpc_method_handler
            )
        else:
            make = (
                grpc.unary_stream_rpc_method_handler
                if handler.response_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(refuse_stream if handler.response_streaming else refuse)


class _RefuseMalformed(grpc.aio.ServerInterceptor):
    """Answers bytes that don't decode, or a message with a malformed field, with INVALID_ARGUMENT and the reason.

    gRPC itself would answer INTERNAL, or UNKNOWN with a stack trace in the log.
    """

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler

        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                message = handler.request_deserializer(request) if handler.request_deserializer else request
                return await handler.unary_unary(message, context)
            except DecodeError as error:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, f"{details.method}: not a message of it ({error})"
                )
            except CodecError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:_LONGEST_REASON])

        return grpc.unary_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)
