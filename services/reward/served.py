"""Environments that listen in their own process: the hub dials it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from headrace.base.addresses import GRPC_PROXIES, target_is_local, through_proxy
from headrace.config.environments import EpisodicConfig
from headrace.config.security import SecurityConfig
from headrace.net import rpc, tracing
from headrace.net.credentials import Credentials
from headrace.v1 import environment_pb2, environment_pb2_grpc, episode_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb

from .answers import check_outcome, check_results, make_outcome, make_result
from .backend import Described, Results, Trajectories

_DESCRIBE_TIMEOUT_S = 1.0
# How long an episode waits for another one to end. Its runner's deadlines run meanwhile.
ROOM_WAIT_S = 10.0
# Codes of a call whose connection broke. Without a connection there is no call (`ServedBackend._unreachable`).
_CONNECTION_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# In gRPC's words for a message that is too large, if it is an answer.
_OF_AN_ANSWER = ("CLIENT: Received", "SERVER: Sent")


class ServedBackend:
    """An environment in its own process, which the hub calls at its `address`.

    A call has at most `max_batch_size` trajectories and a deadline of `timeout_s`. Over all callers, the environment never has more than
    its stated capacity, so that it starts work on receipt. Trajectories that were not sent are NOT_STARTED.
    """

    kind = pb.EnvironmentStatus.KIND_SERVED
    awaited = True

    def __init__(
        self,
        name: str,
        env: EpisodicConfig,
        max_message_bytes: int,
        security: SecurityConfig,
        credentials: Credentials | None,
    ) -> None:
        assert env.address is not None
        self._name = name
        self._env = env
        self._target = env.address
        self._channel = rpc.channel(
            env.address,
            max_message_bytes,
            security=None if target_is_local(env.address) else security,
            token=None if credentials is None else credentials.make_token_source(f"environment {name}"),
            keep_alive=env.episodes,  # a call is silent while its program runs, which may take minutes
            proxied=True,
        )
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(self._channel)
        # the description of the process that the channel is connected to
        self._description: environment_pb2.DescribeResponse | None = None
        self._sent = 0  # trajectories that the environment has
        self._calls = 0
        self._episodes = 0  # episodes that the environment runs
        self._freed = asyncio.Event()  # wakes those that wait for an episode to end

    async def score(self, trajectories: Trajectories, timeout_s: float | None) -> Results:
        limit = self._env.timeout_s if timeout_s is None else min(self._env.timeout_s, timeout_s)
        problem = await self._unreachable()
        if problem is not None:
            return [self._result(trajectory_pb2.STATUS_NOT_STARTED, problem)] * len(trajectories)
        assert self._description is not None
        description = self._description
        batches = self._admit(trajectories, description)
        answers = await asyncio.gather(*(self._call(batch, limit, description) for batch in batches))
        results = [result for answer in answers for result in answer]
        full = f"{self._target} is at capacity, or the call had more trajectories than it takes at once"
        return [*results, *[self._result(trajectory_pb2.STATUS_NOT_STARTED, full)] * (len(trajectories) - len(results))]

    async def describe(self) -> Described:
        try:
            described = await self._stub.Describe(environment_pb2.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                self._description = None
                started = self._env.is_started
                away = f"env.{self._name}{'' if started else '.target'} {self._target} can't be reached"
                hint = f"see environment-{self._name}.log" if started else "is it running?"
                last_error = (error.details() or "").rpartition("last error: ")[2]  # the last of several attempts
                return (
                    None,
                    f"{away} ({error.code().name}: {last_error}{through_proxy(self._target, GRPC_PROXIES)}); {hint}",
                )
            described = environment_pb2.DescribeResponse()  # it is running, but can't describe itself
        if not described.capacity and not described.episodes:  # it scores, and states no capacity
            described.capacity = self._env.max_batch_size
        self._description = described
        return described, None

    async def run_episode(self, episode: episode_pb2.Episode, timeout_s: float) -> episode_pb2.EpisodeOutcome:
        began = time.monotonic()
        problem = await self._unreachable() or await self._full(min(timeout_s, ROOM_WAIT_S))
        timeout_s -= time.monotonic() - began
        if problem is not None or self._description is None:
            return make_outcome(trajectory_pb2.STATUS_NOT_STARTED, problem or "", self._name)
        description = self._description
        sent = environment_pb2.EnvironmentServiceRunEpisodeRequest(episode=episode)
        # shorter than the call's deadline, so that an answer at the program's deadline still arrives
        sent.episode.deadline_ms = max(1, round(1000 * rpc.time_before(timeout_s)))
        self._episodes += 1
        try:
            response = await self._stub.RunEpisode(sent, timeout=timeout_s, metadata=_context([episode]))
        except grpc.aio.AioRpcError as error:
            return episode_pb2.EpisodeOutcome(result=self._failure(error, timeout_s))
        finally:
            self._episodes -= 1
            self._freed.set()
            self._freed.clear()
        return check_outcome(response.outcome, self._name, description)

    async def aclose(self) -> None:
        await self._channel.close()

    async def _full(self, within_s: float) -> str | None:
        """Wait up to `within_s` for room for one more episode. Return None once there is room, else why there is none."""
        until = time.monotonic() + within_s
        while (description := self._description) is not None and self._episodes >= description.episodes:
            try:
                # not wait_for, which before Python 3.12 loses a cancellation that arrives with the room
                async with asyncio.timeout(until - time.monotonic() if description.episodes else 0):
                    await self._freed.wait()
            except TimeoutError:
                return f"{self._target} runs {self._episodes} episodes, its maximum"
        return None

    async def _unreachable(self) -> str | None:
        """Return why nothing can be sent, or None if the channel is connected to a process whose capacity is known."""
        if self._description is None or self._channel.get_state() != grpc.ChannelConnectivity.READY:
            return (await self.describe())[1]
        return None

    def _admit(self, trajectories: Trajectories, description: environment_pb2.DescribeResponse) -> list[Trajectories]:
        """Return batches of the first `trajectories`, as many as the environment has room for. They count as sent until `_call` is done."""
        size = self._env.max_batch_size
        if description.calls:
            size = max(1, min(size, description.capacity // description.calls))
        batches = []
        start = 0
        while start < len(trajectories) and not (description.calls and self._calls >= description.calls):
            batch = trajectories[start : start + min(size, description.capacity - self._sent)]
            if not batch:
                break
            self._sent += len(batch)
            self._calls += 1
            batches.append(batch)
            start += len(batch)
        return batches

    async def _call(self, batch: Trajectories, limit: float, description: environment_pb2.DescribeResponse) -> Results:
        try:
            return await self._score(batch, limit, description)
        finally:
            self._sent -= len(batch)
            self._calls -= 1

    async def _score(self, batch: Trajectories, limit: float, description: environment_pb2.DescribeResponse) -> Results:
        request = environment_pb2.EnvironmentServiceScoreRequest(trajectories=batch)
        try:
            response = await self._stub.Score(request, timeout=limit, metadata=_context(batch))
        except grpc.aio.AioRpcError as error:
            if _too_large(error) and len(batch) > 1:  # a single trajectory may be too large: find it, score the others
                half = len(batch) // 2
                return [
                    *await self._score(batch[:half], limit, description),
                    *await self._score(batch[half:], limit, description),
                ]
            return [self._failure(error, limit)] * len(batch)
        return check_results(response.results, batch, self._target, self._name, description)

    def _failure(self, error: grpc.aio.AioRpcError, limit: float) -> trajectory_pb2.Result:
        code, details = error.code(), error.details()
        failure = f"{self._target}: {code.name}: {details}"
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._result(trajectory_pb2.STATUS_TIMED_OUT, f"no answer from {self._target} within {limit:.1f} s")
        if _too_large(error) and any(words in (details or "") for words in _OF_AN_ANSWER):
            return self._result(
                trajectory_pb2.STATUS_FAILED, f"the answer of {failure}; return less metadata, leave less in artifacts"
            )
        if code == grpc.StatusCode.INVALID_ARGUMENT or _too_large(error):
            return self._result(trajectory_pb2.STATUS_INVALID, f"refused by {failure}")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return self._result(trajectory_pb2.STATUS_NOT_STARTED, f"no room at {failure}")
        if code in _CONNECTION_LOST:
            return self._result(
                trajectory_pb2.STATUS_INTERRUPTED,
                f"the environment ended, or the connection broke, during the call: {failure}",
            )
        return self._result(trajectory_pb2.STATUS_FAILED, f"failed at {failure}")

    def _result(self, status: trajectory_pb2.Status.ValueType, message: str) -> trajectory_pb2.Result:
        return make_result(status, message, self._name)


def _context(work: Sequence[trajectory_pb2.Trajectory | episode_pb2.Episode]) -> Sequence[tuple[str, str]]:
    """Return the metadata by which instrumentation continues the trace of a call: that of its first trajectory, or its episode."""
    return tuple(tracing.headers(work[0].traceparent, (each.group_id for each in work)).items())


def _too_large(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the message exceeded gRPC's limit at one of the two ends. gRPC uses the code of an overload for that."""
    return error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or "")
