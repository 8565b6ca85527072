"""The user's functions, verifiers environments and files. Each runs in its own process, which the hub starts, and restarts when it
dies."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.base.tasks import cancel
from headrace.base.tls import trusting
from headrace.config.environments import CustomConfig, EpisodicConfig, TargetConfig
from headrace.config.security import SecurityConfig
from headrace.env.verifiers.program import LOAD_S
from headrace.net import rpc
from headrace.v1 import episode_pb2
from headrace.v1 import reward_pb2 as pb

from .backend import Described, Results, Trajectories
from .child_process import ChildProcess
from .function_process import FunctionSpecification
from .served import ServedBackend

_log = logging.getLogger("headrace.reward")


class FunctionProcess(ChildProcess):
    """A process with the user's environment variables and those in `told`, but without the variables of Headrace's services."""

    start_timeout_s = LOAD_S
    program: Sequence[str] = ("-P", "-m", "headrace_services.reward.function_process")

    def __init__(self, specification: FunctionSpecification, told: Mapping[str, str]) -> None:
        super().__init__(specification)
        self.what = f"the process of env.{specification.name}"
        self._told = told

    def environ(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        return {**own, **self._told}


class FunctionBackend:
    """An environment in its own process. It is called like a served environment, on a socket that only this user can reach."""

    awaited = True

    def __init__(self, name: str, env: EpisodicConfig, folder: Path, authorities: str | None) -> None:
        """`folder`, which only this user may enter, is for the socket. `authorities` is `security.tls_ca`, which the environment's programs
        trust. Raises `ConfigError` if it can't be used."""
        self.kind = (
            pb.EnvironmentStatus.KIND_SERVED if isinstance(env, CustomConfig) else pb.EnvironmentStatus.KIND_BUILT_IN
        )
        address = f"unix:{folder / 'program'}"
        told = trusting(authorities, folder / "authorities.pem")
        self._process = FunctionProcess(FunctionSpecification(name, env.model_dump(mode="json"), address), told)
        served = TargetConfig(target=address, **env.model_dump(include={*EpisodicConfig.model_fields}))
        self._served = ServedBackend(name, served, rpc.MAX_MESSAGE_BYTES, SecurityConfig(), None)
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process. Raises `ServiceError` with the reason if the environment can't be loaded."""
        await self._process.start()
        self._keeping = asyncio.create_task(self._keep())

    async def score(self, trajectories: Trajectories, timeout_s: float | None) -> Results:
        return await self._served.score(trajectories, timeout_s)

    async def run_episode(self, episode: episode_pb2.Episode, timeout_s: float) -> episode_pb2.EpisodeOutcome:
        return await self._served.run_episode(episode, timeout_s)

    async def describe(self) -> Described:
        if not self._process.alive:
            return None, self._process.problem or f"{self._process.what} has died and is being restarted"
        return await self._served.describe()

    async def aclose(self) -> None:
        if self._keeping is not None:
            await cancel([self._keeping])
        await self._served.aclose()
        await self._process.kill()

    async def _keep(self) -> None:
        while True:
            await self._process.wait()
            how = await self._process.exit_reason(EOFError())
            _log.warning("%s has died (%s) and is being restarted", self._process.what, how)
            await self._process.restart()
