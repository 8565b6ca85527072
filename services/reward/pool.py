"""The worker processes of built-in environments. Each runs in a sandbox and scores one trajectory at a time in a child process."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import psutil
from google.protobuf.message import DecodeError

from headrace.backoff import pause_after
from headrace.config.data import DataSourceConfig, EnvConfig
from headrace.errors import ServiceError
from headrace.trajectory import Score
from headrace.v1 import trajectory_pb2 as pb
from headrace.wire import score_from_wire, score_to_wire
from headrace_services.reward.frames import LENGTH
from headrace_services.reward.sandbox import MAX_RESULT_BYTES, Level, SandboxDenied
from headrace_services.reward.scoring_worker import ScoreRequest, Specification, Started

_log = logging.getLogger("headrace.reward")
# the pause after a restart that failed, and the longest one
_RESTART_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_END_TIMEOUT_S = 5.0
# A worker itself kills a child that is late. A worker that doesn't answer within this much more time hangs.
_GRACE_S = 5.0
# bytes of an answer's frame per result, besides the result
_OVERHEAD_BYTES = 16
# a worker forks, so its libraries must not start threads
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_LEVELS = {
    Level.A: "level A: namespaces, Landlock and a filter of system calls",
    Level.B: "level B: Landlock and a filter of system calls, without namespaces",
    Level.NONE: "none",
}
_REMEDY = (
    "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), "
    "or run on Linux 5.13 or newer with Landlock, in a container whose seccomp profile allows it (Docker's own does)"
)
# How often it is looked for programs that sleep while trajectories wait, and the most of a core that one uses that sleeps.
_LOOK_EVERY_S, _ASLEEP_SHARE = 0.5, 0.1
# the most helpers for each worker, and the share of the memory free at the start that their programs may have
_HELPERS, _HELPERS_MEMORY = 8, 0.5
_RUNNABLE = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
_RESULTS = msgspec.msgpack.Decoder(list[bytes | None])


@dataclasses.dataclass(frozen=True)
class _Job:
    environment: str
    trajectory: bytes
    timeout_s: float
    result: asyncio.Future[pb.Result]


class WorkerPool:
    """A pool of `size` workers behind one queue. A trajectory's time starts when a worker takes it, so a trajectory that hangs costs those
    behind it nothing.

    A worker whose program sleeps keeps no core busy. While trajectories wait, each such worker gets a helper, a worker that ends when
    nothing waits or no worker sleeps for it. So no more than `size` of them compute, unless sleepers wake.

    For trajectories that were submitted together, a worker first returns the scores that take no more than a comparison, in one frame: a
    frame each would cost far more than the comparison. The others are scored one by one.
    """

    def __init__(
        self,
        environments: Mapping[str, EnvConfig],
        size: int,
        sources: Sequence[DataSourceConfig] = (),
        levels: Sequence[Level] = tuple(Level),
    ) -> None:
        """`sources` are the run's data sets. `levels` are the acceptable sandboxes; NONE is accepted only if every environment allows
        it."""
        self._guarded = [name for name, env in environments.items() if not env.unsafe_no_sandbox]
        self._specification = Specification(
            {name: env.model_dump(mode="json") for name, env in environments.items()},
            [source.model_dump(mode="json") for source in sources],
            [level for level in levels if level is not Level.NONE or not self._guarded],
        )
        self._workers = [WorkerProcess(self._specification) for _ in range(size if environments else 0)]
        self._queue: asyncio.Queue[Sequence[_Job]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        programs = [env.memory_mb * 1024**2 for name, env in environments.items() if env.kind(name) == "code"]
        self._largest = max(programs, default=None)  # only programs can sleep
        self._busy: set[WorkerProcess] = set()
        self._asleep = 0
        self._helpers: dict[WorkerProcess, asyncio.Task[None]] = {}

    @property
    def level(self) -> Level:
        """The sandbox that the workers score in."""
        return max((worker.level for worker in self._workers), default=Level.NONE)

    @property
    def builds(self) -> Mapping[str, str]:
        """The builds of the environments, by name. A result carries the build of the worker that scored it."""
        return self._workers[0].builds if self._workers else {}

    async def start(self) -> None:
        """Start the workers in the best sandbox that the machine grants, and wait until all can score.

        Raises `ServiceError` with the first worker's reason if one can't, or if the machine grants no sandbox to an environment
        that needs one.
        """
        starts = [asyncio.create_task(worker.start()) for worker in self._workers]
        try:
            await asyncio.gather(*starts)
        except ServiceError as error:
            await asyncio.gather(*starts, return_exceptions=True)
            await self.aclose()
            if isinstance(error, SandboxDenied):
                raise ServiceError(_refusal(str(error), self._guarded)) from error
            raise
        if self._workers:
            worker = self._workers[0]
            said = _log.warning if worker.level is Level.NONE else _log.info
            denied = f" (the machine denies more: {'; '.join(worker.denials)})" if worker.denials else ""
            said("sandbox of the built-in environments: %s%s", _LEVELS[worker.level], denied)
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in self._workers]
        if self._largest is not None:
            self._tasks.append(asyncio.create_task(self._find_helpers(self._largest)))

    def submit(self, trajectories: Sequence[pb.Trajectory], timeout_s: float) -> list[asyncio.Future[pb.Result]]:
        """Return a future for the result of each trajectory. All must belong to one environment. A result is TIMED_OUT after `timeout_s` in
        a worker, and FAILED if the worker's process died. Cancel a future to withdraw its trajectory."""
        loop = asyncio.get_running_loop()
        jobs = [
            _Job(trajectory.environment, trajectory.SerializeToString(), timeout_s, loop.create_future())
            for trajectory in trajectories
        ]
        self._queue.put_nowait(jobs)
        return [job.result for job in jobs]

    def problem(self) -> str | None:
        """Return why a worker can't be restarted, or None if all run."""
        return next((worker.problem for worker in self._workers if worker.problem), None)

    async def failure(self) -> None:
        """Wait forever, or raise the error of a worker's task that failed."""
        await asyncio.gather(*self._tasks, asyncio.get_running_loop().create_future())

    async def aclose(self) -> None:
        tasks = [*self._tasks, *self._helpers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _find_helpers(self, memory_bytes: int) -> None:
        """Start a helper for each worker that sleeps while trajectories wait. `memory_bytes` is the most that one program may have."""
        free = int(_HELPERS_MEMORY * psutil.virtual_memory().available)
        most = min(_HELPERS * len(self._workers), free // memory_bytes)
        before: dict[WorkerProcess, float | None] = {}
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for worker in [worker for worker, task in self._helpers.items() if task.done()]:
                self._helpers.pop(worker).result()
            if self._queue.empty():
                before, self._asleep = {}, 0
                continue
            now = await asyncio.to_thread(_used_s, list(self._busy))
            self._asleep = sum(sleeps(before.get(worker), used_s) for worker, used_s in now.items())
            before = now
            for _ in range(min(self._asleep, most) - len(self._helpers)):
                worker = WorkerProcess(self._specification)
                self._helpers[worker] = asyncio.create_task(self._help(worker))

    async def _help(self, worker: WorkerProcess) -> None:
        try:
            await worker.restart()
            while not self._queue.empty() and len(self._helpers) <= self._asleep:
                await self._serve_next(worker)
        finally:
            await worker.kill()

    async def _serve(self, worker: WorkerProcess) -> None:
        while True:
            await self._serve_next(worker)

    async def _serve_next(self, worker: WorkerProcess) -> None:
        jobs = [job for job in await self._queue.get() if not job.result.done()]  # the others were withdrawn
        if not jobs:
            return
        if not worker.alive:  # it died while idle, through no fault of these trajectories
            await worker.restart()
        self._busy.add(worker)
        try:
            first, *others = jobs
            results: list[pb.Result | None]
            if others:
                trajectories = [job.trajectory for job in jobs]
                results = await worker.quick_results(first.environment, trajectories, first.timeout_s)
            else:
                results = [await worker.score(first.environment, first.trajectory, first.timeout_s)]
            for job, result in zip(jobs, results, strict=True):
                if result is None:
                    self._queue.put_nowait([job])
                elif not job.result.done():
                    job.result.set_result(result)
        finally:
            self._busy.discard(worker)
        if not worker.alive:
            await worker.restart()


def sleeps(before_s: float | None, now_s: float | None) -> bool:
    """Return whether a worker sleeps that had used this many CPU seconds at the last look and now. None: it was idle, or wanted a core."""
    return before_s is not None and now_s is not None and 0 <= now_s - before_s < _ASLEEP_SHARE * _LOOK_EVERY_S


def _used_s(workers: Sequence[WorkerProcess]) -> dict[WorkerProcess, float | None]:
    return {worker: worker.used_s() for worker in workers}


class WorkerProcess:
    """One worker: a process and its pipes."""

    # the interpreter's arguments; -P keeps the working directory off the import path
    program: Sequence[str] = ("-P", "-m", "headrace_services.reward.scoring_worker")
    what = "a worker for the built-in environments"
    start_timeout_s = 120.0

    def __init__(self, specification: msgspec.Struct) -> None:
        self._specification = specification
        self._process: asyncio.subprocess.Process | None = None
        self._usable = False
        self._started = Started()
        self.problem: str | None = None

    @property
    def alive(self) -> bool:
        return self._usable and self._process is not None and self._process.returncode is None

    @property
    def level(self) -> Level:
        return self._started.level

    @property
    def denials(self) -> list[str]:
        return self._started.denials

    @property
    def builds(self) -> dict[str, str]:
        return self._started.builds

    def used_s(self) -> float | None:
        """Return the CPU seconds that the process, and all below it, have used; None if one of them wants a core now."""
        assert self._process is not None
        try:
            top = psutil.Process(self._process.pid)
            below = [top, *top.children(recursive=True)]
            if any(each.status() in _RUNNABLE for each in below):
                return None
            return float(sum(sum(each.cpu_times()[:4]) for each in below))
        except psutil.NoSuchProcess:  # one ended meanwhile
            return None

    def environ(self) -> dict[str, str]:
        """Return the environment variables of the process: of the hub's own, only the one by which the interpreter finds its libraries."""
        return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ} | _ONE_THREAD

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
        except (TimeoutError, asyncio.IncompleteReadError, OSError, msgspec.DecodeError) as error:
            started = Started(problem=await self.exit_reason(error))
        if started.problem or not started.builds:
            await self.kill()
            if started.problem:
                raise ServiceError(f"{self.what} can't start: {started.problem}")
            raise SandboxDenied("; ".join(started.denials))
        self._started = started
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

    async def score(self, environment: str, trajectory: bytes, timeout_s: float) -> pb.Result:
        began = time.monotonic()
        try:
            (answer,) = await self._results([trajectory], timeout_s)
            if answer is None:
                raise OSError("it returned no result")
            return self._checked(environment, answer, time.monotonic() - began)
        except TimeoutError:
            self._usable = False
            late = f"no answer within {timeout_s + _GRACE_S:g} s; the worker was killed"
            return pb.Result(status=pb.STATUS_TIMED_OUT, message=late)
        except (asyncio.IncompleteReadError, OSError) as error:
            self._usable = False
            reason = await self.exit_reason(error)
            return pb.Result(status=pb.STATUS_FAILED, message=f"the worker died while scoring it: {reason}")

    async def quick_results(
        self, environment: str, trajectories: Sequence[bytes], timeout_s: float
    ) -> list[pb.Result | None]:
        """Return the results that take no more than a comparison, and None for the others.

        If the worker is late or dies meanwhile, no trajectory is blamed: scoring each alone shows which one is at fault.
        """
        began = time.monotonic()
        try:
            answers = await self._results(trajectories, timeout_s)
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            self._usable = False
            return [None] * len(trajectories)
        took_s = (time.monotonic() - began) / len(trajectories)
        return [None if answer is None else self._checked(environment, answer, took_s) for answer in answers]

    async def _results(self, trajectories: Sequence[bytes], timeout_s: float) -> list[bytes | None]:
        """Return the worker's answer for each trajectory. Raises what `ask` raises, and `TimeoutError`."""
        async with asyncio.timeout(timeout_s + _GRACE_S):
            answer = await self.ask(
                msgspec.msgpack.encode(ScoreRequest(list(trajectories), timeout_s)),
                len(trajectories) * (MAX_RESULT_BYTES + _OVERHEAD_BYTES),
            )
        try:
            results = _RESULTS.decode(answer)
        except msgspec.DecodeError as error:
            raise OSError(f"it returned invalid results: {error}") from error
        if len(results) != len(trajectories):
            raise OSError(f"it returned {len(results)} results for {len(trajectories)} trajectories")
        return results

    def _checked(self, environment: str, answer: bytes, took_s: float) -> pb.Result:
        """Return the result that came out of the sandbox. Law 7: it becomes FAILED if it breaks the contract. The hub, not the sandbox,
        sets its environment, build and duration."""
        try:
            score = score_from_wire(pb.Result.FromString(answer))
        except DecodeError:
            score = Score("FAILED", message="the scoring process returned an invalid result")
        return score_to_wire(
            msgspec.structs.replace(
                score,
                environment=environment,
                build=self.builds.get(environment, ""),
                timings={"environment": took_s},
            )
        )

    async def ended(self) -> None:
        """Return once the process has ended, for any reason."""
        assert self._process is not None
        await self._process.wait()

    async def kill(self) -> None:
        self._usable = False
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def ask(self, frame: bytes, most: int = MAX_RESULT_BYTES) -> bytes:
        """Send a frame, and return the answer, of at most `most` bytes. Raises `OSError` or `IncompleteReadError` if there is no answer;
        the process is unusable after that."""
        assert self._process
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        stdin.write(LENGTH.pack(len(frame)) + frame)
        await stdin.drain()
        (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        if length > most:
            raise OSError(f"it returned {length} bytes, more than {most}")
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


def _refusal(denials: str, guarded: Iterable[str]) -> str:
    unsafe = ", ".join(f"env.{name}.unsafe_no_sandbox: true" for name in guarded)
    return (
        f"the machine grants no sandbox for the built-in environments, which read what the policy writes ({denials}); {_REMEDY}; "
        f"or, if there is nothing to protect, set {unsafe}"
    )
