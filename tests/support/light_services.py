"""Services that start in a moment, for tests of what runs services: `headrace trainer` or `headrace rollout` is one of these instead.

`headrace SERVICE` finds a service by its entry point; `instead_of` puts others first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from headrace.base.errors import ReplayUnavailable, ServiceError
from headrace.config import Config
from headrace.net.credentials import buffer_url
from headrace.net.http_access import HttpAccess
from headrace.net.service import EXIT_STOPPED, bind, serve_http, stop_on_signals
from headrace.replay import ReplayClient
from headrace.replay.connection import open_redis
from headrace.replay.retry import BufferRetry
from tests.support import idle_services
from tests.support.forks import FORKED_FOR, connected

ROOT = Path(__file__).parents[2]
COMMANDS = ("up", "replay", "reward", "rollout", "agents", "trainer", "page", "acl", "certs", "credentials", "groups")
# Python runs it as it starts.
_FORKING = """
import sys
words = [word for word in sys.orig_argv[1:] if word != "-P"]
if words[:1] and words[0].endswith("/headrace"):
    words[:1] = ["-m", "headrace.cli"]
if words[:2] == ["-m", "headrace.cli"] and (kind := {kinds!r}.get("".join(words[2:3]))):
    from tests.support.forks import be_command
    be_command(kind, *words[2:])
"""


def instead_of(folder: Path, *, executed: bool = False, **services: str) -> dict[str, str]:
    """The environment of a process whose `headrace NAME` runs the function given, through a distribution in `folder`: one here, or of
    `idle_services`, by its name, or MODULE:NAME. On GPUs (`tests.support.nvml`) everything fits. Those of `COMMANDS` are forked,
    without what they take to import, unless they are to be `executed`, for a test that looks at them."""
    info = folder / "light_services-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: light-services\nVersion: 1\n")
    points = [
        f"{name} = {function if ':' in function else f'{_module(function)}:{function}'}\n"
        for name, function in services.items()
    ]
    tools = ["[headrace.tools]\n", f"plan-memory = {idle_services.__name__}:ample_memory\n"]
    (info / "entry_points.txt").write_text("".join(["[headrace.services]\n", *points, *tools]))
    if not executed:
        kinds = dict.fromkeys(COMMANDS, "trainer")
        if ":" in services.get("rollout", ":"):
            kinds["rollout"] = "engine"
        elif services["rollout"] == idle_services.idle_rollout.__name__:
            del kinds["rollout"]  # what it leaves behind is to be in the group that is ended
        (folder / "sitecustomize.py").write_text(_FORKING.format(kinds=kinds))
        # its server, and that of a real hub's workers, are to be no children of a process that a test looks at
        for kind in ("trainer", *(() if hasattr(idle_services, services.get("reward", "")) else ("scorer",))):
            connected(kind).close()
    path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _module(function: str) -> str:
    return idle_services.__name__ if hasattr(idle_services, function) else __name__


def looked_up_reward(config: Config) -> None:
    """The real hub, whose sockets and environment other processes of its user can look up."""
    from headrace_services.reward import main

    with mock.patch.object(main, "hide_from_user"):
        main.main(config)


def looked_up_agents(config: Config) -> None:
    """The real runner, as `looked_up_reward`."""
    from headrace_services.agents import main

    with mock.patch.object(main, "hide_from_user"):
        main.main(config)


def talking_trainer(config: Config) -> None:
    """Tells the buffer of a step every tenth of a second, and trains nothing. Goes on after the step that it told of last, and waits
    for a buffer that is away."""

    async def train() -> None:
        stop, retry = stop_on_signals(), BufferRetry()
        async with contextlib.aclosing(
            ReplayClient(open_redis(buffer_url(config, "trainer")), str(config.run.id))
        ) as replay:
            timeline = (await retry(lambda: replay.rewind(0, secrets.token_hex(8)))).timeline
            told = await retry(lambda: replay.newest_metrics(1))
            for step in range(told[0][2] + 1 if told else 0, config.algorithm.max_num_steps):
                await retry(partial(replay.publish_metrics, "train", step, {"reward": 0.5}, timeline))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 0.1)
                    sys.exit(EXIT_STOPPED)

    asyncio.run(train())


def served_trainer(config: Config) -> None:
    """Serves the trainer's HTTP port, and trains nothing."""
    from headrace_services.trainer.distributed.liveness import Progress
    from headrace_services.trainer.telemetry.http import build_app

    async def ready() -> str | None:
        return None

    async def show() -> None:
        stop = stop_on_signals()
        with contextlib.closing(bind(config.trainer.host, config.trainer.port, "trainer.port")) as sock:
            app = build_app(config, ready, Progress())
            async with serve_http(app, sock, HttpAccess.of(config, config.trainer.host)):
                await stop.wait()

    asyncio.run(show())


def small_rollout(config: Config) -> None:
    """A replica that takes part in everything, with transformers in place of vLLM."""
    asyncio.run(_generate(config))


def refusable_rollout(config: Config) -> None:
    """Belongs to the fleet and generates nothing, unless a file `refused` in the run's folder says that it has no place here."""
    if (config.run_folder / "refused").exists():
        raise ServiceError("this machine has no place for it")
    asyncio.run(_belong(config))


def loading_rollout(config: Config) -> None:
    """Is in the fleet as LOADING, until a file `loaded` in the run's folder ends that; then it belongs to it."""

    async def load() -> None:
        async with contextlib.aclosing(
            _OfThisProcess(open_redis(buffer_url(config, "rollout")), str(config.run.id))
        ) as replay:
            name = secrets.token_hex(6)
            await replay.register(name, {}, loading=True)
            while not (config.run_folder / "loaded").exists():
                await replay.heartbeat(name, [])
                await asyncio.sleep(0.1)
            await replay.deregister(name)

    asyncio.run(load())
    asyncio.run(_belong(config))


class _OfThisProcess(ReplayClient):
    """Registers a replica with what the command line shows of one."""

    async def register(self, replica: str, info: Mapping[str, Any], loading: bool = False) -> None:
        pid = int(os.environ.get(FORKED_FOR, os.getpid()))
        await super().register(replica, {**info, "pid": pid, "url": "http://127.0.0.1:1"}, loading=loading)


async def _belong(config: Config) -> None:
    stop, retry = asyncio.create_task(stop_on_signals().wait()), BufferRetry()
    async with contextlib.aclosing(
        _OfThisProcess(open_redis(buffer_url(config, "rollout")), str(config.run.id))
    ) as replay:
        name = ""
        while not stop.done():
            if not name or (await retry(partial(replay.heartbeat, name, []))).state == "DEAD":
                name = secrets.token_hex(6)
                await retry(partial(replay.register, name, {}))
            await asyncio.wait([stop], timeout=0.2)
        await replay.deregister(name)


async def _generate(config: Config) -> None:
    from tests.support.small_replica import SmallReplica

    stop = asyncio.create_task(stop_on_signals().wait())
    async with contextlib.aclosing(
        _OfThisProcess(open_redis(buffer_url(config, "rollout")), str(config.run.id))
    ) as replay:
        replica = SmallReplica(replay, Path(config.policy.model_name))
        while not stop.done():
            running = asyncio.create_task(replica.run())
            await asyncio.wait([stop, running], return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            # a buffer that is away comes back; anything else ends the process
            with contextlib.suppress(asyncio.CancelledError, ReplayUnavailable):
                await running
        await replay.deregister(replica.id)
