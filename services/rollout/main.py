"""`headrace rollout`: one replica. It joins the fleet, waits for weights, and generates until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from headrace.base import devices
from headrace.base.addresses import with_port
from headrace.base.errors import HeadraceError
from headrace.base.model_name import MODEL, TOKENIZER
from headrace.config import Config
from headrace.config.services import RolloutConfig
from headrace.net import tracing
from headrace.net.credentials import buffer_url
from headrace.net.http_access import HttpAccess
from headrace.net.replica_client import PATHS, ROLE
from headrace.net.service import bind, exported, serve_http, stop_on_signals, stop_signals
from headrace.replay import ReplayClient

from . import peers
from .announcement import announced
from .engine import describe, running_engine
from .http import RolloutMetrics, build_app
from .pulling import Puller
from .worker import RolloutWorker

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

# how long the process may live after a signal that arrives during its start
_LEAVING_S = 10


class _Stopped(BaseException):
    """Raised when a signal arrives while the replica starts."""


def main(config: Config) -> None:
    """Run a replica until SIGTERM or SIGINT, then return its leases and end the process. Raises `HeadraceError` for an error that the user
    must fix."""
    _leave_on_signals()
    with contextlib.suppress(_Stopped):
        _run(config)
    tracing.stop()
    # nothing is left to do, and shutting down an interpreter that has vLLM loaded can take longer than a stopped service may take
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(config: Config) -> None:
    MODEL.check("policy.model_name", config.policy.model_name)
    if config.policy.tokenizer.name is not None:
        TOKENIZER.check("policy.tokenizer.name", config.policy.tokenizer.name)
    with (
        bind(config.rollout.host, config.rollout.port, "rollout.port") as sock,
        asyncio.Runner() as runner,
    ):
        replay = runner.run(ReplayClient.connect(buffer_url(config, "rollout"), config.run.id))
        try:
            _generate(config, sock, replay, runner)
        except HeadraceError:
            # vLLM's engine prints errors if it is collected as late as the interpreter's exit
            gc.collect()
            raise
        finally:
            runner.run(replay.aclose())


def _generate(config: Config, sock: socket.socket, replay: ReplayClient, runner: asyncio.Runner) -> None:
    # On a CPU the engine starts within seconds. It is also forked, which another thread would prevent.
    slow = devices.engine_is_for_cuda(devices.installed_versions())
    with contextlib.ExitStack() as stack:
        with announced(config) if slow else contextlib.nullcontext():
            engine = stack.enter_context(running_engine(config))
        runner.run(_serve(config, sock, replay, engine))


def _leave_on_signals() -> None:
    """Stop on a signal until `_serve` takes over: starting the engine blocks this thread for many seconds."""

    def leave(signum: int, frame: object) -> None:
        # a destructor or an import callback swallows this exception: then SIGALRM ends the process
        signal.alarm(_LEAVING_S)
        raise _Stopped

    for signum in stop_signals():
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
        "gpus": " ".join(_gpus(engine)),
        "model": config.policy.model_name,
    }
    log.info("%s", await describe(engine))
    access = HttpAccess.of(config, config.rollout.host, {ROLE: frozenset(PATHS), peers.ROLE: frozenset({peers.PATH})})
    with Puller.of(config, replay) as puller, contextlib.ExitStack() as stack:
        if puller is not None and (own := peers.own_url(config, str(info["url"]))) is not None:
            info[peers.SERVES] = own
        worker = RolloutWorker(config, engine, replay, info, puller)
        stack.enter_context(exported(RolloutMetrics(worker, engine, puller)))
        async with serve_http(build_app(config, engine, worker, puller), sock, access):
            await worker.run(stop)


def _gpus(engine: AsyncLLM) -> list[str]:
    """Return the UUIDs of the engine's devices, one per worker. The list is empty on a CPU, or if NVML can't be reached."""
    if engine.vllm_config.device_config.device_type != "cuda":
        return []
    return devices.uuids(os.environ)[: engine.vllm_config.parallel_config.tensor_parallel_size]


def _reachable_as(rollout: RolloutConfig) -> str:
    """Return the host name under which others reach this replica: the machine's name if it listens on all interfaces (as in a
    container)."""
    if rollout.advertise_host is None and rollout.host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return rollout.advertise_host or rollout.host
