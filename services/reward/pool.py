"""The worker processes of built-in environments: each scores one trajectory at a time, and is killed if it is late."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Mapping

from google.protobuf.message import DecodeError

from headrace.config.data import EnvConfig
from headrace.errors import ServiceError
from headrace.v1 import trajectory_pb2 as pb
from headrace_services.reward.scoring_worker import LENGTH

_log = logging.getLogger("headrace.reward")
_START_TIMEOUT_S = 120.0
_RESTART_PAUSE_S = 1.0
_END_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True)
class _Job:
    trajectory: bytes
    timeout_s: float
    result: asyncio.Future[pb.Result]


class WorkerPool:
    """`size` workers behind one queue. A trajectory's time starts when a worker takes it, so that one that hangs costs the
    trajectories behind it nothing."""

    def __init__(self, environments: Mapping[str, EnvConfig], size: int) -> None:
        specification = json.dumps({name: env.model_dump(mode="json") for name, env in environments.items()})
        self._workers = [WorkerProcess(specification.encode()) for _ in range(size if environments else 0)]
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the workers and wait until all can score. Raises `ServiceError` with the first worker's reason if one can't."""
        starts = [asyncio.create_task(worker.start()) for worker in self._workers]
        try:
            await asyncio.gather(*starts)
        except ServiceError:
            await asyncio.gather(*starts, return_exceptions=True)
            await self.aclose()
            raise
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in self._workers]

    def submit(self, trajectory: pb.Trajectory, timeout_s: float) -> asyncio.Future[pb.Result]:
        """A future of its result: TIMED_OUT after `timeout_s` in a worker, FAILED if the worker died. Cancel it to withdraw."""
        future: asyncio.Future[pb.Result] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Job(trajectory.SerializeToString(), timeout_s, future))
        return future

    def problem(self) -> str | None:
        """Why a worker can't be restarted; None if all run."""
        return next((worker.problem for worker in self._workers if worker.problem), None)

    async def failure(self) -> None:
        """Never returns; raises the error of a worker's task that failed."""
        await asyncio.gather(*self._tasks, asyncio.get_running_loop().create_future())

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _serve(self, worker: WorkerProcess) -> None:
        while True:
            job = await self._queue.get()
            if job.result.done():  # withdrawn
                continue
            if not worker.alive:  # it died while idle, which is not this trajectory's fault
                await worker.restart()
            result = await worker.score(job.trajectory, job.timeout_s)
            if not job.result.done():
                job.result.set_result(result)
            if not worker.alive:
                await worker.restart()


class WorkerProcess:
    """One worker: a process and its pipes."""

    def __init__(self, specification: bytes) -> None:
        self._specification = specification
        self._process: asyncio.subprocess.Process | None = None
        self._usable = False
        self.problem: str | None = None

    @property
    def alive(self) -> bool:
        return self._usable and self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the working directory is not for imports
            "-m",
            "headrace_services.reward.scoring_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                reason = (await self._ask(self._specification)).decode()
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            reason = await self._exit_reason(error)
        if reason:
            await self.kill()
            raise ServiceError(f"a worker for the built-in environments can't start: {reason}")
        self._usable = True

    async def restart(self) -> None:
        """Restart the process, as often as it takes; `problem` holds the reason meanwhile."""
        while not self.alive:
            await self.kill()
            try:
                await self.start()
                self.problem = None
            except ServiceError as error:
                self.problem = str(error)
                _log.warning("%s; trying again", error)
                await asyncio.sleep(_RESTART_PAUSE_S)

    async def score(self, trajectory: bytes, timeout_s: float) -> pb.Result:
        try:
            async with asyncio.timeout(timeout_s):
                return pb.Result.FromString(await self._ask(trajectory))
        except TimeoutError:
            self._usable = False
            return pb.Result(
                status=pb.STATUS_TIMED_OUT, message=f"not scored within {timeout_s:g} s; its worker was killed"
            )
        except (asyncio.IncompleteReadError, OSError, DecodeError) as error:
            self._usable = False
            reason = await self._exit_reason(error)
            return pb.Result(status=pb.STATUS_FAILED, message=f"the worker died while scoring it: {reason}")

    async def kill(self) -> None:
        self._usable = False
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _ask(self, frame: bytes) -> bytes:
        assert self._process
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        stdin.write(LENGTH.pack(len(frame)) + frame)
        await stdin.drain()
        header = await stdout.readexactly(LENGTH.size)
        return await stdout.readexactly(LENGTH.unpack(header)[0])

    async def _exit_reason(self, error: Exception) -> str:
        """How the process ended, given the `error` that replaced its answer."""
        assert self._process is not None
        if isinstance(error, TimeoutError):
            return f"no sign of life within {_START_TIMEOUT_S:g} s"
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                code = await self._process.wait()
        except TimeoutError:
            return "it closed its output but did not end"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with status {code}; the log has its error"
