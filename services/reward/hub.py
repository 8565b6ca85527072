"""The hub: routes every trajectory to its environment, and answers for all of them in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import grpc
import prometheus_client

from headrace import rpc
from headrace.config.data import Env
from headrace.v1 import environment_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc
from headrace.wire import sample_from_wire

RESULTS = prometheus_client.Counter(
    "headrace_reward_results", "Results given by environments", ["environment", "status"]
)
SECONDS = prometheus_client.Histogram(
    "headrace_reward_batch_seconds", "Time an environment took for its part of one Score call", ["environment"]
)


class ConfiguredEnvironment(Protocol):
    """One environment of the run, wherever it runs. `score` gives one result per trajectory, in order, and does not raise."""

    kind: pb.EnvironmentStatus.Kind.ValueType

    async def score(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], timeout_s: float | None
    ) -> list[trajectory_pb2.Result]: ...

    async def describe(self) -> tuple[environment_pb2.DescribeResponse | None, str | None]:
        """What it says of itself, where it can be asked, and why it can't score now, or None."""


class Hub(pb_grpc.RewardServiceServicer):
    def __init__(self, environments: Mapping[str, ConfiguredEnvironment], env: Mapping[str, Env]) -> None:
        self._environments = environments
        self._env = env

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        """Nothing is scored unless every trajectory is well formed (`CodecError` becomes INVALID_ARGUMENT)."""
        by_name: dict[str, list[int]] = {}
        for place, trajectory in enumerate(request.trajectories):
            sample_from_wire(trajectory)
            by_name.setdefault(trajectory.environment, []).append(place)
        limit = rpc.time_to_answer(context)
        parts = [[request.trajectories[place] for place in places] for places in by_name.values()]
        answers = await asyncio.gather(*map(self._score, by_name, parts, [limit] * len(parts)))
        results = {
            place: result
            for places, answer in zip(by_name.values(), answers, strict=True)
            for place, result in zip(places, answer, strict=True)
        }
        return pb.ScoreResponse(results=[results[place] for place in range(len(results))])

    async def Step(self, request: pb.StepRequest, context: grpc.aio.ServicerContext) -> pb.StepResponse:
        return await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "Step (multi-turn) is not in this release; send whole completions to Score"
        )

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AttachResponse]:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            "Attach is not in this release; serve the environment and name its address in env.<name>.target",
        )
        yield pb.AttachResponse()  # never reached: gRPC wants a generator here

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListEnvironmentsResponse:
        return pb.ListEnvironmentsResponse(
            environments=await asyncio.gather(*(self._status(name) for name in sorted(self._environments)))
        )

    async def trouble(self) -> str | None:
        """Why some environment can't score now; None if all can."""
        answers = await asyncio.gather(*(environment.describe() for environment in self._environments.values()))
        return "; ".join(sorted({trouble for _, trouble in answers if trouble})) or None

    async def _score(
        self, name: str, trajectories: Sequence[trajectory_pb2.Trajectory], limit: float | None
    ) -> list[trajectory_pb2.Result]:
        environment = self._environments.get(name)
        if environment is None:
            known = ", ".join(sorted(self._environments)) or "none"
            message = f"environment {name!r} is not one of this run's ({known}); add env.{name} to its configuration"
            refusal = trajectory_pb2.Result(status=trajectory_pb2.STATUS_INVALID, message=message)
            return [refusal] * len(trajectories)
        started = time.monotonic()
        results = await environment.score(trajectories, limit)
        SECONDS.labels(name).observe(time.monotonic() - started)
        for result in results:
            RESULTS.labels(name, trajectory_pb2.Status.Name(result.status).removeprefix("STATUS_")).inc()
        return results

    async def _status(self, name: str) -> pb.EnvironmentStatus:
        environment, env = self._environments[name], self._env[name]
        description, trouble = await environment.describe()
        return pb.EnvironmentStatus(
            name=name,
            kind=environment.kind,
            target=env.target or "",
            description=description,
            ready=trouble is None,
            message=trouble or "",
            timeout_ms=round(1000 * env.timeout_s),
            max_batch_size=env.max_batch_size,
        )
