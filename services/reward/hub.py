"""The hub: routes every trajectory to its environment, and answers for all of them by the caller's deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc
import prometheus_client

from headrace import rpc
from headrace.config.data import EnvConfig
from headrace.config.security import SecurityConfig
from headrace.credentials import Credentials
from headrace.exposure import target_is_local
from headrace.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc
from headrace.wire import sample_from_wire, score_from_wire, score_to_wire
from headrace_services.reward.pool import WorkerPool

_DESCRIBE_TIMEOUT_S = 1.0
RESULTS = prometheus_client.Counter(
    "headrace_reward_results", "Results given by environments", ["environment", "status"]
)
SECONDS = prometheus_client.Histogram(
    "headrace_reward_batch_seconds", "Time an environment took for its part of one Score call", ["environment"]
)


class BuiltInBackend:
    """A built-in environment, scored by the hub's worker processes. Each trajectory gets `timeout_s` of a worker's time."""

    kind = pb.EnvironmentStatus.KIND_BUILT_IN

    def __init__(self, name: str, env: EnvConfig, pool: WorkerPool) -> None:
        self._name = name
        self._env = env
        self._pool = pool

    async def score(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], timeout_s: float | None
    ) -> list[trajectory_pb2.Result]:
        """One result per trajectory, in order, within `timeout_s`. Does not raise."""
        pending = [self._pool.submit(trajectory, self._env.timeout_s) for trajectory in trajectories]
        try:
            await asyncio.wait(pending, timeout=timeout_s)
            late = trajectory_pb2.Result(
                status=trajectory_pb2.STATUS_TIMED_OUT,
                message=f"no worker had scored it when the caller's deadline came ({timeout_s or 0:.1f} s)",
                environment=self._name,
            )
            results = [future.result() if future.done() else late for future in pending]
        finally:
            for future in pending:
                future.cancel()
        for result in results:
            result.environment = result.environment or self._name
        return results

    async def describe(self) -> tuple[environment_pb2.DescribeResponse | None, str | None]:
        """(its description, or None if it can't be asked; the reason why it can't score now, or None)."""
        name = self._env.type or self._name
        description = environment_pb2.DescribeResponse(
            name=self._name, description=f"built-in {name}", sandbox=self._pool.level
        )
        return description, self._pool.problem()


class RemoteBackend:
    """An environment in a process of its own, which the hub calls at `env.<name>.target`.

    A call has at most `max_batch_size` trajectories and a deadline of `timeout_s`; it waits for a process that is not up yet.
    """

    kind = pb.EnvironmentStatus.KIND_SERVED

    def __init__(
        self,
        name: str,
        env: EnvConfig,
        max_message_bytes: int,
        security: SecurityConfig,
        credentials: Credentials | None,
    ) -> None:
        assert env.target is not None
        self._name = name
        self._env = env
        self._target = env.target
        self._channel = rpc.channel(
            env.target,
            max_message_bytes,
            security=None if target_is_local(env.target) else security,
            token=None if credentials is None else credentials.presented(f"environment {name}"),
        )
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(self._channel)

    async def score(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], timeout_s: float | None
    ) -> list[trajectory_pb2.Result]:
        """As `BuiltInBackend.score`."""
        size = self._env.max_batch_size
        batches = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
        limit = self._env.timeout_s if timeout_s is None else min(self._env.timeout_s, timeout_s)
        answers = await asyncio.gather(*(self._call(batch, limit) for batch in batches))
        return [result for answer in answers for result in answer]

    async def describe(self) -> tuple[environment_pb2.DescribeResponse | None, str | None]:
        try:
            return await self._stub.Describe(environment_pb2.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S), None
        except grpc.aio.AioRpcError as error:
            return None, f"env.{self._name}.target {self._target} can't be reached ({error.details()})"

    async def aclose(self) -> None:
        await self._channel.close()

    async def _call(self, batch: Sequence[trajectory_pb2.Trajectory], limit: float) -> list[trajectory_pb2.Result]:
        request = environment_pb2.EnvironmentServiceScoreRequest(trajectories=batch)
        try:
            response = await self._stub.Score(request, timeout=limit, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return [self._failure(error, limit)] * len(batch)
        if len(response.results) != len(batch):
            wrong = f"{self._target} answered {len(response.results)} results for {len(batch)} trajectories"
            return [self._result(trajectory_pb2.STATUS_FAILED, wrong)] * len(batch)
        return [score_to_wire(score_from_wire(result)) for result in response.results]

    def _failure(self, error: grpc.aio.AioRpcError, limit: float) -> trajectory_pb2.Result:
        code, details = error.code(), error.details()
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            if self._channel.get_state() == grpc.ChannelConnectivity.READY:
                late = f"no answer from {self._target} within {limit:.1f} s"
                return self._result(trajectory_pb2.STATUS_TIMED_OUT, late)
            away = f"env.{self._name}.target {self._target} could not be reached within {limit:.1f} s; is it running?"
            return self._result(trajectory_pb2.STATUS_FAILED, away)
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return self._result(trajectory_pb2.STATUS_INVALID, f"{self._target} refused it: {details}")
        return self._result(trajectory_pb2.STATUS_FAILED, f"{self._target} failed: {code.name}: {details}")

    def _result(self, status: trajectory_pb2.Status.ValueType, message: str) -> trajectory_pb2.Result:
        return trajectory_pb2.Result(status=status, message=message, environment=self._name)


EnvironmentBackend = BuiltInBackend | RemoteBackend


class Hub(pb_grpc.RewardServiceServicer):
    """The gRPC service over all environments of the run, wherever each runs."""

    def __init__(self, environments: Mapping[str, EnvironmentBackend], env: Mapping[str, EnvConfig]) -> None:
        self._environments = environments
        self._env = env

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        """Score all trajectories, or none if one is malformed (`CodecError` becomes INVALID_ARGUMENT)."""
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
        yield pb.AttachResponse()  # never reached: gRPC requires a generator

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListEnvironmentsResponse:
        return pb.ListEnvironmentsResponse(
            environments=await asyncio.gather(*(self._status(name) for name in sorted(self._environments)))
        )

    async def problem(self) -> str | None:
        """Why some environment can't score now; None if all can."""
        answers = await asyncio.gather(*(environment.describe() for environment in self._environments.values()))
        return "; ".join(sorted({problem for _, problem in answers if problem})) or None

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
        description, problem = await environment.describe()
        return pb.EnvironmentStatus(
            name=name,
            kind=environment.kind,
            target=env.target or "",
            description=description,
            ready=problem is None,
            message=problem or "",
            timeout_ms=round(1000 * env.timeout_s),
            max_batch_size=env.max_batch_size,
        )
