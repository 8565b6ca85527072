"""The runner's loop: send heartbeats, lease what fits, run each episode, hand in the result.

One task leases from the buffer. Each episode runs in its own task, from the start of its program to the answer of `finish`. It starts over
under the same lease as often as the buffer asks for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from headrace.base.backoff import pause_after
from headrace.base.errors import (
    CodecError,
    EpisodeTooLarge,
    Fenced,
    HeadraceError,
    InvalidCall,
    ReplayUnavailable,
    ServiceError,
    Surplus,
)
from headrace.base.tasks import cancel
from headrace.config import Config
from headrace.env.episode import Episode, EpisodeLimits, EpisodeOutcome
from headrace.net import tracing
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Call, Lane, artifacts_bytes, episode_record
from headrace.replay import BufferRetry, Lease, ReplayClient
from headrace.replay.leases import leave, take_turn, wait_for_work

from . import decisions, metrics
from .decisions import Outcome
from .fleet import Fleet
from .gateway import Gateway
from .program_starter import ProgramApi
from .running_episode import OpenEpisode
from .session import Clocks, SessionLimits, SessionSummary

log = logging.getLogger(__name__)

# How often the clocks are checked.
_LOOK_S = 0.25
# The buffer's news reach all runners at once, several times during a refit, which would then wait behind their calls. So each runner reacts
# after a random time up to this.
_SPREAD_S = 0.1
# The first and the longest pause before a program that could not be started is tried again.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 15.0


@dataclasses.dataclass
class RunnerStatus:
    """The state that the HTTP pages show."""

    unreachable: str | None = None
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass
class OpenLease:
    """A lease and its running episodes, by index. `progress`: what heartbeats report of it."""

    lease: Lease
    tasks: dict[int, asyncio.Task[None]]
    progress: int = 0


class EpisodeRunner:
    """One runner. Programs reach its gateway at `url`."""

    def __init__(
        self,
        config: Config,
        replay: ReplayClient,
        fleet: Fleet,
        gateway: Gateway,
        programs: ProgramApi,
        url: str,
        info: Mapping[str, Any],
    ) -> None:
        self.status = RunnerStatus()
        self.runner = _new_id()
        self._config = config
        self._replay = replay
        self._fleet = fleet
        self._gateway = gateway
        self._programs = programs
        self._url = url
        self._info = info
        pause_s = config.rollout.heartbeat_s
        self._retry = BufferRetry(first_pause_s=min(0.2, pause_s), last_pause_s=pause_s, log_level=logging.DEBUG)
        self._limits, self._clocks = make_limits(config), make_clocks(config)
        self._held: dict[str, OpenLease] = {}  # by the lease's token
        self._open: set[OpenEpisode] = set()
        self._beats_at = 0.0  # when the next heartbeat is due at the latest
        self._changed = asyncio.Event()

    def count_taken(self, lane: Lane) -> int:
        """Return how many slots of a lane are taken."""
        return sum(len(held.tasks) for held in self._held.values() if held.lease.group.lane == lane)

    def _free(self, lane: Lane) -> int:
        return self._config.agents.slots_of(lane) - self.count_taken(lane)

    def problem(self) -> str | None:
        """Return why no episode can run, or None."""
        if self.status.unreachable is not None:
            return f"can't reach the buffer: {self.status.unreachable}"
        return None if self._fleet.healthy else "no replica is HEALTHY, so the clocks stand still"

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop`, then end every program and return the leases, which costs no attempt. Waits while the buffer is unreachable.
        Raises an error that a retry can't fix."""
        await self._replay.register_runner(self.runner, self._info)
        died = False
        looking = asyncio.create_task(self._look())
        looking.add_done_callback(lambda _: self._changed.set())  # it only ends with an error
        try:
            while not stop.is_set():
                if looking.done():
                    looking.result()
                await take_turn(self._turn(), stop)
                await self._wait(stop)
        except ServiceError:  # concerns all episodes
            raise
        except Exception:
            died = True
            raise
        finally:
            await cancel([looking])
            await self._end(list(self._held))
            await leave(self._replay.deregister_runner(self.runner, died=died))

    async def _turn(self) -> None:
        self._changed.clear()
        self._reap()
        try:
            # an idle runner gets the rest of the news in time, and there may be many idle runners
            if self._held or not self._fleet.healthy or time.monotonic() >= self._beats_at:
                await self._beat()
            free, validating = self._free("train"), self._free("validation")
            if (free or validating) and self._fleet.healthy:
                for lease in await self._replay.lease_episodes(self.runner, free, validating):
                    self._begin(lease)
                    self._changed.set()
        except ReplayUnavailable as error:
            if self.status.unreachable is None:
                log.warning("can't reach the buffer: %s", error)
            self.status.unreachable = str(error)
            self._fleet.note(())  # no replica is known to be HEALTHY, and no call could be kept
        except Fenced as refusal:
            # the state changed between heartbeat and lease; the next turn sees the new one
            log.info("refused: %s", refusal)
            self._beats_at = 0.0

    async def _beat(self) -> None:
        """Send a heartbeat, and get the state of the replicas, this runner's leases and the other gateways."""
        self._fleet.note(await self._replay.replicas())
        self._note_progress()
        progress = [held.progress for held in self._held.values()]
        reply = await self._replay.runner_heartbeat(self.runner, [*self._held], progress)
        self.status.unreachable = None
        self._beats_at = time.monotonic() + self._config.rollout.heartbeat_s
        if not reply.alive:
            await self._enter_again()
            return
        await self._end(set(reply.lost) & set(reply.complete), "surplus")
        await self._end(reply.lost, "lost")
        if self._config.agents.advertised_url is not None:
            others = [runner.info for runner in await self._replay.runners() if runner.alive]
            self._gateway.peers = {str(info.get("name")): str(info.get("gateway")) for info in others}

    def _note_progress(self) -> None:
        """A lease progresses while one of its programs runs and no clock of the run has ended it. Those clocks bound how long a tool may
        take."""
        running = {episode.lease.token for episode in self._open if not episode.over.done()}
        for token, held in self._held.items():
            held.progress += token in running

    async def _enter_again(self) -> None:
        """Register again under a new id. The buffer declared this runner dead and passed its leases on."""
        await self._end(list(self._held), "lost")
        old, self.runner = self.runner, _new_id()
        log.warning("%s registers again as %s", old, self.runner)
        await self._replay.register_runner(self.runner, self._info)
        self._changed.set()

    async def _wait(self, stop: asyncio.Event) -> None:
        """Wait until there may be work, at most one heartbeat period."""
        period_s = self._config.rollout.heartbeat_s
        await wait_for_work(self._replay, period_s, (self._changed, stop), random.uniform(0, _SPREAD_S))

    async def _look(self) -> None:
        """Check the clocks of all open episodes from time to time."""
        while True:
            for episode in list(self._open):
                episode.look()
            await asyncio.sleep(_LOOK_S)

    # -- leases --------------------------------------------------------------------------------------------------------------

    def _begin(self, lease: Lease) -> None:
        tasks = {index: asyncio.create_task(self._run_episode(lease, index)) for index in lease.missing}
        self._held[lease.token] = OpenLease(lease, tasks)
        for task in tasks.values():
            task.add_done_callback(lambda _: self._changed.set())

    def _reap(self) -> None:
        """Free the slots of episodes that have ended. Raises the error of an episode if a retry can't fix it."""
        for token, held in list(self._held.items()):
            for index, task in list(held.tasks.items()):
                if task.done():
                    del held.tasks[index]
                    if not task.cancelled():
                        task.result()
            if not held.tasks:
                del self._held[token]

    async def _end(self, tokens: Iterable[str], outcome: str = "returned") -> None:
        """End the episodes of these leases, which are void or about to be. Cancels their programs and invalidates their keys."""
        ended = [token for token in tokens if token in self._held]
        tasks: list[asyncio.Task[None]] = []
        for held in map(self._held.pop, ended):
            for task in held.tasks.values():
                if not task.done():
                    self._count(held.lease, outcome)
                tasks.append(task)
        await cancel(tasks)

    # -- an episode ----------------------------------------------------------------------------------------------------------

    async def _run_episode(self, lease: Lease, index: int) -> None:
        """Run an episode to its end, with all restarts. Raises `ServiceError`."""
        again: Lease | None = lease
        restarts = 0
        try:
            while again is not None:
                current = again
                try:
                    trajectory, score = await self._attempt(current, index)
                except Exception as error:
                    # an error about something that was written concerns this episode alone
                    if isinstance(error, HeadraceError) and not isinstance(error, CodecError):
                        raise
                    log.exception(_name(lease, index))
                    trajectory, score = (
                        None,
                        self._failure(lease, f"the runner failed: {type(error).__name__}: {error}"),
                    )
                again, score = await self._hand_in(current, index, trajectory, score)
                status = "graded" if score is None else score.status
                self._count(current, status.lower())
                if score is None or again is None:
                    continue
                log.info("%s starts over: %s: %s", _name(lease, index), status, score.message)
                if status in ("NOT_STARTED", "INTERRUPTED"):
                    restarts += 1
                    await asyncio.sleep(pause_after(restarts, _FIRST_PAUSE_S, _LAST_PAUSE_S))
        except Surplus:
            self._count(lease, "surplus")
        except Fenced as refusal:
            self._count(lease, "lost")
            log.info("%s: %s", _name(lease, index), refusal)

    async def _hand_in(
        self, lease: Lease, index: int, trajectory: AnyTrajectory | None, score: Score | None
    ) -> tuple[Lease | None, Score | None]:
        """Hand in the result. Returns the lease under which the episode has to start over, if any, and the score that the buffer took."""
        try:
            return await self._retry(partial(self._replay.finish, lease, index, trajectory, score)), score
        except (CodecError, InvalidCall) as error:
            if trajectory is None:
                raise
            log.warning("%s: %s", _name(lease, index), error)
            failed = await self._refusal(
                lease, trajectory.newest_version, f"its trajectory can't be handed in: {error}"
            )
            return await self._retry(partial(self._replay.finish, lease, index, None, failed)), failed

    async def _attempt(self, lease: Lease, index: int) -> tuple[AnyTrajectory | None, Score | None]:
        """Play the episode once. Returns the trajectory and the score to hand in. Raises `Fenced` if the lease was lost, `ServiceError`."""
        env_name = lease.group.env_name
        seed = f"{self._config.algorithm.seed} {lease.group.id} {index}"
        keep = partial(self._keep, lease, index)
        name = _name(lease, index)
        episode = OpenEpisode(name, lease, index, self._fleet, keep, self._limits, self._clocks, seed)
        key = self._gateway.open(episode)
        self._open.add(episode)
        metrics.OPEN.set(len(self._open))
        began = time.monotonic()
        try:
            with self._traced(lease, index) as episode.span:
                score, hung, artifacts = await self._play(episode, key)
        finally:
            self._open.discard(episode)
            metrics.OPEN.set(len(self._open))
            self._gateway.close(key)
            ending = await episode.end()
            _observe(env_name, episode, ending)
        seconds = time.monotonic() - began
        trained = sum(call.trained for call in ending.calls)
        ended = Outcome(score, hung, ending.limit, ending.refused, trained, ending.paths)
        agents, graded = self._config.agents, self._config.episodic[env_name].grader is not None
        finish = decisions.finish(ended, on_limit=agents.on_limit, branches=agents.branches, graded=graded)
        handed_in = None if finish.score is None else self._complete(finish.score, episode, seconds)
        # a score that can't be kept has become FAILED, which goes without a trajectory
        if not finish.with_trajectory or (handed_in is not None and handed_in.status != "SCORED"):
            return None, handed_in
        timings = {"episode_s": seconds}
        try:
            return self._record(lease, index, ending, artifacts, timings), handed_in
        except CodecError as error:
            return None, self._failure(lease, f"its trajectory can't be recorded: {error}")

    def _traced(self, lease: Lease, index: int) -> tracing.Span:
        return tracing.span(
            "episode",
            tracing.lease_span(self._replay.run_id, lease.group.id, lease.attempt, f"runner {self.runner}"),
            attributes=tracing.named(
                group_id=lease.group.id,
                index=index,
                attempt=lease.attempt,
                runner_id=self.runner,
                environment=lease.group.env_name,
            ),
        )

    def _record(
        self, lease: Lease, index: int, ending: SessionSummary, artifacts: dict[str, Any], timings: dict[str, float]
    ) -> AnyTrajectory:
        """Return the trajectory. Raises `CodecError` if it is invalid or too large."""
        most = self._limits.nbytes
        if (size := artifacts_bytes(artifacts)) > most:  # before anything iterates over them
            raise CodecError(
                f"its artifacts have {size} bytes, and its record may have {most} (agents.max_episode_bytes)"
            )
        record = episode_record(
            lease.group.id,
            lease.attempt,
            index,
            ending.calls,
            truncated=ending.limit is not None,
            runner=self.runner,
            timings=timings,
            artifacts=artifacts,
        )
        # the session has bounded everything else
        if artifacts and (size := len(record.encode())) > most:
            raise CodecError(
                f"its record has {size} bytes with its artifacts, and may have {most} (agents.max_episode_bytes)"
            )
        return record

    async def _play(self, episode: OpenEpisode, key: str) -> tuple[Score | None, str | None, dict[str, Any]]:
        """Run the program. Returns its score (None: it returned no reward), the clock that ended it, if one did, and its artifacts. Raises
        the error of `OpenEpisode.over`, `ServiceError`."""
        running = asyncio.create_task(self._programs.run(self._make_episode(episode, key)))
        ends: list[asyncio.Future[Any]] = [running, episode.over]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                why = episode.over.result()
                if isinstance(why, str):
                    return None, why, {}
                if isinstance(why, (CodecError, EpisodeTooLarge)):
                    return Score("FAILED", message=f"a call could not be kept: {why}"), None, {}
                if isinstance(why, InvalidCall):
                    # A program's own errors are refused before sampling. Here the buffer has forgotten the earlier calls or the weights,
                    # because its server lost writes. NOT_STARTED always costs nothing; INTERRUPTED says that a process died
                    return Score("NOT_STARTED", message=f"a call could not be kept: {why}"), None, {}
                raise why
            outcome: EpisodeOutcome = running.result()
            return outcome.score, None, outcome.artifacts
        finally:
            await cancel([running])

    def _make_episode(self, episode: OpenEpisode, key: str) -> Episode:
        group, index, lease = episode.lease.group, episode.index, episode.lease
        began_before = lease.tries.get(index, 0)
        env = self._config.episodic[group.env_name]
        return Episode(
            base_url=f"{self._url}/s/{key}/v1",
            api_key=key,
            messages=group.messages,
            public={name: group.extra_env_info[name] for name in env.public if name in group.extra_env_info},
            limits=EpisodeLimits(self._limits.calls, self._limits.tokens),
            # not episode_s: that clock stands still while no replica can sample, and this time does not
            deadline=time.monotonic() + self._config.longest_episode_s,
            attempt=lease.attempt - 1 + began_before,
            environment=group.env_name,
            task_name=group.task_name,
            group_id=group.id,
            index=index,
            idempotency_key=f"{lease.token}/{index}/{began_before}",
        )

    async def _keep(self, lease: Lease, index: int, number: int, nonce: str, call: Call, timeline: str) -> None:
        await self._retry(partial(self._replay.append, lease, index, number, nonce, call, timeline))

    async def _refusal(self, lease: Lease, newest_version: int, message: str) -> Score:
        """Return the score of an episode that the buffer refuses. The program is not to blame if the buffer has forgotten the weights,
        because its server lost writes. The trainer then restores the buffer, which ends the lease."""
        state = await self._retry(self._replay.state)
        if newest_version > state.next_step:
            return Score("NOT_STARTED", message=message, environment=lease.group.env_name).storable()
        return self._failure(lease, message)

    def _failure(self, lease: Lease, message: str) -> Score:
        return Score("FAILED", message=message, environment=lease.group.env_name).storable()

    def _complete(self, score: Score, episode: OpenEpisode, seconds: float) -> Score:
        """Return the score with what the runner adds: the environment, the options that the run's values replaced, and the time."""
        metadata = dict(score.metadata)
        if episode.imposed:
            metadata["headrace_asked"] = episode.imposed
        name = episode.lease.group.env_name
        completed = msgspec.structs.replace(
            score,
            metadata=metadata,
            environment=score.environment or name,
            timings={**score.timings, "environment": seconds},
        )
        return completed.storable()

    def _count(self, lease: Lease, outcome: str) -> None:
        self.status.outcomes[outcome] += 1
        metrics.EPISODES.labels(lease.group.env_name, outcome).inc()


def make_limits(config: Config) -> SessionLimits:
    """Return the limits of an episode."""
    agents, context = config.agents, config.policy.max_total_sequence_length
    return SessionLimits(
        calls=agents.max_rollout_turns,
        tokens=agents.max_episode_tokens or agents.max_rollout_turns * context,
        nbytes=agents.max_episode_bytes,
        context=context,
        new_tokens=config.policy.generation.max_new_tokens,
    )


def make_clocks(config: Config) -> Clocks:
    agents = config.agents
    return Clocks(agents.call_s, agents.think_s, agents.episode_s, agents.finish_s, agents.retry_grace_s)


def _observe(env_name: str, episode: OpenEpisode, ending: SessionSummary) -> None:
    session = episode.session
    metrics.CALLS.labels(env_name).observe(len(ending.calls))
    metrics.TOKENS.labels(env_name).observe(sum(call.completion_token_ids.size for call in ending.calls))
    metrics.ROOTS.labels(env_name).observe(sum(call.parent < 0 for call in ending.calls))
    metrics.RENDERED_AGAIN.labels(env_name).inc(session.rendered_again)
    metrics.JOINED.labels(env_name).inc(session.joined)
    for reason, count in ending.dropped.items():
        metrics.DROPPED.labels(env_name, reason).inc(count)


def _name(lease: Lease, index: int) -> str:
    return f"episode {lease.group.id}[{index}]"


def _new_id() -> str:
    return f"agents-{secrets.token_hex(6)}"
