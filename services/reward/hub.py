"""The hub: routes every trajectory to its environment, and returns a result for each by the caller's deadline."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import grpc
import prometheus_client

from headrace.base.addresses import GRPC_PROXIES, target_is_local, through_proxy
from headrace.base.errors import CodecError
from headrace.config.environments import AttachedConfig, CodeConfig, EnvConfig, EpisodicConfig, SandboxedConfig
from headrace.config.security import SecurityConfig
from headrace.env.wire import check_trajectory, episode_from_wire, fit_results
from headrace.net import rpc
from headrace.net.credentials import Credentials
from headrace.v1 import environment_pb2, environment_pb2_grpc, episode_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc
from headrace_services.reward.answers import check_outcome, check_results, make_outcome, make_result
from headrace_services.reward.attached import AttachedBackend, AttachedStream
from headrace_services.reward.pool import WorkerPool
from headrace_services.reward.recent import RecentResults

_DESCRIBE_TIMEOUT_S = 1.0
# How long an episode waits for another one to end. Its runner's deadlines run meanwhile.
ROOM_WAIT_S = 10.0
# Trajectories of a built-in environment per worker, including the one that it is scoring.
_AHEAD_OF_A_WORKER = 16
RESULTS = prometheus_client.Counter(
    "headrace_reward_results", "Results given by environments", ["environment", "status"]
)
SECONDS = prometheus_client.Histogram(
    "headrace_reward_batch_seconds", "Time an environment took for its part of one Score call", ["environment"]
)


class BuiltInBackend:
    """A built-in environment, scored by the hub's worker processes. Each trajectory gets `timeout_s` of a worker's time.

    Its capacity counts the trajectories that workers are scoring, and those that wait for them here, so that no worker is idle between two
    calls. A trajectory's time does not run while it waits. If no worker gets to it by the caller's deadline, it is NOT_STARTED.

    Programs that sleep come on top: they need no worker. Since any program may sleep, each has a call of its own, so that no other waits
    for its result.
    """

    kind = pb.EnvironmentStatus.KIND_BUILT_IN
    awaited = False

    def __init__(self, name: str, env: SandboxedConfig, pool: WorkerPool, workers: int) -> None:
        self._name = name
        self._env = env
        self._pool = pool
        self._capacity = workers * _AHEAD_OF_A_WORKER

    async def score(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], timeout_s: float | None
    ) -> list[trajectory_pb2.Result]:
        """Return one result per trajectory, in order, within `timeout_s`. Does not raise."""
        pending = self._pool.submit(trajectories, self._env.timeout_s)
        try:
            await asyncio.wait(pending, timeout=timeout_s)
            late = trajectory_pb2.Result(
                status=trajectory_pb2.STATUS_NOT_STARTED,
                message=f"no worker had finished it by the caller's deadline ({timeout_s or 0:.1f} s)",
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
        """Return the environment's description, or None if it can't be asked; and why it can't score now, or None if it can."""
        capacity = self._capacity + self._pool.asleep
        description = environment_pb2.DescribeResponse(
            name=self._name,
            build=self._pool.builds.get(self._name, ""),
            description=f"built-in {self._env.type}",
            capacity=capacity,
            calls=capacity if isinstance(self._env, CodeConfig) else 0,
            sandbox=self._pool.level,
        )
        return description, self._pool.problem()


class RemoteBackend:
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

    async def score(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], timeout_s: float | None
    ) -> list[trajectory_pb2.Result]:
        """Score trajectories, like `BuiltInBackend.score`."""
        limit = self._env.timeout_s if timeout_s is None else min(self._env.timeout_s, timeout_s)
        problem = await self._unreachable()
        if problem is not None:
            return [self._result(trajectory_pb2.STATUS_NOT_STARTED, problem)] * len(trajectories)
        assert self._description is not None
        description = self._complete_description(self._description)
        batches = self._admit(trajectories, description)
        answers = await asyncio.gather(*(self._call(batch, limit, description) for batch in batches))
        results = [result for answer in answers for result in answer]
        full = f"{self._target} is at capacity, or the call had more trajectories than it takes at once"
        return [
            *results,
            *[self._result(trajectory_pb2.STATUS_NOT_STARTED, full)] * (len(trajectories) - len(results)),
        ]

    async def describe(self) -> tuple[environment_pb2.DescribeResponse | None, str | None]:
        """Describe the environment, like `BuiltInBackend.describe`."""
        try:
            self._description = await self._stub.Describe(
                environment_pb2.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:  # it is running, but can't describe itself
                self._description = environment_pb2.DescribeResponse()
                return self._complete_description(self._description), None
            self._description = None
            started = self._env.is_started
            away = f"env.{self._name}{'' if started else '.target'} {self._target} can't be reached"
            hint = f"see environment-{self._name}.log" if started else "is it running?"
            said = (error.details() or "").rpartition("last error: ")[2]  # the last of several attempts
            return None, f"{away} ({error.code().name}: {said}{through_proxy(self._target, GRPC_PROXIES)}); {hint}"
        return self._complete_description(self._description), None

    async def run_episode(self, episode: episode_pb2.Episode, timeout_s: float) -> episode_pb2.EpisodeOutcome:
        """Run the episode, and return its outcome within `timeout_s`. Does not raise. Cancellation cancels the program."""
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
            response = await self._stub.RunEpisode(sent, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return episode_pb2.EpisodeOutcome(result=self._failure(error, timeout_s))
        finally:
            self._episodes -= 1
            self._freed.set()
            self._freed.clear()
        return check_outcome(response.outcome, self._name, description)

    async def aclose(self) -> None:
        await self._channel.close()

    def _complete_description(self, description: environment_pb2.DescribeResponse) -> environment_pb2.DescribeResponse:
        """Return the description, with a default capacity if the environment scores but states none."""
        if description.capacity or description.episodes:
            return description
        stated = environment_pb2.DescribeResponse()
        stated.CopyFrom(description)
        stated.capacity = self._env.max_batch_size
        return stated

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

    def _admit(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], description: environment_pb2.DescribeResponse
    ) -> list[Sequence[trajectory_pb2.Trajectory]]:
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

    async def _call(
        self,
        batch: Sequence[trajectory_pb2.Trajectory],
        limit: float,
        description: environment_pb2.DescribeResponse,
    ) -> list[trajectory_pb2.Result]:
        try:
            return await self._score(batch, limit, description)
        finally:
            self._sent -= len(batch)
            self._calls -= 1

    async def _score(
        self,
        batch: Sequence[trajectory_pb2.Trajectory],
        limit: float,
        description: environment_pb2.DescribeResponse,
    ) -> list[trajectory_pb2.Result]:
        request = environment_pb2.EnvironmentServiceScoreRequest(trajectories=batch)
        try:
            response = await self._stub.Score(request, timeout=limit)
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
        said = f"{self._target}: {code.name}: {details}"
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._result(trajectory_pb2.STATUS_TIMED_OUT, f"no answer from {self._target} within {limit:.1f} s")
        if _too_large(error) and any(words in (details or "") for words in _OF_AN_ANSWER):
            return self._result(
                trajectory_pb2.STATUS_FAILED, f"the answer of {said}; return less metadata, leave less in artifacts"
            )
        if code == grpc.StatusCode.INVALID_ARGUMENT or _too_large(error):
            return self._result(trajectory_pb2.STATUS_INVALID, f"refused by {said}")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return self._result(trajectory_pb2.STATUS_NOT_STARTED, f"no room at {said}")
        if code in _CONNECTION_LOST:
            return self._result(
                trajectory_pb2.STATUS_INTERRUPTED,
                f"the environment ended, or the connection broke, during the call: {said}",
            )
        return self._result(trajectory_pb2.STATUS_FAILED, f"failed at {said}")

    def _result(self, status: trajectory_pb2.Status.ValueType, message: str) -> trajectory_pb2.Result:
        return make_result(status, message, self._name)


# Codes of a call whose connection broke. Without a connection there is no call (`RemoteBackend._unreachable`).
_CONNECTION_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


# In gRPC's words for a message that is too large, if it is an answer.
_OF_AN_ANSWER = ("CLIENT: Received", "SERVER: Sent")


def _too_large(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the message exceeded gRPC's limit at one of the two ends. gRPC uses the code of an overload for that."""
    return error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or "")


class EnvironmentBackend(Protocol):
    """An environment as the hub calls it, wherever it runs. `BuiltInBackend` documents the methods."""

    kind: pb.EnvironmentStatus.Kind.ValueType
    # Whether the run waits for it while it can't score. If not, the hub is not ready then.
    awaited: bool

    async def score(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], timeout_s: float | None
    ) -> list[trajectory_pb2.Result]: ...

    async def describe(self) -> tuple[environment_pb2.DescribeResponse | None, str | None]: ...


@runtime_checkable
class RunsEpisodes(Protocol):
    """An environment whose program calls the policy itself. `EpisodeBackend` documents the method."""

    async def run_episode(self, episode: episode_pb2.Episode, timeout_s: float) -> episode_pb2.EpisodeOutcome: ...


async def score_metered(
    name: str,
    environment: EnvironmentBackend,
    trajectories: Sequence[trajectory_pb2.Trajectory],
    timeout_s: float | None,
) -> list[trajectory_pb2.Result]:
    """Score `trajectories` with `environment`, and count the results under `name`."""
    started = time.monotonic()
    results = await environment.score(trajectories, timeout_s)
    SECONDS.labels(name).observe(time.monotonic() - started)
    _count(name, results)
    return results


def _count(name: str, results: Sequence[trajectory_pb2.Result]) -> None:
    for status, count in collections.Counter(result.status for result in results).items():
        RESULTS.labels(name, trajectory_pb2.Status.Name(status).removeprefix("STATUS_")).inc(count)


@dataclasses.dataclass(frozen=True)
class EnvironmentReport:
    """Whether an environment can score now, or why not. `address` is null for a built-in or attached environment."""

    name: str
    address: str | None
    ready: bool
    message: str


class Hub(pb_grpc.RewardServiceServicer):
    """The gRPC service over all environments of the run, wherever each runs."""

    def __init__(
        self,
        environments: Mapping[str, EnvironmentBackend],
        env: Mapping[str, EnvConfig],
        attached: Mapping[str, AttachedBackend],
        max_message_bytes: int = rpc.MAX_MESSAGE_BYTES,
        access: rpc.RpcAccess | None = None,
    ) -> None:
        """`attached` are the environments whose processes dial in, whether for scores or for episodes."""
        self._environments = environments
        self._env = env
        self._attached = attached
        found = {name: each for name, each in environments.items() if env[name].runs_episodes}
        self._programs = {name: each for name, each in found.items() if isinstance(each, RunsEpisodes)}
        self._max_message_bytes = max_message_bytes
        self._access = access
        self._streams: set[AttachedStream] = set()
        self._in_hand: collections.Counter[str] = collections.Counter()
        self._recent = {name: RecentResults(time.monotonic()) for name in environments}

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        """Score all trajectories, or none if one of them is malformed (`CodecError` becomes INVALID_ARGUMENT)."""
        by_name: dict[str, list[int]] = {}
        for place, trajectory in enumerate(request.trajectories):
            check_trajectory(trajectory)
            by_name.setdefault(trajectory.environment, []).append(place)
        limit = rpc.time_to_answer(context)
        parts = [[request.trajectories[place] for place in places] for places in by_name.values()]
        answers = await asyncio.gather(*map(self._score, by_name, parts, [limit] * len(parts)))
        results = {
            place: result
            for places, answer in zip(by_name.values(), answers, strict=True)
            for place, result in zip(places, answer, strict=True)
        }
        in_order = [results[place] for place in range(len(results))]
        return pb.ScoreResponse(results=fit_results(in_order, self._max_message_bytes))

    async def RunEpisode(
        self, request: pb.RunEpisodeRequest, context: grpc.aio.ServicerContext
    ) -> pb.RunEpisodeResponse:
        """Run an episode where its environment's program runs, until it ends, its time is up, or the caller disconnects."""
        episode = request.episode
        within_s = episode_from_wire(episode, rpc.time_to_answer(context)).remaining_s
        name = episode.environment
        programs = self._programs.get(name)
        if name not in self._environments:
            outcome = episode_pb2.EpisodeOutcome(result=self._unknown(name))
        elif programs is None:
            said = f"environment {name!r} runs no episodes; set env.{name}.episodes if it has a program that calls the policy"
            outcome = make_outcome(trajectory_pb2.STATUS_INVALID, said, name)
        else:
            started = time.monotonic()
            self._in_hand[name] += 1
            try:
                outcome = await programs.run_episode(episode, within_s)
            finally:
                self._in_hand[name] -= 1
            if outcome.HasField("result"):  # otherwise its trajectory is counted once it is graded
                _count(name, [outcome.result])
                now = time.monotonic()
                self._recent[name].note([outcome.result], now - started, now)
        return pb.RunEpisodeResponse(outcome=outcome)

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AttachResponse]:
        """Send work to a process while it is connected. An event that breaks the rules of the stream is INVALID_ARGUMENT (`CodecError`)."""
        first = await anext(aiter(request_iterator), pb.AttachRequest())
        if first.WhichOneof("event") != "register":
            raise CodecError(f"event {first.WhichOneof('event') or 'nothing'}: send register first")
        stream = AttachedStream(first.register, self._max_message_bytes, _address(context.peer()))
        role = None if self._access is None else self._access.role(context.invocation_metadata())
        for name in stream.names:
            if (refused := self._refusal(name, role)) is not None:
                await context.abort(*refused)
        backends = [backend for name in stream.names if (backend := self._attached.get(name)) is not None]
        reading = asyncio.create_task(_read(stream, request_iterator, backends))
        self._streams.add(stream)
        try:
            for backend in backends:
                backend.join(stream)
            yield pb.AttachResponse(registered=pb.Registered(max_message_bytes=self._max_message_bytes))
            async for event in stream.events():
                yield event
            if not reading.done():
                await context.abort(grpc.StatusCode.UNAVAILABLE, stream.ended or "")
            await reading  # raises the error that ended the stream
        finally:
            reading.cancel()
            stream.end("an attached process has gone")  # it did not close its stream
            self._streams.discard(stream)
            for backend in backends:
                backend.leave(stream)

    async def aclose(self) -> None:
        """Disconnect the attached processes. They will reconnect."""
        for stream in self._streams:
            stream.end("the hub is shutting down")

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListEnvironmentsResponse:
        return pb.ListEnvironmentsResponse(
            environments=await asyncio.gather(*(self._status(name) for name in sorted(self._environments)))
        )

    async def reports(self) -> list[EnvironmentReport]:
        """Return the environments, and whether each can score now."""
        names = sorted(self._environments)
        answers = await asyncio.gather(*(self._environments[name].describe() for name in names))
        return [
            EnvironmentReport(name, self._env[name].address, problem is None, problem or "")
            for name, (_, problem) in zip(names, answers, strict=True)
        ]

    async def problem(self) -> str | None:
        """Return why the hub can't work, or None if it can. An environment in its own process does not count: the run waits for it."""
        reports = await self.reports()
        found = {each.message for each in reports if not each.ready and not self._environments[each.name].awaited}
        return "; ".join(sorted(found)) or None

    async def waits_for(self) -> list[str]:
        """Return the environments in their own processes that can't score now, and why."""
        reports = await self.reports()
        away = (each for each in reports if not each.ready and self._environments[each.name].awaited)
        return [f"environment {each.name}: {each.message}" for each in away]

    def _refusal(self, name: str, role: str | None) -> tuple[grpc.StatusCode, str] | None:
        """Return why a caller with the token of `role` can't attach as `name`, or None if it can. Without credentials the hub has no
        roles."""
        if role not in (None, "operator", f"environment {name}"):
            return (
                grpc.StatusCode.PERMISSION_DENIED,
                f"the token of {role} can't attach as {name!r:.80}; use that of environment {name:.80} or operator",
            )
        attaching = [name for name, env in self._env.items() if isinstance(env, AttachedConfig)]
        if name in attaching:
            return None
        known = ", ".join(attaching) or "none"
        return (
            grpc.StatusCode.NOT_FOUND,
            f"{name!r:.80} is not one of the environments that attach to this run ({known:.400}); declare it in the run's configuration "
            "(env.NAME: {attached: true}), or correct the name",
        )

    async def _score(
        self, name: str, trajectories: Sequence[trajectory_pb2.Trajectory], limit: float | None
    ) -> list[trajectory_pb2.Result]:
        environment = self._environments.get(name)
        if environment is None:
            return [self._unknown(name)] * len(trajectories)
        started = time.monotonic()
        self._in_hand[name] += len(trajectories)
        try:
            results = await score_metered(name, environment, trajectories, limit)
        finally:
            self._in_hand[name] -= len(trajectories)
        ended = time.monotonic()
        self._recent[name].note(results, ended - started, ended)
        return results

    def _unknown(self, name: str) -> trajectory_pb2.Result:
        known = ", ".join(sorted(self._environments)) or "none"
        message = f"this run has no environment {name!r} (it has: {known}); add env.{name} to its configuration"
        return trajectory_pb2.Result(status=trajectory_pb2.STATUS_INVALID, message=message)

    async def _status(self, name: str) -> pb.EnvironmentStatus:
        environment, env = self._environments[name], self._env[name]
        # the grader scores the trajectories of its episodes
        scored = self._env[env.grader] if isinstance(env, EpisodicConfig) and env.grader is not None else env
        attached = self._attached.get(name)
        description, problem = await environment.describe()
        return pb.EnvironmentStatus(
            name=name,
            kind=environment.kind,
            target=env.address or "",
            description=description,
            ready=problem is None,
            message=problem or "",
            timeout_ms=round(1000 * scored.timeout_s),
            max_batch_size=scored.max_batch_size,
            in_hand=self._in_hand[name],
            recent=self._recent[name].summary(time.monotonic()),
            processes=[] if attached is None else attached.processes(),
        )


def _address(peer: str) -> str:
    """Return host:port of a peer, from gRPC's name for it."""
    return urllib.parse.unquote(peer.partition(":")[2])


async def _read(
    stream: AttachedStream, requests: AsyncIterator[pb.AttachRequest], backends: Sequence[AttachedBackend]
) -> None:
    """Read a process's events until it ends its stream or breaks the stream's rules."""
    reason = "an attached process has gone"
    try:
        async for request in requests:
            stream.receive(request)
            for backend in backends:
                backend.wake()
    except CodecError as error:
        reason = f"an attached process broke the rules of its stream ({error})"
        raise
    finally:
        stream.end(reason)
