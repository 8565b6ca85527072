"""An environment as any language can serve one: nothing of the SDK stands between what it answers and who asks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from headrace.net import rpc
from headrace.v1 import environment_pb2 as pb
from headrace.v1 import environment_pb2_grpc, episode_pb2, trajectory_pb2

Request = pb.EnvironmentServiceScoreRequest
Play = Callable[[episode_pb2.Episode], Awaitable[episode_pb2.EpisodeOutcome]]
Answer = Callable[[Request, grpc.aio.ServicerContext], Awaitable[list[trajectory_pb2.Result]]]


def scored(reward: float) -> trajectory_pb2.Result:
    return trajectory_pb2.Result(status=trajectory_pb2.STATUS_SCORED, reward=reward, environment="raw", build="1")


@contextlib.asynccontextmanager
async def raw_environment(
    answer: Answer | None = None, play: Play | None = None, **description: Any
) -> AsyncIterator[str]:
    """Answers `Score` and `RunEpisode` so, and `Describe` with these fields; yields its host:port."""
    described = pb.DescribeResponse(**{"name": "raw", "build": "1", "capacity": 64, **description})

    class Servicer(environment_pb2_grpc.EnvironmentServiceServicer):
        async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
            return described

        async def Score(
            self, request: Request, context: grpc.aio.ServicerContext
        ) -> pb.EnvironmentServiceScoreResponse:
            assert answer is not None
            return pb.EnvironmentServiceScoreResponse(results=await answer(request, context))

        async def RunEpisode(
            self, request: pb.EnvironmentServiceRunEpisodeRequest, context: grpc.aio.ServicerContext
        ) -> pb.EnvironmentServiceRunEpisodeResponse:
            assert play is not None
            return pb.EnvironmentServiceRunEpisodeResponse(outcome=await play(request.episode))

    server = rpc.server(keep_alive=play is not None)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(Servicer(), server)
    await rpc.add_health_and_reflection(server, [pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name])
    port = rpc.listen(server, "127.0.0.1", 0, "port")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
