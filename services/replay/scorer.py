"""The scorer: sends pushed trajectories to the reward hub in batches, several in flight, and writes the scores back.

For each environment it takes only as many trajectories as may be sent at once (`InFlightLimit`), so that a slow environment takes no room
from the others. It renews the trajectories that it holds. Several hubs share nothing: each states what its environments may be sent, and
work goes to the one with the most room (`routes`). When a hub is lost, everything that any of them had is sent again. Law 7: a failure of
an environment is written as a failure, never as a number. An unreachable hub costs no scoring attempt: trajectories return to the line and
are taken again when a hub answers.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import grpc
import msgspec
import prometheus_client

from headrace.base.errors import CodecError, HeadraceError, LeaseLost, ReplayUnavailable, ServiceError
from headrace.base.repeats import Repeats, alike
from headrace.base.tasks import run_until
from headrace.config import Config
from headrace.env.wire import sample_to_wire, score_from_wire, scoring_sample
from headrace.net import rpc, tracing
from headrace.net.credentials import make_token_source
from headrace.records.score import Score
from headrace.replay import BufferRetry, ReplayClient, ScoringJob
from headrace.run.sample_files import SampleFiles
from headrace.run.samples import failed_record
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc
from headrace.v1.trajectory_pb2 import Trajectory

from .in_flight import LARGEST_BATCH, InFlightLimit

_log = logging.getLogger("headrace.scorer")

_BATCH_BYTES = 1024**2
_MOST_IN_FLIGHT = 1024
_POLL_S = 1.0
_LONGEST_PAUSE_S = 5.0
# The hub's time beyond an environment's: to check whether the environment is reachable, and to answer.
_MARGIN_S = 5.0
# how often held trajectories are renewed within the scoring deadline
_RENEWALS = 4
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_TOO_LARGE_OR_MALFORMED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)

SCORES = prometheus_client.Counter(
    "headrace_scores", "Scores written back to the buffer", ["environment", "task", "status"]
)
VOID = prometheus_client.Counter(
    "headrace_scores_void", "Scores that arrived after the buffer had taken their trajectory back"
)
IN_FLIGHT = prometheus_client.Gauge("headrace_scoring_in_flight", "Trajectories that are being scored")
SECONDS = prometheus_client.Histogram("headrace_scoring_batch_seconds", "Time the reward hub took for one batch")
WAITING_SECONDS = prometheus_client.Histogram(
    "headrace_scoring_waiting_seconds",
    "Time from a trajectory's push to its score during which no environment worked on it",
    ["environment"],
)
ENVIRONMENT_SECONDS = prometheus_client.Histogram(
    "headrace_scoring_environment_seconds", "Time the environment worked on a trajectory", ["environment"]
)
UNREACHABLE = prometheus_client.Counter("headrace_scoring_hub_unreachable", "Times the reward hub could not be reached")

Item = tuple[ScoringJob, Trajectory]


class _HubUnreachable(HeadraceError):
    """Raised when the hub is unreachable, or silent beyond a deadline by which it always answers."""


_LOSSES = (_HubUnreachable, ReplayUnavailable)


async def run_scorer(config: Config, client: ReplayClient, stop: asyncio.Event) -> None:
    """Score until `stop`. Trajectories that are being scored then return to the line, and no attempt is charged.

    Raises only errors that no retry can fix (`InvalidCall`). A run has one scorer.
    """
    try:
        await run_until(_Scorer(config, client).run(), stop.wait())
    finally:
        IN_FLIGHT.set(0)
    try:
        await client.release_scoring()
    except ReplayUnavailable as error:
        _log.info("trajectories that were being scored wait for their deadline: %s", error)


class _HubConnection:
    """A reward hub: the state of each of its environments, and how much each may be sent. `there`: it has answered in this round."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address, self.channel = address, channel
        self.stub = pb_grpc.RewardServiceStub(channel)
        self.reset()

    def reset(self) -> None:
        self.there = False
        self.limits = collections.defaultdict[str, InFlightLimit](InFlightLimit)  # by environment
        self.statuses: dict[str, pb.EnvironmentStatus] = {}


class _Scorer:
    def __init__(self, config: Config, client: ReplayClient) -> None:
        reward = config.reward
        self._client = client
        self._addresses = reward.addresses
        self._max_message_bytes = reward.max_message_bytes
        self._renew_s = config.replay.scoring_deadline_s / _RENEWALS
        self._security = config.security
        self._token = make_token_source(config, "scorer")
        self._hubs: list[_HubConnection] = []
        self._enqueued: list[str] = []  # the environments that the buffer knows
        # by token, group and index: a trajectory that the buffer took back may be held again under another token
        self._held: dict[tuple[str, str, int], ScoringJob] = {}
        self._gathered: dict[tuple[str, str, int], ScoringJob] = {}  # likewise: not sent until their group is complete
        self._awake = asyncio.Event()  # there may be something to take
        self._progress = False  # this round has scored something
        self._failures = Repeats()
        self._samples = SampleFiles.of(config)
        self._keeping = asyncio.Lock()  # the lines of two batches must not mix
        self._unkept = ""  # why failed completions could not be stored

    async def run(self) -> None:
        """Work in rounds. A round ends when a hub or the buffer is lost, and returns the trajectories that it held."""
        retry = BufferRetry(last_pause_s=_LONGEST_PAUSE_S, errors=_LOSSES)
        async with contextlib.AsyncExitStack() as stack:
            for address in self._addresses:
                channel = rpc.channel(address, self._max_message_bytes, security=self._security, token=self._token)
                self._hubs.append(_HubConnection(address, await stack.enter_async_context(channel)))
            while True:
                await retry(self._round)

    async def _reach(self) -> None:
        """Return once one hub is reachable."""
        ready = [asyncio.ensure_future(hub.channel.channel_ready()) for hub in self._hubs]
        try:
            reached, _ = await asyncio.wait(ready, timeout=_LONGEST_PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ready:
                each.cancel()
        if not reached:
            UNREACHABLE.inc()
            raise _HubUnreachable(
                f"the reward hub can't be reached at {', '.join(self._addresses)}; check that `headrace reward` is running, and that "
                "reward.address (or reward.host and reward.port) is its address"
            )

    async def _round(self) -> None:
        """Score until a hub or the buffer is lost. Return if this round has scored something before that, else raise."""
        self._held, self._gathered, self._progress = {}, {}, False
        for hub in self._hubs:
            hub.reset()
        await self._reach()
        await self._client.release_scoring()
        await self._look()
        try:
            async with asyncio.TaskGroup() as tasks:
                for helper in (self._renew(), self._listen(), self._keep_looking()):
                    tasks.create_task(helper)
                while True:
                    self._awake.clear()
                    jobs = await self._take()
                    prepared = await self._prepare(jobs)
                    for hub, items in self._share_out(prepared):
                        for batch in in_batches(items, lambda name, hub=hub: hub.limits[name].batch):  # type: ignore[misc]
                            self._begin(hub, batch)
                            tasks.create_task(self._batch(hub, batch))
                    if not (jobs or prepared):
                        await self._awake.wait()
        except ExceptionGroup as group:  # the first loss cancelled the others
            loss = group.exceptions[0]
            if not (self._progress and isinstance(loss, _LOSSES)):
                raise loss from group
            _log.warning("scoring waits: %s", loss)

    async def _take(self) -> Sequence[ScoringJob]:
        """Take as many trajectories from the buffer as may be sent now."""
        # Those that are gathered don't count. A limit on them would keep the last member of a group behind others of groups that are not
        # complete.
        most = _MOST_IN_FLIGHT - len(self._held)
        names = {*self._enqueued, *(name for hub in self._hubs for name in hub.statuses)}
        room = {name: min(most, self._room(name)) for name in names}
        free = {name: count for name, count in room.items() if count > 0}
        return await self._client.take_scoring(free) if free else []

    def _room(self, name: str) -> int:
        """Return how many trajectories may be sent to the environment now."""
        return sum(hub.limits[name].free for hub in self._routes(name))

    def _routes(self, name: str) -> list[_HubConnection]:
        """Return the hubs to which trajectories of this environment are sent."""
        there = [hub for hub in self._hubs if hub.there]
        return [there[place] for place in routes([hub.statuses.get(name) for hub in there])]

    def _share_out(self, items: Sequence[Item]) -> Iterator[tuple[_HubConnection, list[Item]]]:
        """Assign each item to the hub that has the most room for it."""
        shares: dict[_HubConnection, list[Item]] = {}
        room: dict[str, dict[_HubConnection, int]] = {}
        for item in items:
            name = item[1].environment
            left = room.setdefault(name, {hub: hub.limits[name].free for hub in self._routes(name)})
            hub = max(left, key=lambda hub: left[hub])
            left[hub] -= 1
            shares.setdefault(hub, []).append(item)
        yield from shares.items()

    async def _look(self) -> None:
        """Ask each hub for its environments and their capacities. Trajectories of an environment that only the buffer knows are sent too,
        and the hub reports what is wrong."""
        await asyncio.gather(*map(self._look_at, self._hubs))
        self._enqueued = [environment.name for environment in await self._client.environments()]
        self._awake.set()

    async def _look_at(self, hub: _HubConnection) -> None:
        """Ask one hub. A hub that has never answered may stay away, unless it is the only one."""
        try:
            answer = await hub.stub.ListEnvironments(pb.ListEnvironmentsRequest(), timeout=_MARGIN_S)
        except grpc.aio.AioRpcError as error:
            if hub.there or len(self._hubs) == 1:
                raise self._gone(hub, error) from error
            return
        hub.there = True
        hub.statuses = {each.name: each for each in answer.environments}
        for each in answer.environments:
            if each.HasField("description"):
                capacity, calls = each.description.capacity, each.description.calls
                most = LARGEST_BATCH if each.kind == pb.EnvironmentStatus.KIND_BUILT_IN else each.max_batch_size
                hub.limits[each.name].state(capacity, calls, most, each.timeout_ms / 1000)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            await self._look()

    async def _listen(self) -> None:
        while True:
            await self._client.wait_scoring(_POLL_S)
            self._awake.set()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            await self._renew_now([*self._held.values(), *self._gathered.values()])

    async def _renew_now(self, jobs: Sequence[ScoringJob]) -> None:
        """Renew trajectories. Those that the buffer has taken back are not sent any more."""
        for lost in await self._client.renew_scoring(jobs):
            self._gathered.pop(_place(lost), None)

    async def _prepare(self, jobs: Sequence[ScoringJob]) -> list[Item]:
        """Return what is to be sent now, with its messages. What an environment scores that compares whole groups is gathered until its
        group is complete."""
        items = []
        for job in jobs:
            if self._compares(job.group.env_name):
                self._gathered[_place(job)] = job
            else:
                items += await self._item(job, {})
        for job, completions in await self._complete():
            items += await self._item(job, completions)
        return items

    async def _item(self, job: ScoringJob, completions: Mapping[int, str]) -> list[Item]:
        """Return the job with its message. One that can't be sent at all is scored UNSENDABLE at once."""
        try:
            return [(job, sample_to_wire(scoring_sample(job.group, job.trajectory, self._client.run_id, completions)))]
        except (CodecError, ValueError) as error:
            await self._write([(job, Score("UNSENDABLE", message=f"can't be sent for scoring: {error}"))])
            return []

    def _compares(self, name: str) -> bool:
        """Whether the environment compares the completions of whole groups."""
        statuses = [hub.statuses.get(name) for hub in self._routes(name)]
        return any(status.description.whole_groups for status in statuses if status is not None)

    async def _complete(self) -> list[tuple[ScoringJob, Mapping[int, str]]]:
        """Stop holding the gathered trajectories of complete groups, as many as may be sent now. Return them, each with the completions of
        its group by their index."""
        by_group: dict[str, list[ScoringJob]] = {}
        for job in self._gathered.values():
            by_group.setdefault(job.group.id, []).append(job)
        room = {job.group.env_name: self._room(job.group.env_name) for job in self._gathered.values()}
        if not any(room.values()):
            return []
        # one call lists hundreds of groups: to ask for each at each wake-up would keep the scorer busy
        generated = {group_id async for group_id, _ in self._client.groups(["open"])}
        complete: list[tuple[ScoringJob, Mapping[int, str]]] = []
        for group_id, gathered in by_group.items():
            name = gathered[0].group.env_name
            if group_id in generated or not room[name]:
                continue
            await self._renew_now(gathered)
            held = await self._client.read_held(group_id)
            if held is None or held.state == "open":
                continue
            completions = {each.index: each.text for each, _ in held.trajectories}
            for job in gathered[: room[name]]:
                if self._gathered.pop(_place(job), None) is not None:
                    room[name] -= 1
                    complete.append((job, completions))
        return complete

    def _begin(self, hub: _HubConnection, batch: Sequence[Item]) -> None:
        hub.limits[batch[0][1].environment].send(len(batch))
        self._held |= {_place(job): job for job, _ in batch}
        IN_FLIGHT.set(len(self._held))

    async def _batch(self, hub: _HubConnection, batch: Sequence[Item]) -> None:
        limit = hub.limits[batch[0][1].environment]
        with contextlib.ExitStack() as spans:
            traced = [spans.enter_context(self._traced(*item)) for item in batch]
            scores = await self._score(hub, batch, limit.timeout_s + _MARGIN_S)
            for span, (_, score) in zip(traced, scores, strict=True):
                span.set(tracing.named(status=score.status, build=score.build, reward=score.reward))
        limit.release(len(batch))
        # a trajectory that is not scored shows nothing about how long scoring takes
        longest_s = max(score.timings.get("environment", math.inf) for _, score in scores)
        limit.hear((score.status for _, score in scores), longest_s)
        await self._write(scores)
        for job, _ in batch:
            del self._held[_place(job)]
        IN_FLIGHT.set(len(self._held))
        self._awake.set()

    async def _score(
        self, hub: _HubConnection, batch: Sequence[Item], timeout_s: float
    ) -> list[tuple[ScoringJob, Score]]:
        started = time.monotonic()
        request = pb.ScoreRequest(trajectories=[trajectory for _, trajectory in batch])
        try:
            context = tracing.headers(batch[0][1].traceparent, (trajectory.group_id for _, trajectory in batch))
            response = await hub.stub.Score(request, timeout=timeout_s, metadata=tuple(context.items()))
        except grpc.aio.AioRpcError as error:
            if error.code() in _GONE:
                raise self._gone(hub, error) from error
            if error.code() in _TOO_LARGE_OR_MALFORMED and len(batch) > 1:
                # a single one is to blame: find it, score the others
                half = len(batch) // 2
                return [
                    *await self._score(hub, batch[:half], timeout_s),
                    *await self._score(hub, batch[half:], timeout_s),
                ]
            return [(job, self._refusal(error, trajectory)) for job, trajectory in batch]
        SECONDS.observe(time.monotonic() - started)
        self._progress = True
        if len(response.results) != len(batch):
            message = f"the reward hub returned {len(response.results)} results for {len(batch)} trajectories"
            return [(job, Score("NOT_STARTED", message=message)) for job, _ in batch]
        took_s = time.monotonic() - started
        return [
            (job, _add_timing(job, score_from_wire(result), took_s))
            for (job, _), result in zip(batch, response.results, strict=True)
        ]

    def _traced(self, job: ScoringJob, trajectory: Trajectory) -> tracing.Span:
        """Return the span of scoring a trajectory, under which the hub and the environment continue."""
        span = tracing.span(
            "score",
            tracing.group_span(self._client.run_id, job.group.id),
            attributes=tracing.named(
                group_id=job.group.id,
                index=job.trajectory.index,
                attempt=job.trajectory.attempt,
                environment=trajectory.environment,
            ),
        )
        trajectory.traceparent = span.traceparent
        return span

    def _refusal(self, error: grpc.aio.AioRpcError, trajectory: Trajectory) -> Score:
        """Return the score of a trajectory that the hub did not score. The hub's own faults are neither the trajectory's nor the
        environment's."""
        message = f"the reward hub refused the trajectory: {error.code().name}: {error.details()}"
        if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
            what = "with the completions of its whole group it has" if trajectory.group_completions else "it has"
            message += (
                f"; {what} {trajectory.ByteSize()} bytes; raise reward.max_message_bytes ({self._max_message_bytes})"
            )
        return Score("UNSENDABLE" if error.code() in _TOO_LARGE_OR_MALFORMED else "NOT_STARTED", message=message)

    def _gone(self, hub: _HubConnection, error: grpc.aio.AioRpcError) -> _HubUnreachable:
        UNREACHABLE.inc()
        return _HubUnreachable(f"the reward hub at {hub.address} is gone ({error.code().name}: {error.details()})")

    async def _write(self, scores: Sequence[tuple[ScoringJob, Score]]) -> None:
        scores = [(job, score.storable()) for job, score in scores]
        errors = await self._client.score_many(scores)
        for (job, score), error in zip(scores, errors, strict=True):
            if error is None:
                SCORES.labels(job.group.env_name, job.group.task_name, score.status).inc()
            elif isinstance(error, LeaseLost):
                VOID.inc()
            else:
                raise error
        _log_failures(scores, self._failures)
        await self._keep_failed([each for each, error in zip(scores, errors, strict=True) if error is None])

    async def _keep_failed(self, written: Sequence[tuple[ScoringJob, Score]]) -> None:
        """Store the completions with which groups have failed, because the buffer has discarded them. They are only for people to look at:
        if they can't be stored, this is logged and scoring continues."""
        if not self._samples.wanted:
            return
        failures = [each for each in written if each[1].status not in ("SCORED", "NOT_STARTED")]
        groups = {job.group.id: await self._client.group(job.group.id) for job, _ in failures}
        records = [
            failed_record(job.group, job.trajectory, score, found["reason"])
            for job, score in failures
            if (found := groups[job.group.id]) is not None and found["state"] == "failed"
        ]
        if not records:
            return
        async with self._keeping:
            try:
                await asyncio.to_thread(self._samples.append_failed, records)
                self._unkept = ""
            except ServiceError as error:
                if str(error) != self._unkept:
                    _log.warning("%s", error)
                self._unkept = str(error)


def routes(statuses: Sequence[pb.EnvironmentStatus | None]) -> list[int]:
    """Return the indices of the hubs to which an environment's work is sent, given its status at each hub.

    These are the hubs where it can score and has the newest build, the one attached last, so that builds don't take turns. If it can't
    score anywhere, the first hub gets the work and reports why.
    """
    ready = [place for place, status in enumerate(statuses) if status is not None and status.ready]
    if not ready:
        return [0] if statuses else []

    def age(place: int) -> float:
        status = statuses[place]
        return min((each.age_ms for each in (status.processes if status else ()) if each.works), default=math.inf)

    def build(place: int) -> str:
        status = statuses[place]
        return status.description.build if status else ""

    newest = build(min(ready, key=age))
    return [place for place in ready if build(place) == newest]


def _place(job: ScoringJob) -> tuple[str, str, int]:
    return job.token, job.group.id, job.trajectory.index


def _add_timing(job: ScoringJob, score: Score, call_s: float) -> Score:
    """Return `score` with its timings. `call_s` is the duration of the call, which counts as the environment's time if it states none."""
    if score.status != "SCORED":
        return score
    environment_s = min(score.timings.get("environment", call_s), call_s)
    waiting_s = job.waited_s + call_s - environment_s
    name = job.group.env_name
    WAITING_SECONDS.labels(name).observe(waiting_s)
    ENVIRONMENT_SECONDS.labels(name).observe(environment_s)
    return msgspec.structs.replace(score, timings={"waiting": waiting_s, "environment": environment_s})


def in_batches(items: Sequence[Item], most: Callable[[str], int]) -> Iterator[list[Item]]:
    """Yield batches with one environment each, so that a slow environment delays no other. A batch has at most `most(name)` trajectories
    and 1 MB, but at least one trajectory."""
    by_environment: dict[str, list[Item]] = {}
    for item in items:
        by_environment.setdefault(item[1].environment, []).append(item)
    for name, mine in by_environment.items():
        batch: list[Item] = []
        size = 0
        for item in mine:
            weight = item[1].ByteSize()
            if batch and (len(batch) == most(name) or size + weight > _BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += weight
        yield batch


def _log_failures(scores: Sequence[tuple[ScoringJob, Score]], repeats: Repeats) -> None:
    """Log one line for trajectories with the same message of an environment. For a message that keeps repeating, log a count."""
    same: dict[tuple[str, str, str], list[tuple[ScoringJob, str]]] = {}
    for job, score in scores:
        if score.status != "SCORED":
            told = job.group.env_name, score.status, alike(score.message)
            same.setdefault(told, []).append((job, score.message))
    for (name, status, kind), found in same.items():
        count = repeats.due(f"{name} {status} {kind}", len(found))
        if count is None:
            continue
        level = logging.INFO if status == "NOT_STARTED" else logging.WARNING
        (first, message), others = found[0], f" and {len(found) - 1} others" if len(found) > 1 else ""
        times = f", {count} times by now" if count > len(found) else ""
        place = f"group {first.group.id}[{first.trajectory.index}]{others}{times}"
        _log.log(level, "environment %s, %s: %s: %s", name, place, status, message)
