"""Serves one environment over gRPC (`EnvironmentService`, health, reflection)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import grpc
import msgspec

from headrace.base.errors import ConfigError
from headrace.base.repeats import Repeats
from headrace.base.tls import CertificateFiles
from headrace.env import slots
from headrace.env.environment import Environment, Sample, check_score, make_failed
from headrace.env.failure_log import FailureLog
from headrace.env.programs import Programs
from headrace.env.slots import Raised, Slots
from headrace.env.wire import (
    episode_from_wire,
    fit_outcome,
    fit_results,
    outcome_to_wire,
    sample_from_wire,
    score_to_wire,
)
from headrace.net import rpc, tracing
from headrace.net.credentials import Credentials
from headrace.net.service import stop_on_signals
from headrace.records.score import Score
from headrace.v1 import environment_pb2 as pb
from headrace.v1 import environment_pb2_grpc as pb_grpc

_log = logging.getLogger("headrace.env.environment")
GRACE_S = 2.0
# A call is answered at most so long before its deadline, so that a machine may stand still meanwhile: if the answer is late because one
# sample hangs, the scores of the others are lost with it.
STALL_S = 5.0


def run(
    environment: Environment,
    host: str,
    port: int,
    credentials: Credentials | None = None,
    certificate: CertificateFiles | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (`headrace.serve`)."""

    async def serve() -> None:
        stop = stop_on_signals()
        async with serving(environment, host, port, credentials, certificate) as bound:
            _log.info("environment %s listens on %s:%d", environment.label, host, bound)
            await stop.wait()

    slots.run(serve())


@contextlib.asynccontextmanager
async def serving(
    environment: Environment,
    host: str = "127.0.0.1",
    port: int = 0,
    credentials: Credentials | None = None,
    certificate: CertificateFiles | None = None,
) -> AsyncIterator[int]:
    """Serve while the context is open; yields the port. On exit, calls in progress have two seconds to finish, or are NOT_STARTED.

    With `credentials`, only callers that present an environment's token are served.
    """
    service = pb.DESCRIPTOR.services_by_name["EnvironmentService"]
    methods = [f"/{service.full_name}/{method.name}" for method in service.methods]
    roles = dict.fromkeys([*methods, rpc.REFLECTION], ("environment",))
    access = None if credentials is None else rpc.RpcAccess(credentials, roles)
    # a call is silent while its program runs, perhaps for minutes
    server = rpc.server(access=access, keep_alive=environment.runs_episodes)
    scorer = BatchScorer(environment)
    programs = Programs(environment) if environment.runs_episodes else None
    pb_grpc.add_EnvironmentServiceServicer_to_server(_Servicer(scorer, programs), server)
    bound = rpc.listen(server, host, port, "port", certificate)
    health = await rpc.add_health_and_reflection(server, [service.full_name])
    await server.start()
    try:
        yield bound
    finally:
        await asyncio.shield(_shut_down(scorer, programs, health, server))


async def _shut_down(scorer: BatchScorer, programs: Programs | None, health: Any, server: grpc.aio.Server) -> None:
    await health.enter_graceful_shutdown()
    await asyncio.gather(*(each.drain(GRACE_S) for each in (scorer, programs) if each is not None))
    await server.stop(GRACE_S)


class _Servicer(pb_grpc.EnvironmentServiceServicer):
    def __init__(self, scorer: BatchScorer, programs: Programs | None) -> None:
        self._scorer = scorer
        self._programs = programs

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        return self._scorer.description

    async def Score(
        self, request: pb.EnvironmentServiceScoreRequest, context: grpc.aio.ServicerContext
    ) -> pb.EnvironmentServiceScoreResponse:
        samples = [sample_from_wire(trajectory) for trajectory in request.trajectories]
        traces = [trajectory.traceparent for trajectory in request.trajectories]
        scores = await self._scorer.score(samples, rpc.time_to_answer(context, STALL_S), traces)
        results = fit_results([score_to_wire(score) for score in scores], rpc.MAX_MESSAGE_BYTES)
        return pb.EnvironmentServiceScoreResponse(results=results)

    async def RunEpisode(
        self, request: pb.EnvironmentServiceRunEpisodeRequest, context: grpc.aio.ServicerContext
    ) -> pb.EnvironmentServiceRunEpisodeResponse:
        if self._programs is None:
            label = self._scorer.environment.label
            return await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, f"{label} does not run episodes; define `async def episode(self, e)`"
            )
        with tracing.handed_over(request.episode.traceparent, request.episode.group_id):
            outcome = await self._programs.run(episode_from_wire(request.episode, rpc.time_to_answer(context)))
        return pb.EnvironmentServiceRunEpisodeResponse(
            outcome=fit_outcome(outcome_to_wire(outcome), rpc.MAX_MESSAGE_BYTES)
        )


class BatchScorer:
    """Scores with one environment, within its `concurrency` and the caller's deadline. Samples that it can't start at once are
    NOT_STARTED.

    `capacity` is the number of samples to work on at a time, and overrides the environment's. `on_free` is called when more can be
    started. `awaited` names what the score of a sample is waiting for, for the message of one that is late.
    """

    def __init__(
        self,
        environment: Environment,
        repeats: Repeats | None = None,
        capacity: int | None = None,
        on_free: Callable[[], None] = lambda: None,
        awaited: Callable[[Sample], str] = lambda sample: "",
    ) -> None:
        if environment.concurrency < 1:
            raise ValueError(f"{environment.label}.concurrency is {environment.concurrency}; it must be at least 1")
        least, most = environment.reward_min, environment.reward_max
        if least is not None and most is not None and not least <= most:
            raise ConfigError(
                f"{environment.label}.reward_min is {least} and its reward_max {most}: no reward is between them"
            )
        self.environment = environment
        environment.build  # noqa: B018  # an environment without a build is refused before it is offered
        self.capacity = environment.capacity if capacity is None else capacity
        self._failures = FailureLog(environment, repeats or Repeats())
        self._in_slot = environment.max_batch_size if environment.scores_batches else 1
        self._concurrency = environment.concurrency if capacity is None else math.ceil(capacity / self._in_slot)
        self._slots = Slots(self._concurrency, on_free)
        self._awaited = awaited
        self.drain = self._slots.drain

    @property
    def description(self) -> pb.DescribeResponse:
        """The environment's description for the hub."""
        return pb.DescribeResponse(
            name=self.environment.label,
            build=self.environment.build,
            description=self.environment.description,
            capacity=self.capacity if self.environment.scores_samples else 0,
            episodes=self.environment.episodes if self.environment.runs_episodes else 0,
            calls=self._concurrency if self.environment.scores_batches else 0,
            deterministic=self.environment.deterministic,
            whole_groups=self.environment.whole_groups,
            reward_min=self.environment.reward_min,
            reward_max=self.environment.reward_max,
        )

    @property
    def busy(self) -> int:
        """The number of samples that occupy its room. They are being scored, perhaps after their call was given up, or share the call of
        one that is."""
        return self._slots.busy * self._in_slot

    async def score(
        self, samples: Sequence[Sample], timeout_s: float | None, traceparents: Sequence[str] = ()
    ) -> list[Score]:
        """Return one `Score` per sample, in order, within `timeout_s`. Samples scored by then keep their reward; others that were started
        are TIMED_OUT. `traceparents` are the spans that the samples are scored under, if the run is traced."""
        begun = samples[: self._room()]
        if self.environment.scores_batches:
            parts = [begun] if begun else []
            work = [self._batch(part, self._slots.take()) for part in parts]
        else:
            parts = [[sample] for sample in begun]
            work = [self._one(sample, self._slots.take()) for sample in begun]
        tasks = []
        for part, scoring, traceparent in zip(parts, work, traceparents or [""] * len(work), strict=False):
            with tracing.handed_over(traceparent, part[0].group_id):  # a batch continues the trace of its first sample
                tasks.append(asyncio.create_task(scoring))
        refused = [self._refusal()] * (len(samples) - len(begun))
        if tasks:
            await self._slots.wait(tasks, timeout_s)
        scores = [task.result() if task.done() else None for task in tasks]
        found = [
            score or [self._late(sample, timeout_s) for sample in part]
            for part, score in zip(parts, scores, strict=True)
        ]
        for part, score, late in zip(parts, scores, found, strict=True):
            if score is None:
                self._failures.note(part, late)
        return [*(score for part in found for score in part), *refused]

    def _room(self) -> int:
        """Return the number of samples that a call can start now."""
        if self._slots.is_draining:
            return 0
        free = self._slots.free
        return free if not self.environment.scores_batches else self.environment.max_batch_size * (free > 0)

    def _refusal(self) -> Score:
        label, concurrency = self.environment.label, self._concurrency
        message = f"{label} is working on {self._slots.busy} of the {concurrency} calls that its concurrency allows"
        return self._not_started(f"{label} is shutting down" if self._slots.is_draining else message)

    def _not_started(self, message: str) -> Score:
        return Score("NOT_STARTED", message=message, environment=self.environment.label)

    def _late(self, sample: Sample, timeout_s: float | None) -> Score:
        label = self.environment.label
        if self._slots.is_cut:
            return self._not_started(f"{label} was shut down before the sample was scored")
        message = f"no answer from {label} within {timeout_s or 0:.1f} s"
        if awaited := self._awaited(sample):
            message += f"; it waits for {awaited}"
        return Score("TIMED_OUT", message=message, environment=label)

    async def _one(self, sample: Sample, slot: Callable[[], None]) -> list[Score]:
        began = time.monotonic()
        try:
            value = await self._slots.call(self.environment.score, sample, slot)
        except Raised as raised:
            score = make_failed(self.environment, raised.error)
            self._failures.record(raised.error, [sample], score)
        else:
            score = _add_timing(check_score(self.environment, value), began)
            self._failures.note([sample], [score])
        return [score]

    async def _batch(self, samples: Sequence[Sample], slot: Callable[[], None]) -> list[Score]:
        began = time.monotonic()
        try:
            values = _as_list(await self._slots.call(self.environment.score_batch, samples, slot), len(samples))
        except Raised as raised:
            scores = [make_failed(self.environment, raised.error)] * len(samples)
            self._failures.record(raised.error, samples, scores[0])
        else:
            scores = [_add_timing(check_score(self.environment, value), began) for value in values]
            self._failures.note(samples, scores)
        return scores


def _as_list(values: Iterable[object], count: int) -> list[object]:
    """Return what `score_batch` returned as a list. Raises `Raised` unless it has `count` results."""
    try:
        results = list(itertools.islice(values, count + 1))
        if len(results) != count:
            number = f"more than {count}" if len(results) > count else f"{len(results)}"
            raise ValueError(f"score_batch returned {number} results for {count} samples")
    except BaseException as error:  # noqa: BLE001  # iterating is the user's code too
        raise Raised(error) from None
    return results


def _add_timing(score: Score, began: float) -> Score:
    return msgspec.structs.replace(score, timings={"environment": time.monotonic() - began})
