"""The reward service: the gRPC hub, its worker processes, and its HTTP pages."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from headrace import rpc
from headrace.config import Config
from headrace.service import bind, create_app, serve_http, stop_on_signals
from headrace.v1 import reward_pb2, reward_pb2_grpc
from services.reward.built_in import BuiltInEnvironment
from services.reward.hub import ConfiguredEnvironment, Hub
from services.reward.pool import WorkerPool
from services.reward.served import ServedEnvironment

_log = logging.getLogger("headrace.reward")
_GRACE_S = 2.0


@dataclasses.dataclass(frozen=True)
class Running:
    """Where the service listens. `broken` never returns, but raises the error that ends the service."""

    port: int
    http_port: int
    broken: Callable[[], Awaitable[None]]


def main(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ServiceError`: a busy port, or workers that can't start."""
    asyncio.run(_serve(config))


async def _serve(config: Config) -> None:
    stop = stop_on_signals()
    async with running(config) as service:
        _log.info("reward hub on %s:%d, HTTP on port %d", config.reward.host, service.port, service.http_port)
        stopped, broken = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(service.broken())
        await asyncio.wait([stopped, broken], return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            broken.result()
        for future in (stopped, broken):
            future.cancel()


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Running]:
    """The whole service, while the context is open."""
    reward = config.reward
    async with contextlib.AsyncExitStack() as stack:
        server = rpc.server(reward.max_message_bytes)
        port = rpc.listen(server, reward.host, reward.port, "reward.port")
        http = bind(reward.host, reward.http_port, "reward.http_port")
        stack.callback(http.close)

        built_in = {name: env for name, env in config.env.items() if env.target is None}
        pool = WorkerPool(built_in, reward.workers)
        await pool.start()
        stack.push_async_callback(pool.aclose)
        environments: dict[str, ConfiguredEnvironment] = {}
        for name, env in config.env.items():
            if env.target is None:
                environments[name] = BuiltInEnvironment(name, env, pool)
                continue
            served = ServedEnvironment(name, env, reward.max_message_bytes)
            stack.push_async_callback(served.aclose)
            environments[name] = served

        hub = Hub(environments, config.env)
        reward_pb2_grpc.add_RewardServiceServicer_to_server(hub, server)
        service_name = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
        health = await rpc.add_health_and_reflection(server, [service_name])
        await server.start()
        stack.push_async_callback(server.stop, _GRACE_S)
        stack.push_async_callback(health.enter_graceful_shutdown)
        await stack.enter_async_context(serve_http(create_app("Headrace reward", hub.trouble), http))
        yield Running(port, http.getsockname()[1], pool.broken)
