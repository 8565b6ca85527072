"""Serves one environment over gRPC: `EnvironmentService`, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc

from headrace import rpc
from headrace.environment import Environment, Judge
from headrace.service import stop_on_signals
from headrace.v1 import environment_pb2 as pb
from headrace.v1 import environment_pb2_grpc as pb_grpc
from headrace.wire import sample_from_wire, score_to_wire

_log = logging.getLogger("headrace.environment")
_GRACE_S = 2.0


async def serve_until_signal(environment: Environment, host: str, port: int) -> None:
    stop = stop_on_signals()
    async with serving(environment, host, port) as bound:
        _log.info("environment %s listens on %s:%d", environment.label, host, bound)
        await stop.wait()


@contextlib.asynccontextmanager
async def serving(environment: Environment, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """Serve while the context is open; yields the port. On the way out running calls get two seconds to finish."""
    server = rpc.server()
    pb_grpc.add_EnvironmentServiceServicer_to_server(_Servicer(environment), server)
    bound = rpc.listen(server, host, port, "port")
    health = await rpc.add_health_and_reflection(
        server, [pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name]
    )
    await server.start()
    try:
        yield bound
    finally:
        await health.enter_graceful_shutdown()
        await asyncio.shield(server.stop(_GRACE_S))


class _Servicer(pb_grpc.EnvironmentServiceServicer):
    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._judge = Judge(environment)

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            name=self._environment.label, build=self._environment.build, description=self._environment.description
        )

    async def Score(
        self, request: pb.EnvironmentServiceScoreRequest, context: grpc.aio.ServicerContext
    ) -> pb.EnvironmentServiceScoreResponse:
        samples = [sample_from_wire(trajectory) for trajectory in request.trajectories]
        scores = await self._judge.score(samples, rpc.time_to_answer(context))
        return pb.EnvironmentServiceScoreResponse(results=[score_to_wire(score) for score in scores])

    async def Step(
        self, request: pb.EnvironmentServiceStepRequest, context: grpc.aio.ServicerContext
    ) -> pb.EnvironmentServiceStepResponse:
        return await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "Step (multi-turn) is not in this release; the environment answers Score"
        )
