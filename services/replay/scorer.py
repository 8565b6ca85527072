"""The scorer: sends pushed trajectories to the reward hub in batches, several in flight, and writes the scores back.

Law 7: a failure of an environment is written as a failure, never as a number. A hub that can't be reached costs no
scoring attempt: trajectories return to the line and are taken again when the hub answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Iterator, Sequence

import grpc
import prometheus_client

from headrace import rpc
from headrace.config import Config
from headrace.credentials import credentials_of
from headrace.environment import Sample
from headrace.errors import CodecError, HeadraceError, LeaseLost, ReplayUnavailable
from headrace.replay import BufferRetry, ReplayClient, ScoringJob
from headrace.trajectory import Score
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc
from headrace.v1.trajectory_pb2 import Trajectory
from headrace.wire import sample_to_wire, score_from_wire

_log = logging.getLogger("headrace.scorer")

# gRPC carries batches of 256 KB to 1 MB best.
_BATCH_BYTES = 1024**2
_BATCH = 64
_MOST_IN_FLIGHT = 1024
_POLL_S = 5.0
_LONGEST_PAUSE_S = 5.0
# Share of the scoring deadline for the hub's answer; the rest is for writing the scores back.
_SHARE_OF_DEADLINE = 0.8
_TOO_LARGE_OR_MALFORMED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)

SCORES = prometheus_client.Counter(
    "headrace_scores", "Scores written back to the buffer", ["environment", "task", "status"]
)
VOID = prometheus_client.Counter(
    "headrace_scores_void", "Scores that came after the buffer had taken their trajectory back"
)
IN_FLIGHT = prometheus_client.Gauge("headrace_scoring_in_flight", "Trajectories that are being scored")
SECONDS = prometheus_client.Histogram("headrace_scoring_batch_seconds", "Time the reward hub took for one batch")
UNREACHABLE = prometheus_client.Counter("headrace_scoring_hub_unreachable", "Times the reward hub could not be reached")

Item = tuple[ScoringJob, Trajectory]


class _HubUnreachable(HeadraceError):
    """The hub is unreachable, or silent past a deadline within which it always answers."""


_LOSSES = (_HubUnreachable, ReplayUnavailable)


async def run_scorer(config: Config, client: ReplayClient, stop: asyncio.Event) -> None:
    """Score until `stop`; trajectories being scored then return to the line without costing an attempt.

    Raises only errors that no retry can fix (`InvalidCall`). One scorer serves a run.
    """
    scoring = asyncio.create_task(_Scorer(config, client).run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([scoring, stopping], return_when=asyncio.FIRST_COMPLETED)
        if scoring.done():
            scoring.result()
    finally:
        for task in (scoring, stopping):
            task.cancel()
        await asyncio.gather(scoring, stopping, return_exceptions=True)
        IN_FLIGHT.set(0)
    try:
        await client.release_scoring()
    except ReplayUnavailable as error:
        _log.info("what was being scored waits for its deadline: %s", error)


class _Scorer:
    def __init__(self, config: Config, client: ReplayClient) -> None:
        reward = config.reward
        self._client = client
        self._address = reward.address or f"{reward.host}:{reward.port}"
        self._max_message_bytes = reward.max_message_bytes
        self._security = config.security
        credentials = credentials_of(config)
        self._token = None if credentials is None else credentials.presented("scorer")
        self._deadline_s = _SHARE_OF_DEADLINE * config.replay.scoring_deadline_s
        self._name = f"scorer-{secrets.token_hex(4)}"
        self._in_flight = 0
        self._room = asyncio.Event()
        self._progress = False  # this round has scored something

    async def run(self) -> None:
        """Work in rounds: each ends when the hub or the buffer is lost, and returns the trajectories that it held."""
        retry = BufferRetry(last_pause_s=_LONGEST_PAUSE_S, errors=_LOSSES)
        async with rpc.channel(
            self._address, self._max_message_bytes, security=self._security, token=self._token
        ) as channel:
            while True:
                await retry(lambda: self._round(channel))

    async def _reach(self, channel: grpc.aio.Channel) -> None:
        try:
            async with asyncio.timeout(_LONGEST_PAUSE_S):
                await channel.channel_ready()
        except TimeoutError:
            UNREACHABLE.inc()
            raise _HubUnreachable(
                f"the reward hub can't be reached at {self._address}; is `headrace reward` running, and is this "
                "reward.address (or reward.host and reward.port)?"
            ) from None

    async def _round(self, channel: grpc.aio.Channel) -> None:
        """Score until the hub or the buffer is lost: returns if that is after some scores, raises if it is before any."""
        self._in_flight, self._progress = 0, False
        await self._reach(channel)
        await self._client.release_scoring()
        stub = pb_grpc.RewardServiceStub(channel)
        try:
            async with asyncio.TaskGroup() as batches:
                while True:
                    while self._in_flight >= _MOST_IN_FLIGHT:
                        self._room.clear()
                        await self._room.wait()
                    jobs = await self._client.take_scoring(
                        self._name, min(4 * _BATCH, _MOST_IN_FLIGHT - self._in_flight)
                    )
                    if not jobs:
                        await self._client.wait_scoring(_POLL_S)
                        continue
                    items = await self._prepare(jobs)
                    for batch in in_batches(items):
                        self._count(len(batch))
                        batches.create_task(self._batch(stub, batch))
        except ExceptionGroup as group:  # the first loss cancelled the others
            loss = group.exceptions[0]
            if not (self._progress and isinstance(loss, _LOSSES)):
                raise loss from group
            _log.warning("scoring waits: %s", loss)

    async def _prepare(self, jobs: Sequence[ScoringJob]) -> list[Item]:
        """The jobs with their messages; a job that can't be sent at all is scored INVALID at once."""
        items: list[Item] = []
        for job in jobs:
            try:
                items.append((job, sample_to_wire(self._sample(job))))
            except (CodecError, ValueError) as error:
                await self._write([(job, Score("INVALID", message=f"can't be sent for scoring: {error}"))])
        return items

    async def _batch(self, stub: pb_grpc.RewardServiceStub, batch: Sequence[Item]) -> None:
        try:
            await self._write(await self._score(stub, batch))
        finally:
            self._count(-len(batch))

    def _count(self, change: int) -> None:
        self._in_flight += change
        IN_FLIGHT.set(self._in_flight)
        self._room.set()

    async def _score(self, stub: pb_grpc.RewardServiceStub, batch: Sequence[Item]) -> list[tuple[ScoringJob, Score]]:
        started = time.monotonic()
        request = pb.ScoreRequest(trajectories=[trajectory for _, trajectory in batch])
        try:
            response = await stub.Score(request, timeout=self._deadline_s)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                UNREACHABLE.inc()
                raise _HubUnreachable(f"the reward hub at {self._address} is gone ({code.name}: {details})") from error
            if code in _TOO_LARGE_OR_MALFORMED and len(batch) > 1:  # one of them is: find it, score the others
                half = len(batch) // 2
                return [*await self._score(stub, batch[:half]), *await self._score(stub, batch[half:])]
            invalid = code in _TOO_LARGE_OR_MALFORMED
            message = f"the reward hub refused it: {code.name}: {details}"
            if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
                message += f"; raise reward.max_message_bytes ({self._max_message_bytes})"
            return [(job, Score("INVALID" if invalid else "FAILED", message=message)) for job, _ in batch]
        SECONDS.observe(time.monotonic() - started)
        self._progress = True
        if len(response.results) != len(batch):
            message = f"the reward hub answered {len(response.results)} results for {len(batch)} trajectories"
            return [(job, Score("FAILED", message=message)) for job, _ in batch]
        return [(job, score_from_wire(result)) for (job, _), result in zip(batch, response.results, strict=True)]

    async def _write(self, scores: Sequence[tuple[ScoringJob, Score]]) -> None:
        scores = [(job, storable(score)) for job, score in scores]
        errors = await self._client.score_many(scores)
        for (job, score), error in zip(scores, errors, strict=True):
            if error is None:
                SCORES.labels(job.group.env_name, job.group.task_name, score.status).inc()
            elif isinstance(error, LeaseLost):
                VOID.inc()
            else:
                raise error
            if score.status != "SCORED":
                _log.warning("group %s[%d]: %s: %s", job.group.id, job.trajectory.index, score.status, score.message)

    def _sample(self, job: ScoringJob) -> Sample:
        group, trajectory = job.group, job.trajectory
        tokens = trajectory.completion_token_ids
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=8).hexdigest()
        return Sample(
            completion=trajectory.text,
            extra_env_info=group.extra_env_info,
            messages=group.messages,
            completion_token_ids=tuple(tokens.tolist()),
            finish_reason=trajectory.finish_reason,
            environment=group.env_name,
            task_name=group.task_name,
            group_id=group.id,
            index=trajectory.index,
            # The tokens are part of the key: after a rewind another attempt may have the same number.
            idempotency_key=f"{self._client.run_id}/{group.id}/{trajectory.attempt}/{trajectory.index}/{digest}",
        )


def storable(score: Score) -> Score:
    """`score`, without metadata that are too large; or FAILED if the buffer can't keep it: an integer of more than 64 bits in its metadata,
    or components that are too large."""
    try:
        score = score.fitted()
        score.encode()
    except CodecError as error:
        message = f"the score can't be kept: {error}"
        return Score("FAILED", message=message, environment=score.environment, build=score.build)
    return score


def in_batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Batches with one environment each, so that a slow one delays no other, of at most 64 trajectories and 1 MB (but at least one)."""
    by_environment: dict[str, list[Item]] = {}
    for item in items:
        by_environment.setdefault(item[1].environment, []).append(item)
    for mine in by_environment.values():
        batch: list[Item] = []
        size = 0
        for item in mine:
            weight = item[1].ByteSize()
            if batch and (len(batch) == _BATCH or size + weight > _BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += weight
        yield batch
