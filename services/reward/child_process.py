"""The child processes of the hub: started, asked and restarted. `frames` is the other side."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Sequence

import msgspec

from headrace.base.backoff import pause_after
from headrace.base.errors import ServiceError, Unavailable

from .frames import LENGTH, Started
from .sandbox import MAX_RESULT_BYTES, SandboxDenied

_log = logging.getLogger("headrace.reward")
# the pause after a restart that failed, and the longest one
_RESTART_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_END_TIMEOUT_S = 5.0


class ChildProcess:
    """A child process of the hub, and the hub's side of its pipes. A subclass says what it runs."""

    # the interpreter's arguments; -P keeps the working directory off the import path
    program: Sequence[str]
    what: str
    start_timeout_s = 120.0

    def __init__(self, specification: msgspec.Struct) -> None:
        self._specification = specification
        self._process: asyncio.subprocess.Process | None = None
        self._usable = False
        self.started = Started()  # what it said when it was started last
        self.problem: str | None = None

    @property
    def alive(self) -> bool:
        return self._usable and self._process is not None and self._process.returncode is None

    def environ(self) -> dict[str, str]:
        """Return the environment variables of the process."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start the process. Raises `SandboxDenied`, or `ServiceError` if the process can't score for another reason."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self.program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self.environ(),
        )
        try:
            async with asyncio.timeout(self.start_timeout_s):
                answer = await self.ask(msgspec.json.encode(self._specification))
            started = msgspec.json.decode(answer, type=Started)
        except (TimeoutError, asyncio.IncompleteReadError, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            started = Started(problem=await self.exit_reason(error))
        if started.problem or not started.builds:
            await self.kill()
            if started.problem:
                raise Unavailable(f"{self.what} can't start: {started.problem}")
            raise SandboxDenied("; ".join(started.denials))
        self.started = started
        self._usable = True

    async def restart(self) -> None:
        """Restart the process, and retry with growing pauses until it runs. `problem` holds the reason meanwhile."""
        failures = 0
        while not self.alive:
            await self.kill()
            try:
                await self.start()
                self.problem = None
            except ServiceError as error:
                self.problem = str(error)
                failures += 1
                pause_s = pause_after(failures, _RESTART_PAUSE_S, _LONGEST_PAUSE_S)
                _log.warning("%s; retrying in %.0f s", error, pause_s)
                await asyncio.sleep(pause_s)

    async def wait(self) -> None:
        """Return once the process has ended, for any reason."""
        assert self._process is not None
        await self._process.wait()

    async def kill(self) -> None:
        self._usable = False
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def ask(self, frame: bytes) -> bytes:
        """Send a frame, and return the answer. Raises `OSError` or `IncompleteReadError` if there is no answer; the process is unusable
        after that."""
        await self.send(frame)
        return await self.receive(lambda: MAX_RESULT_BYTES)

    async def send(self, frame: bytes) -> None:
        assert self._process
        stdin = self._process.stdin
        assert stdin
        stdin.write(LENGTH.pack(len(frame)) + frame)
        await stdin.drain()

    async def receive(self, most: Callable[[], int]) -> bytes:
        """Return the next frame, of at most `most` bytes, once it begins to arrive. Raises what `ask` raises."""
        assert self._process
        stdout = self._process.stdout
        assert stdout
        (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        if length > (limit := most()):
            raise OSError(f"it returned {length} bytes, more than {limit}")
        return await stdout.readexactly(length)

    async def exit_reason(self, error: Exception) -> str:
        """Return how the process ended, given the `error` that replaced its answer."""
        assert self._process is not None
        if isinstance(error, TimeoutError):
            return f"no sign of life within {self.start_timeout_s:g} s"
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                code = await self._process.wait()
        except TimeoutError:
            return "it closed its output but did not end"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with status {code}; the log has its error"
