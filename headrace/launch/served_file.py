"""Environments that a command is given by target. The class of a file is served while the command runs."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import ValidationError

from headrace.base.addresses import LOOPBACK, with_port
from headrace.base.errors import ConfigError
from headrace.base.scratch import scratch_folder
from headrace.config.environments import TargetConfig
from headrace.env import environment_file
from headrace.launch import guard
from headrace.launch.supervisor import child_environ
from headrace.net.service import pass_sockets, reserve, reserve_again

_LOOK_S = 0.05
_GRACE_S = 3.0
# The shown part of the end of its output, in characters.
_SHOWN = 2000


def environment_at(target: str) -> TargetConfig:
    """Return the environment that a configuration with this `target` has; for a file without a class, its only class. Raises
    `ConfigError`."""
    try:
        return TargetConfig(target=environment_file.complete_target(target))
    except ValidationError as error:
        raise ConfigError(
            f"{target} is neither FILE.py nor the host:port of a process that serves an environment"
        ) from error


class ServedFile:
    """A process that serves `FILE.py:CLASS` on the port that `reserved` reserves. Its output goes to the file `log`."""

    def __init__(self, target: str, log: Path, reserved: socket.socket) -> None:
        self.target, self.log = target, log
        self._reserved = reserved
        self._port = int(reserved.getsockname()[1])
        self.address = with_port(LOOPBACK, self._port)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Return once the process listens. Raises `ConfigError` with its output if it ends before."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headrace.env.environment_file",
                self.target,
                str(self._port),
                pass_fds=[self._reserved.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**child_environ(os.environ), **pass_sockets([self._reserved])},
                start_new_session=True,
            )
        while not await _listens(self._port):
            if self._process.returncode is not None:
                raise ConfigError(f"{self.target} ended before it served anything:\n{self.read_output()}")
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """Stop the process and everything that it started, even if they ignore SIGTERM."""
        if self._process is not None:
            await asyncio.to_thread(guard.end_groups, [self._process.pid], _GRACE_S)
            await self._process.wait()
            reserve_again(self._reserved)

    async def renew(self) -> None:
        await self.stop()
        await self.start()

    def read_output(self) -> str:
        """Return the end of its output."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-_SHOWN:].strip()


@asynccontextmanager
async def served_file(target: str) -> AsyncIterator[ServedFile]:
    """Serve `FILE.py:CLASS` while the context is open. Raises `ConfigError`."""
    environment_file.check(target)
    with scratch_folder("headrace-served-") as folder, reserve(LOOPBACK, "port") as reserved:
        served = ServedFile(target, folder / "log", reserved)
        try:
            await served.start()
            yield served
        finally:
            await served.stop()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(LOOPBACK, port)
    except ConnectionError:
        return False
    writer.close()
    return True
