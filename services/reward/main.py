"""The reward service: the gRPC hub, its worker processes, and its HTTP pages."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from headrace.base.addresses import replace_wildcard, with_port
from headrace.base.errors import ConfigError
from headrace.base.scratch import scratch_folder
from headrace.base.tasks import run_until
from headrace.config import Config
from headrace.config.data import DataSourceConfig
from headrace.config.environments import (
    AttachedConfig,
    CombineConfig,
    CommandConfig,
    EpisodicConfig,
    LLMJudgeConfig,
    RewardModelConfig,
    SandboxedConfig,
)
from headrace.net import rpc
from headrace.net.credentials import load_credentials
from headrace.net.http_access import HttpAccess
from headrace.net.service import bind, hide_from_user, serve_http, stop_on_signals
from headrace.v1 import reward_pb2_grpc

from .attached import AttachedBackend
from .backend import EnvironmentBackend
from .combine import CombineBackend
from .episode_environments import EpisodeBackend
from .function_backend import FunctionBackend
from .hosted import Hosted, HostedBackend
from .http import build_app
from .hub import Hub
from .pool import WorkerPool
from .reward_model import RewardModel
from .sandboxed import SandboxedBackend
from .served import ServedBackend

_log = logging.getLogger("headrace.reward")
_GRACE_S = 2.0
_SERVICE = "headrace.v1.RewardService"
# The roles that may call each method. A score is only worth what the environments make it: only the scorer may request one, and only a
# runner may request an episode.
ROLES = {
    f"/{_SERVICE}/Score": ("scorer",),
    f"/{_SERVICE}/RunEpisode": ("agents",),
    f"/{_SERVICE}/ListEnvironments": ("operator", "reader", "scorer"),
    f"/{_SERVICE}/Attach": ("environment", "operator"),
    rpc.REFLECTION: ("operator", "reader"),
}


@dataclasses.dataclass(frozen=True)
class Running:
    """The ports of a running service. `failure` never returns: it raises the error that ends the service."""

    port: int
    http_port: int
    failure: Callable[[], Coroutine[Any, Any, None]]


def main(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ServiceError` if a port is busy or the workers can't start."""
    hide_from_user()
    asyncio.run(_serve(config))


async def _serve(config: Config) -> None:
    stop = stop_on_signals()
    async with running(config) as service:
        _log.info("reward hub on %s:%d, HTTP on port %d", config.reward.host, service.port, service.http_port)
        await run_until(service.failure(), stop.wait())


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Running]:
    """Run the whole service while the context is open."""
    reward = config.reward
    _check_started(config)
    async with contextlib.AsyncExitStack() as stack:
        access = HttpAccess.of(config, reward.host)
        credentials = load_credentials(config)
        rpc_access = None if credentials is None else rpc.RpcAccess(credentials, ROLES)
        server = rpc.server(reward.max_message_bytes, rpc_access, keep_alive=True)
        port = rpc.listen(server, reward.host, reward.port, "reward.port", access.certificate)
        http = stack.enter_context(bind(reward.host, reward.http_port, "reward.http_port"))

        sandboxed = {name: env for name, env in config.env.items() if isinstance(env, SandboxedConfig)}
        pool = WorkerPool(sandboxed, reward.workers, sources_of_parts(config))
        await pool.start()
        stack.push_async_callback(pool.aclose)
        environments: dict[str, EnvironmentBackend] = {
            name: SandboxedBackend(name, env, pool, reward.workers) for name, env in sandboxed.items()
        }

        attached: dict[str, AttachedBackend] = {}

        async def reach(name: str, env: EpisodicConfig) -> AttachedBackend | FunctionBackend | ServedBackend:
            if isinstance(env, AttachedConfig):
                attached[name] = AttachedBackend(name, env, with_port(replace_wildcard(reward.host), port))
                return attached[name]
            if env.address is None:  # a program, or a file that `headrace up` does not serve
                folder = stack.enter_context(scratch_folder("headrace-program-"))
                function = FunctionBackend(name, env, folder, config.security.tls_ca)
                stack.push_async_callback(function.aclose)
                await function.start()
                return function
            served = ServedBackend(name, env, reward.max_message_bytes, config.security, credentials)
            stack.push_async_callback(served.aclose)
            return served

        for name, env in config.env.items():
            if isinstance(env, LLMJudgeConfig | RewardModelConfig):
                hosted = make_hosted(name, env, config)
                stack.push_async_callback(hosted.aclose)
                await hosted.start()
                environments[name] = HostedBackend(env, hosted)
            elif isinstance(env, EpisodicConfig):
                backend = await reach(name, env)
                environments[name] = EpisodeBackend(name, env, backend, environments) if env.episodes else backend
        for name, env in config.env.items():
            if isinstance(env, CombineConfig):
                environments[name] = CombineBackend(name, env, environments)

        hub = Hub(environments, config.env, attached, reward.max_message_bytes, rpc_access)
        reward_pb2_grpc.add_RewardServiceServicer_to_server(hub, server)
        health = await rpc.add_health_and_reflection(server, [_SERVICE])
        await server.start()
        stack.push_async_callback(server.stop, _GRACE_S)
        stack.push_async_callback(hub.aclose)
        stack.push_async_callback(health.enter_graceful_shutdown)
        await stack.enter_async_context(serve_http(build_app(hub), http, access))
        yield Running(port, http.getsockname()[1], pool.failure)


def make_hosted(name: str, env: LLMJudgeConfig | RewardModelConfig, config: Config) -> Hosted:
    """Create the hosted environment of `env.<name>`. Raises `ConfigError` if something that it needs can't be used."""
    if isinstance(env, RewardModelConfig):
        return RewardModel(name, env)
    # numpy and jinja2 are a fifth of what a hub takes to start
    from .judge.asking import VerdictStore
    from .llm_judge import LLMJudge

    if config.run.id is None:
        return LLMJudge(name, env, VerdictStore(None))
    folder = config.run_folder
    return LLMJudge(name, env, VerdictStore(folder / f"judge-{name}.sqlite"), folder / f"calibration-{name}.json")


def sources_of_parts(config: Config) -> list[DataSourceConfig]:
    """Return the run's data sets, each also under every environment that scores it as part of another one or as its grader."""
    return [
        source.model_copy(update={"env_name": name})
        for source in config.data.sources
        if source.env_name in config.env
        for name in config.list_scorers(source.env_name)
    ]


def _check_started(config: Config) -> None:
    """Raise `ConfigError` for a program that was not started. Only `headrace up` starts programs, and gives them a port."""
    for name, env in config.env.items():
        if isinstance(env, CommandConfig) and not env.port:
            raise ConfigError(
                f"env.{name}.command {' '.join(env.command)}: only `headrace up` starts programs. Start it yourself as a separate service, "
                f"and give its address: env.{name}.target=HOST:50400 env.{name}.command=null"
            )
