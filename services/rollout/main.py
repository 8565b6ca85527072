"""`headrace rollout`: one replica. It joins the fleet by itself, waits for weights, and generates until a signal stops it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from contextlib import closing
from typing import TYPE_CHECKING

from headrace.addresses import with_port
from headrace.config import Config
from headrace.config.services import RolloutConfig
from headrace.credentials import buffer_url
from headrace.http_access import HttpAccess
from headrace.model_name import check_model_name, check_tokenizer_name
from headrace.replay import ReplayClient
from headrace.service import bind, serve_http, stop_on_signals
from headrace_services.rollout.engine import running_engine
from headrace_services.rollout.http import build_app, exported
from headrace_services.rollout.worker import RolloutWorker

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def main(config: Config) -> None:
    """Run a replica until SIGTERM or SIGINT, then return its leases. Raises `HeadraceError` for an error that the user must fix."""
    _leave_on_signals()
    check_model_name("policy.model_name", config.policy.model_name)
    if config.policy.tokenizer.name is not None:
        check_tokenizer_name("policy.tokenizer.name", config.policy.tokenizer.name)
    with closing(bind(config.rollout.host, config.rollout.port, "rollout.port")) as sock, asyncio.Runner() as runner:
        replay = runner.run(ReplayClient.connect(buffer_url(config, "rollout"), config.run.id))
        try:
            _generate(config, sock, replay, runner)
        finally:
            runner.run(replay.aclose())
            # vLLM's engine prints errors if it is collected only when the interpreter exits
            gc.collect()


def _generate(config: Config, sock: socket.socket, replay: ReplayClient, runner: asyncio.Runner) -> None:
    with running_engine(config) as engine:
        runner.run(_serve(config, sock, replay, engine))


def _leave_on_signals() -> None:
    """Exit on a signal until `_serve` takes over: starting the engine blocks this thread for many seconds."""

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(0)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, leave)


async def _serve(config: Config, sock: socket.socket, replay: ReplayClient, engine: AsyncLLM) -> None:
    stop = stop_on_signals()
    port = sock.getsockname()[1]
    scheme = "http" if config.security.tls_cert is None else "https"
    info = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "url": f"{scheme}://{with_port(_reachable_as(config.rollout), port)}",
        "device": engine.vllm_config.device_config.device_type,
        "model": config.policy.model_name,
    }
    worker = RolloutWorker(config, engine, replay, info)
    access = HttpAccess.of(config, config.rollout.host)
    with exported(worker, engine):
        async with serve_http(build_app(config, engine, worker), sock, access):
            await worker.run(stop)


def _reachable_as(rollout: RolloutConfig) -> str:
    """The host name under which others reach this replica: the machine's name if it listens on all interfaces (as in a container)."""
    if rollout.advertise_host is None and rollout.host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return rollout.advertise_host or rollout.host
