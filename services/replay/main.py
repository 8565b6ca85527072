"""The replay service: the buffer's server (embedded unless `replay.redis_url` names another), its functions, the scorer, and the HTTP
API."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from redis import exceptions as redis_errors
from redis.asyncio import Redis

from headrace.base.errors import ConfigError, ReplayDenied, ReplayUnavailable, Restartable, ServiceError, WrongTimeline
from headrace.config import Config
from headrace.net.credentials import buffer_url
from headrace.net.http_access import HttpAccess
from headrace.net.service import bind, exported, serve_http, stop_on_signals
from headrace.replay import EnvironmentLimits, Limits, ReplayClient, worst_case_bytes
from headrace.replay.bias import Moment, Quantity, TrajectoryMeter, beyond, skews
from headrace.replay.connection import BufferConnection, hide_password, keeping_cancellation, open_redis
from headrace.replay.records import trouble_of
from headrace.run.lineage import FOLDER, LineageFiles
from headrace.run.replicas_wanted import ReplicasWanted

from . import library
from .aof import AofRewrites
from .embedded import EmbeddedServer
from .gauges import BufferGauges, LatestStats
from .http import build_app
from .scorer import run_scorer

_log = logging.getLogger("headrace.replay")
# give up on an embedded server that ends this many times within a minute
_DEATHS, _DEATH_WINDOW_S = 3, 60.0
_LOOK_S = 1.0
_PING_S = 5.0


def main(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises `HeadraceError` for a busy port, an unreachable server, or one that can't hold the buffer."""
    limits = make_limits(config)
    asyncio.run(_serve(config, limits))


def make_limits(config: Config) -> Limits:
    """Return the limits that the configuration sets for the state machine. Raises `ConfigError` if two batches don't fit into
    `replay.max_bytes`."""
    algorithm, replay, generation = config.algorithm, config.replay, config.policy.generation
    new = min(generation.max_new_tokens, config.policy.max_total_sequence_length - 1)
    longest = config.policy.max_total_sequence_length - new
    # one batch in training, and the next being generated
    needed = 2 * algorithm.num_prompts_per_step * worst_case_bytes(algorithm.num_generations_per_prompt, longest, new)
    if needed > replay.max_bytes:
        raise ConfigError(
            f"replay.max_bytes {replay.max_bytes} can't hold two batches of {algorithm.num_prompts_per_step} x "
            f"{algorithm.num_generations_per_prompt} trajectories; set it to at least {needed}"
        )
    return Limits(
        **replay.model_dump(include={field.name for field in dataclasses.fields(Limits)}),
        prompts_per_step=algorithm.num_prompts_per_step,
        generations_per_prompt=algorithm.num_generations_per_prompt,
        max_age=algorithm.max_age,
        staleness_policy=algorithm.asynchrony.staleness_policy,
        replica_dead_s=config.rollout.dead_after_s,
        ahead_steps=algorithm.ahead_steps,
        redundant=replay.redundant_generations,
        filter_equal=algorithm.use_dynamic_sampling,
        filter_components=algorithm.adv_estimator.weighs_components,
        reward_min=algorithm.reward_scaling.source_min if algorithm.reward_scaling.enabled else None,
        reward_max=algorithm.reward_scaling.source_max if algorithm.reward_scaling.enabled else None,
        max_scored_per_step=int(algorithm.dynamic_sampling_max_gen_batches * algorithm.generation_batch)
        if algorithm.use_dynamic_sampling
        else 0,
        max_episode_bytes=config.agents.max_episode_bytes,
        environments={
            name: EnvironmentLimits(env.failure_share, env.give_up_after, env.runs_episodes)
            for name, env in config.env.items()
        },
    )


async def _serve(config: Config, limits: Limits) -> None:
    async with running(config, limits, stop_on_signals()) as (port, work):
        _log.info("run %s at %s, HTTP on port %d", config.run.id, hide_password(config.redis_url), port)
        await work()


@contextlib.asynccontextmanager
async def running(
    config: Config, limits: Limits, stop: asyncio.Event
) -> AsyncIterator[tuple[int, Callable[[], Awaitable[None]]]]:
    """Start the service. Yield the port of the HTTP API, and an async function that returns after `stop` or raises the error that ends the
    service."""
    if config.run.id is None:
        raise ServiceError("run.id is not set; give `run.id=NAME`, or start the pipeline with `headrace up`")
    async with contextlib.AsyncExitStack() as stack:
        access = HttpAccess.of(config, config.replay.host)
        sock = stack.enter_context(bind(config.replay.host, config.replay.port, "replay.port"))
        server = None
        if config.replay.redis_url is None:
            server = EmbeddedServer.of(config, config.replay.redis_host, config.replay.redis_port)
            stack.push_async_callback(server.stop)
            await server.start()
        url = buffer_url(config, "replay")
        client = ReplayClient(open_redis(url), config.run.id)
        stack.push_async_callback(client.aclose)
        buffer = _Buffer(client, limits, url, config.replay.bias_warning)
        await buffer.prepare()
        stack.enter_context(exported(BufferGauges(buffer.latest)))
        lineage = LineageFiles(config.checkpoint_folder / FOLDER)
        app = build_app(client, buffer.trouble, lineage, buffer.waits_for)
        await stack.enter_async_context(serve_http(app, sock, access))

        async def work() -> None:
            helpers = [buffer.watch()]
            if server is not None:
                helpers += [_restart_forever(server), _kill_if_hung(server, client.redis, config.run.hang_timeout_s)]
            else:
                helpers.append(AofRewrites(BufferConnection(client.redis, client.run_id)).watch())
            await _until_stopped(stop, run_scorer(config, client, stop), helpers)

        yield sock.getsockname()[1], work


async def _until_stopped(stop: asyncio.Event, scorer: Coroutine[Any, Any, None], helpers: list[Any]) -> None:
    """Run `scorer`, which ends at `stop`, alongside the endless `helpers`. The first that raises ends them all."""
    scoring = asyncio.create_task(scorer)
    helping = [asyncio.create_task(helper) for helper in helpers]
    try:
        await asyncio.wait([scoring, *helping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        for task in helping:
            task.cancel()
        results = await asyncio.gather(scoring, *helping, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


class _Buffer:
    """The run on its server. It recreates functions and run if the server comes back without them."""

    def __init__(self, client: ReplayClient, limits: Limits, url: str, bias_warning: float | None = None) -> None:
        """`bias_warning` is the selection bias, in standard deviations, above which to warn (`replay.bias_warning`)."""
        self.latest = LatestStats()
        self._client = client
        self._limits = limits
        self._url = url
        self._bias_warning = bias_warning
        self._warned: set[Quantity] = set()
        self._trouble: str | None = None
        self._since = ""  # the time of day when the trouble began
        self._superseded = False  # another start of the replay service has set the limits
        self._broken: dict[str, str] = {}  # the broken environments, with the reason
        ahead = limits.ahead_steps
        self._wanted = ReplicasWanted(client, limits.max_age if ahead is None else ahead)

    async def waits_for(self) -> list[str]:
        """Return the broken environments that the run waits for, and why."""
        return [f"environment {name}: {message}" for name, message in self._broken.items()]

    async def trouble(self) -> str | None:
        """Return why the buffer can't be used now, or None if it can."""
        return None if self._trouble is None else f"{self._trouble} (since {self._since})"

    def _note(self, trouble: str | None, log: str) -> None:
        """Note why the buffer can't be used now, or None, and log it (`log` is the message's format) when it begins."""
        if trouble is not None and self._trouble is None:
            self._since = time.strftime("%H:%M:%S")
            _log.warning(log, trouble)
        self._trouble = trouble

    async def prepare(self) -> None:
        await self._load()
        await self._client.open_run(self._limits)
        self._superseded = False

    async def _load(self) -> None:
        await library.check_server(self._client.redis, self._url, self._limits.max_bytes)
        await library.load(self._client.redis)

    async def watch(self) -> None:
        while True:
            try:
                self.latest.stats = await self._client.stats()
                if not self._superseded and await self._reopen(self.latest.stats["opened"]):
                    _log.warning("the buffer's server lost writes; the run's limits have been set again")
                self.latest.wanted = await self._wanted.decide(self.latest.stats)
                self.latest.meters = await self._client.bias()
                await self._warn_of_bias(self.latest.meters)
                self._report(self.latest.stats["environments"])
                self._note_full(await self._client.make_room())
            except ReplayUnavailable as error:
                self.latest.stats = self.latest.meters = None
                self._note(await self._bring_back() or str(error), "%s; waiting for it")
            await asyncio.sleep(_LOOK_S)

    async def _bring_back(self) -> str | None:
        """Load the functions and open the run on a server that came back without them. Return why that can't be done now, or None.

        What ends the service at its start is waited for here: a server that is a replica during a failover becomes a primary again, and a
        person may change its settings, load the functions, or correct its users.
        """
        try:
            await self._load()
            await self._reopen("")
        except (ReplayUnavailable, ReplayDenied) as error:
            return str(error)
        return None

    async def _reopen(self, opened: str) -> bool:
        """Open the run again if the server lost that write, unless another start of the replay service has opened it since. Return whether
        it was necessary. `opened` is the start that set the run's limits, or "" if that is unknown."""
        try:
            reopened = await self._client.reopen_run(self._limits, opened)
            self._superseded = False
            return reopened
        except WrongTimeline:
            if not self._superseded:
                _log.warning(
                    "another replay service has been started for run %s, and its limits apply; stop one of the two",
                    self._client.run_id,
                )
            self._superseded = True
            return False

    def _note_full(self, refused: int) -> None:
        """Log once that the server has reached its memory limit, and note when it no longer has."""
        full = (
            f"the Redis server has reached its maxmemory and refused {refused} bytes; raise maxmemory (at least 1.25 x replay.max_bytes), "
            "free other data on it, or lower replay.max_bytes. The run waits, and no attempt is charged"
        )
        self._note(full if refused else None, "%s")

    def _report(self, environments: Sequence[Mapping[str, Any]]) -> None:
        """Log once when an environment breaks, with the traceback, and once when it works again."""
        broken = {environment["name"]: environment for environment in environments if environment["broken"]}
        for name in broken.keys() - self._broken.keys():
            traceback = broken[name]["traceback"]
            _log.error(
                "environment %s is %s; the run waits for it, and nothing is lost: %s%s",
                name,
                trouble_of(broken[name]["kind"]),
                broken[name]["message"],
                f"\n{traceback}" if traceback else "",
            )
        for name in self._broken.keys() - broken.keys():
            _log.info("environment %s works again", name)
        self._broken = {name: environment["message"] for name, environment in broken.items()}

    async def _warn_of_bias(self, meters: Mapping[Moment, TrajectoryMeter]) -> None:
        """Log a warning and append an event each time the bias of a quantity exceeds the limit."""
        found = beyond(skews(meters), self._bias_warning)
        for skew in found:
            if skew.quantity not in self._warned:
                _log.warning("selection bias: %s (replay.bias_warning %s)", skew, self._bias_warning)
                await self._client.append_event("selection bias", {"quantity": skew.quantity, "message": str(skew)})
        self._warned = {skew.quantity for skew in found}


async def _restart_forever(server: EmbeddedServer) -> None:
    """Restart the embedded server on its append-only file each time it ends."""
    deaths: list[float] = []
    clock = asyncio.get_running_loop().time
    while True:
        status = await server.wait()
        deaths = [moment for moment in deaths if moment > clock() - _DEATH_WINDOW_S] + [clock()]
        if len(deaths) >= _DEATHS:
            raise Restartable(
                f"the embedded server ended {len(deaths)} times within a minute, last with status {status}; "
                f"see {server.folder / 'server.log'}"
            )
        _log.warning("the embedded server ended with status %d; restarting it on its append-only file", status)
        await server.start()


async def _kill_if_hung(server: EmbeddedServer, redis: Redis, timeout_s: float) -> None:
    """Kill the embedded server once it has been silent for `timeout_s`, so that `_restart_forever` restarts it. A server that refuses the
    connection has ended, and a server that is loading answers."""
    silent = 0.0
    while True:
        try:
            async with asyncio.timeout(_PING_S):
                with keeping_cancellation():
                    await redis.ping()
            silent = 0.0
        except (TimeoutError, redis_errors.TimeoutError):
            silent += _PING_S
        except redis_errors.RedisError:
            silent = 0.0
        if silent > timeout_s:
            _log.error("the embedded server has not answered for %.0f s (run.hang_timeout_s); killing it", silent)
            server.kill()
            silent = 0.0
        await asyncio.sleep(_LOOK_S)
