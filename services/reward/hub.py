"""The hub: routes every trajectory to its environment, and returns a result for each by the caller's deadline."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc

from headrace.base.errors import CodecError
from headrace.config.environments import AttachedConfig, EnvConfig, EpisodicConfig
from headrace.env.wire import check_trajectory, episode_from_wire, fit_results
from headrace.net import rpc, tracing
from headrace.v1 import episode_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc

from .answers import make_outcome
from .attached import AttachedBackend, AttachedStream
from .backend import (
    EnvironmentBackend,
    Results,
    RunsEpisodes,
    Trajectories,
    count_results,
    plain_status,
    score_metered,
)
from .recent import RecentResults


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
            message = f"environment {name!r} runs no episodes; set env.{name}.episodes if it has a program that calls the policy"
            outcome = make_outcome(trajectory_pb2.STATUS_INVALID, message, name)
        else:
            started = time.monotonic()
            self._in_hand[name] += 1
            try:
                with _continue_span(episode) as span:
                    outcome = await programs.run_episode(episode, within_s)
                    span.set(
                        tracing.named(status=plain_status(outcome.result) if outcome.HasField("result") else "graded")
                    )
            finally:
                self._in_hand[name] -= 1
            if outcome.HasField("result"):  # otherwise its trajectory is counted once it is graded
                count_results(name, [outcome.result])
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

    async def _score(self, name: str, trajectories: Trajectories, limit: float | None) -> Results:
        environment = self._environments.get(name)
        if environment is None:
            return [self._unknown(name)] * len(trajectories)
        started = time.monotonic()
        self._in_hand[name] += len(trajectories)
        try:
            with contextlib.ExitStack() as spans:
                traced = [spans.enter_context(_continue_span(trajectory)) for trajectory in trajectories]
                results = await score_metered(name, environment, trajectories, limit)
                for span, result in zip(traced, results, strict=True):
                    span.set(tracing.named(status=plain_status(result), build=result.build))
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


def _continue_span(work: trajectory_pb2.Trajectory | episode_pb2.Episode) -> tracing.Span:
    """Return the span of an environment's work on a trajectory or an episode, which continues there."""
    parent = tracing.SpanContext.parse(work.traceparent)
    if parent is None:
        return tracing.NO_SPAN
    span = tracing.span(
        "environment",
        parent,
        attributes=tracing.named(group_id=work.group_id, index=work.index, environment=work.environment),
    )
    work.traceparent = span.traceparent or work.traceparent
    return span


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
