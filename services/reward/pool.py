"""The worker processes of built-in environments. Each runs in a sandbox and scores one trajectory at a time in a child process. Besides, it
may wait for any number of programs that sleep."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from headrace.base.errors import ServiceError
from headrace.base.tasks import cancel
from headrace.config.data import DataSourceConfig
from headrace.config.environments import CodeConfig, SandboxedConfig
from headrace.env.wire import check_result
from headrace.v1 import trajectory_pb2 as pb

from .child_process import ChildProcess
from .free_memory import free_memory
from .sandbox import MAX_RESULT_BYTES, NAMESPACE_SETTINGS, Level, SandboxDenied
from .scoring_worker import Answer, ScoreRequest, Specification

_log = logging.getLogger("headrace.reward")
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
    f"allow unprivileged user namespaces ({NAMESPACE_SETTINGS}), or run on Linux 5.13 or newer with Landlock, in a container whose seccomp "
    "profile allows it (Docker's own does)"
)
# the most programs of a worker that sleep: each has a file that the worker keeps open
_MOST_ASLEEP = 100
# how often it is looked whether programs that slept leave enough memory
_LOOK_EVERY_S = 0.1
_ANSWER = msgspec.msgpack.Decoder(Answer)


@dataclasses.dataclass(frozen=True)
class _Job:
    environment: str
    trajectory: bytes
    timeout_s: float
    result: asyncio.Future[pb.Result]
    keeps_place: bool = False  # even if its program sleeps


class WorkerPool:
    """A pool of `size` workers behind one queue. A trajectory's time starts when a worker takes it, so a trajectory that hangs costs those
    behind it nothing.

    A program that sleeps needs no core, so it gives up its place: its worker takes the next trajectory. So no more than `size` of them
    compute, unless sleepers wake; these get what the others leave. Sleepers may have all the memory but what the places may need. If
    some wake and take more, the last to fall asleep are stopped, and begin again later in a place that they keep.

    For trajectories that were submitted together, a worker first returns the scores that take no more than a comparison, in one frame: a
    frame each would cost far more than the comparison. The others are scored one by one.
    """

    def __init__(
        self,
        environments: Mapping[str, SandboxedConfig],
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
        self._workers = [ScoringWorker(self._specification) for _ in range(size if environments else 0)]
        self._queue: asyncio.Queue[Sequence[_Job]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None]
        programs = [env.memory_mb * 1024**2 for env in environments.values() if isinstance(env, CodeConfig)]
        self._needed_bytes = size * max(programs, default=0)  # what the programs in the places may have
        self._asleep: dict[asyncio.Task[None], _Job] = {}  # the last to fall asleep comes last

    @property
    def level(self) -> Level:
        """The sandbox that the workers score in."""
        return max((worker.started.level for worker in self._workers), default=Level.NONE)

    @property
    def builds(self) -> Mapping[str, str]:
        """The builds of the environments, by name. A result carries the build of the worker that scored it."""
        return self._workers[0].started.builds if self._workers else {}

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
        self._failed = asyncio.get_running_loop().create_future()
        if self._workers:
            started = self._workers[0].started
            tell = _log.warning if started.level is Level.NONE else _log.info
            denied = f" (the machine denies more: {'; '.join(started.denials)})" if started.denials else ""
            tell("sandbox of the built-in environments: %s%s", _LEVELS[started.level], denied)
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in self._workers]
        self._tasks.append(asyncio.create_task(self._keep_memory()))

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

    @property
    def asleep(self) -> int:
        """The number of trajectories whose programs sleep."""
        return len(self._asleep)

    def problem(self) -> str | None:
        """Return why a worker can't be restarted, or None if all run."""
        return next((worker.problem for worker in self._workers if worker.problem), None)

    async def failure(self) -> None:
        """Wait forever, or raise the error of a worker's task that failed."""
        await asyncio.gather(*self._tasks, self._failed)

    async def aclose(self) -> None:
        await cancel([*self._tasks, *self._asleep])
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _keep_memory(self) -> None:
        """Stop programs that slept while they leave less memory than half of what the places may need."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if self._asleep and free_memory() < self._needed_bytes / 2:
                task, job = self._asleep.popitem()
                task.cancel()
                self._queue.put_nowait([dataclasses.replace(job, keeps_place=True)])

    async def _room(self, worker: ScoringWorker) -> None:
        """Wait until the sleeping programs leave the worker room for one more."""
        while self._asleep and (worker.asleep >= _MOST_ASLEEP or free_memory() < self._needed_bytes):
            await asyncio.wait(self._asleep, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)

    async def _serve(self, worker: ScoringWorker) -> None:
        while True:
            await self._room(worker)
            queued = await self._queue.get()
            await self._room(worker)  # there was some before, but memory may have become short since
            jobs = [job for job in queued if not job.result.done()]  # the others were withdrawn
            if not jobs:
                continue
            if not worker.alive:  # it died while idle, through no fault of these trajectories
                await worker.restart()
            first, *others = jobs
            if others:
                trajectories = [job.trajectory for job in jobs]
                results = await worker.quick_results(first.environment, trajectories, first.timeout_s)
                for job, result in zip(jobs, results, strict=True):
                    self._end(job, result)
            else:
                await self._score(worker, first)
            if not worker.alive:
                await worker.restart()

    async def _score(self, worker: ScoringWorker, job: _Job) -> None:
        """Score a trajectory in a worker's place, until there is a result, or its program sleeps."""
        asleep = asyncio.get_running_loop().create_future()
        scoring = asyncio.create_task(self._score_job(worker, job, asleep))
        try:
            await asyncio.wait([scoring] if job.keeps_place else [scoring, asleep], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            scoring.cancel()
            raise
        if scoring.done():
            scoring.result()
            return
        self._asleep[scoring] = job
        scoring.add_done_callback(self._woken)
        job.result.add_done_callback(lambda _: scoring.cancel())  # withdrawn

    async def _score_job(self, worker: ScoringWorker, job: _Job, asleep: asyncio.Future[None]) -> None:
        self._end(job, await worker.score(job.environment, job.trajectory, job.timeout_s, asleep))

    def _woken(self, scoring: asyncio.Task[None]) -> None:
        self._asleep.pop(scoring, None)
        if not scoring.cancelled() and (error := scoring.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _end(self, job: _Job, result: pb.Result | None) -> None:
        if result is None:
            self._queue.put_nowait([job])
        elif not job.result.done():
            job.result.set_result(result)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request without an answer. `asleep` is done once its program sleeps."""

    trajectories: int
    results: asyncio.Future[list[bytes | None]]
    asleep: asyncio.Future[None]


class ScoringWorker(ChildProcess):
    """A worker of built-in environments. It is asked again once it has answered, or its last trajectory sleeps."""

    program: Sequence[str] = ("-P", "-m", "headrace_services.reward.scoring_worker")
    what = "a worker for the built-in environments"

    def __init__(self, specification: msgspec.Struct) -> None:
        super().__init__(specification)
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._reading: asyncio.Task[None] | None = None

    @property
    def asleep(self) -> int:
        """The number of trajectories that sleep here."""
        return sum(asked.asleep.done() for asked in self._asked.values())

    def environ(self) -> dict[str, str]:
        """Return the environment variables of the process: of the hub's own, only the one by which the interpreter finds its libraries."""
        return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ} | _ONE_THREAD

    async def start(self) -> None:
        await super().start()
        self._reading = asyncio.create_task(self._read())

    async def kill(self) -> None:
        await super().kill()
        if self._reading is not None:
            self._reading.cancel()
        self._lose(OSError("it was killed"))

    async def score(
        self, environment: str, trajectory: bytes, timeout_s: float, asleep: asyncio.Future[None]
    ) -> pb.Result | None:
        """Return the result; None if the worker died, through no fault of this trajectory, which was asleep. `asleep` is done once it falls
        asleep. It then has no deadline here, because its worker may be busy with others."""
        began = time.monotonic()
        try:
            async with self._asking([trajectory], timeout_s, asleep) as results:
                async with asyncio.timeout(timeout_s + _GRACE_S):
                    either: list[asyncio.Future[Any]] = [results, asleep]
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                (answer,) = await results
            if answer is None:
                raise OSError("it returned no result")
            return self._check(environment, answer, time.monotonic() - began)
        except TimeoutError:
            self._usable = False
            late = f"no answer within {timeout_s + _GRACE_S:g} s; the worker was killed"
            return pb.Result(status=pb.STATUS_TIMED_OUT, message=late)
        except OSError as error:
            if asleep.done():
                return None
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
            async with self._asking(trajectories, timeout_s) as results, asyncio.timeout(timeout_s + _GRACE_S):
                answers = await results
        except OSError:  # among others `TimeoutError`
            self._usable = False
            return [None] * len(trajectories)
        took_s = (time.monotonic() - began) / len(trajectories)
        return [None if answer is None else self._check(environment, answer, took_s) for answer in answers]

    @contextlib.asynccontextmanager
    async def _asking(
        self, trajectories: Sequence[bytes], timeout_s: float, asleep: asyncio.Future[None] | None = None
    ) -> AsyncIterator[asyncio.Future[list[bytes | None]]]:
        """Send a request and yield the future of its results. It is withdrawn if the context is cancelled."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        asked = _Asked(len(trajectories), loop.create_future(), asleep or loop.create_future())
        self._asked[number] = asked
        try:
            await self.send(msgspec.msgpack.encode(ScoreRequest(number, list(trajectories), timeout_s)))
            yield asked.results
        except asyncio.CancelledError:
            if self.alive:
                with contextlib.suppress(OSError):
                    await self.send(msgspec.msgpack.encode(ScoreRequest(number, [], 0.0)))
            raise
        finally:
            del self._asked[number]

    async def _read(self) -> None:
        """Hand out the answers, until the process ends or breaks the protocol."""
        try:
            while True:
                self._take(_ANSWER.decode(await self.receive(self._most)))
        except asyncio.IncompleteReadError:
            self._lose(OSError("its output ended"))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._lose(OSError(f"it returned no answer: {error}"))

    def _lose(self, error: OSError) -> None:
        self._usable = False
        for asked in self._asked.values():
            if not asked.results.done():
                asked.results.set_exception(error)

    def _most(self) -> int:
        """Return the most bytes that an answer may have, whichever request it is to."""
        trajectories = max((asked.trajectories for asked in self._asked.values()), default=1)
        return trajectories * (MAX_RESULT_BYTES + _OVERHEAD_BYTES) + _OVERHEAD_BYTES

    def _take(self, answer: Answer) -> None:
        asked = self._asked.get(answer.number)
        if asked is None or asked.results.done():  # withdrawn
            return
        if not answer.results:
            if not asked.asleep.done():
                asked.asleep.set_result(None)
        elif len(answer.results) == asked.trajectories:
            asked.results.set_result(answer.results)
        else:
            raise OSError(f"it returned {len(answer.results)} results for {asked.trajectories} trajectories")

    def _check(self, environment: str, answer: bytes, took_s: float) -> pb.Result:
        """Return the result that came out of the sandbox. Law 7: it becomes FAILED if it breaks the contract. The hub, not the sandbox,
        sets its environment, build and duration."""
        try:
            result = check_result(pb.Result.FromString(answer))
        except DecodeError:
            result = pb.Result(status=pb.STATUS_FAILED, message="the scoring process returned an invalid result")
        result.environment, result.build = environment, self.started.builds.get(environment, "")
        result.took_ms = 1000 * took_s
        return result


def _refusal(denials: str, guarded: Iterable[str]) -> str:
    unsafe = ", ".join(f"env.{name}.unsafe_no_sandbox: true" for name in guarded)
    return (
        f"the machine grants no sandbox for the built-in environments, which read what the policy writes ({denials}); {_REMEDY}; "
        f"or, if there is nothing to protect, set {unsafe}"
    )
