"""Shared by all gRPC servers: health, reflection, message limits, and INVALID_ARGUMENT for malformed messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.errors import CodecError, ServiceError
from headrace.service import bind

MAX_MESSAGE_BYTES = 64 * 1024**2


def channel(target: str, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """An unencrypted channel to `target` (host:port) that keeps trying to connect, at least every few seconds."""
    return grpc.aio.insecure_channel(
        target, options=[*_limits(max_message_bytes), ("grpc.max_reconnect_backoff_ms", 3000)]
    )


def server(max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Server:
    # With SO_REUSEPORT, a second server on a busy port would start and take half of the calls.
    options = [*_limits(max_message_bytes), ("grpc.so_reuseport", 0)]
    return grpc.aio.server(options=options, interceptors=[_RefuseMalformed()])


def listen(server: grpc.aio.Server, host: str, port: int, key: str) -> int:
    """Bind and return the port (0 takes a free one). Raises `ServiceError` naming `key`, where the port was set."""
    bind(host, port, key).close()  # gRPC would also log a busy port
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound: int = server.add_insecure_port(address)
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
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

        return grpc.unary_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)
