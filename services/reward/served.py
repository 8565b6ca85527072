"""An environment in a process of its own, which the hub dials at `env.<name>.target`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from headrace import rpc
from headrace.config.data import Env
from headrace.v1 import environment_pb2 as pb
from headrace.v1 import environment_pb2_grpc as pb_grpc
from headrace.v1 import reward_pb2, trajectory_pb2
from headrace.wire import score_from_wire, score_to_wire

_DESCRIBE_TIMEOUT_S = 1.0


class ServedEnvironment:
    """Calls of at most `max_batch_size` trajectories, each with a deadline of `timeout_s`; waits for a process that is not up yet."""

    kind = reward_pb2.EnvironmentStatus.KIND_SERVED

    def __init__(self, name: str, env: Env, max_message_bytes: int) -> None:
        assert env.target is not None
        self._name = name
        self._env = env
        self._target = env.target
        self._channel = rpc.channel(env.target, max_message_bytes)
        self._stub = pb_grpc.EnvironmentServiceStub(self._channel)

    async def score(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], timeout_s: float | None
    ) -> list[trajectory_pb2.Result]:
        size = self._env.max_batch_size
        batches = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
        limit = self._env.timeout_s if timeout_s is None else min(self._env.timeout_s, timeout_s)
        answers = await asyncio.gather(*(self._call(batch, limit) for batch in batches))
        return [result for answer in answers for result in answer]

    async def describe(self) -> tuple[pb.DescribeResponse | None, str | None]:
        try:
            return await self._stub.Describe(pb.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S), None
        except grpc.aio.AioRpcError as error:
            return None, f"env.{self._name}.target {self._target} can't be reached ({error.details()})"

    async def aclose(self) -> None:
        await self._channel.close()

    async def _call(self, batch: Sequence[trajectory_pb2.Trajectory], limit: float) -> list[trajectory_pb2.Result]:
        request = pb.EnvironmentServiceScoreRequest(trajectories=batch)
        try:
            response = await self._stub.Score(request, timeout=limit, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return [self._refusal(error, limit)] * len(batch)
        if len(response.results) != len(batch):
            wrong = f"{self._target} answered {len(response.results)} results for {len(batch)} trajectories"
            return [self._result(trajectory_pb2.STATUS_FAILED, wrong)] * len(batch)
        return [score_to_wire(score_from_wire(result)) for result in response.results]

    def _refusal(self, error: grpc.aio.AioRpcError, limit: float) -> trajectory_pb2.Result:
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
