"""The environment SDK: a class with a `score` method becomes an environment that a run can name in its configuration.

    class Length(headrace.Environment):
        def score(self, sample):
            return -abs(len(sample.completion) - 100) / 100

    headrace.serve(Length(), port=50400)

It needs nothing but `pip install headrace`. `docs/environments.md` has the whole contract.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec

from headrace.trajectory import FinishReason, Message, Score

_LONGEST_MESSAGE = 2000


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion of one prompt, to be scored.

    `completion` is text without special tokens; `completion_token_ids` is what the model wrote, its end token included.
    `finish_reason` is "length" for a completion that was cut off. `extra_env_info` is what the data set says about the problem.
    Equal `idempotency_key`s mean the same completion sent again.
    """

    completion: str
    extra_env_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    completion_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    environment: str = ""
    task_name: str = ""
    group_id: str = ""
    index: int = 0
    idempotency_key: str = ""


Scored = float | Score


class Environment:
    """Override `score`, or `score_batch` where scoring many at once is cheaper. Both may be `async def`.

    A plain `score` runs in a thread, an `async` one in the event loop; up to `concurrency` of them at a time, so set it to 1 if
    yours can't run twice at once. An exception becomes FAILED with its message; so does a reward that is not a finite number.
    Return `Score("INVALID", message=…)` for a sample that can never be scored.
    """

    name: str = ""  # empty: the name of the class
    build: str = ""  # version of the environment's code, kept with every reward
    description: str = ""  # one line for people
    concurrency: int = 16

    def score(self, sample: Sample) -> Scored | Awaitable[Scored]:
        """The reward of one completion: a number, or a `Score` with named components and metadata."""
        raise NotImplementedError(f"{type(self).__name__} defines neither score nor score_batch")

    def score_batch(self, samples: Sequence[Sample]) -> Sequence[Scored] | Awaitable[Sequence[Scored]]:
        """The rewards of a batch, one for each sample in order. Left alone, every sample goes through `score`."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        return self.name or type(self).__name__


def serve(environment: Environment, port: int, host: str = "127.0.0.1") -> None:
    """Serve `environment` over gRPC on `host:port` until SIGTERM or SIGINT; port 0 takes a free one, which is logged.

    Raises `ServiceError` if the port is busy.
    """
    from headrace.environment_server import serve_until_signal

    asyncio.run(serve_until_signal(environment, host, port))


def checked(environment: Environment, value: object) -> Score:
    """What an environment returned, as a `Score` in its name. Law 7: what is not a finite number is FAILED, never a reward."""
    if isinstance(value, Score):
        return msgspec.structs.replace(value, environment=environment.label, build=value.build or environment.build)
    if not hasattr(value, "__float__"):
        return failed(environment, f"score returned {value!r:.80} ({type(value).__name__}), not a number or a Score")
    reward = float(cast(float, value))
    if not math.isfinite(reward):
        return failed(environment, f"score returned {reward}, not a finite number")
    return Score("SCORED", reward=reward, environment=environment.label, build=environment.build)


def failed(environment: Environment, reason: object) -> Score:
    """FAILED in the environment's name, for `reason`: words, or the exception it raised."""
    message = f"{type(reason).__name__}: {reason}" if isinstance(reason, BaseException) else str(reason)
    return Score("FAILED", message=message[:_LONGEST_MESSAGE], environment=environment.label, build=environment.build)


class Judge:
    """Calls a user's environment for whole batches, keeps to its `concurrency`, and to the caller's deadline."""

    def __init__(self, environment: Environment) -> None:
        if environment.concurrency < 1:
            raise ValueError(f"{environment.label}.concurrency is {environment.concurrency}; it must be at least 1")
        self.environment = environment
        self._slots = asyncio.Semaphore(environment.concurrency)
        self._batched = type(environment).score_batch is not Environment.score_batch

    async def score(self, samples: Sequence[Sample], timeout_s: float | None) -> list[Score]:
        """One `Score` per sample, in order, within `timeout_s`: what is done by then keeps its reward, the rest is TIMED_OUT."""
        if not samples:
            return []
        if self._batched:
            tasks = [asyncio.create_task(self._batch(samples))]
        else:
            tasks = [asyncio.create_task(self._one(sample)) for sample in samples]
        try:
            await asyncio.wait(tasks, timeout=timeout_s)
            late = [Score("TIMED_OUT", message=self._lateness(timeout_s), environment=self.environment.label)]
            late = late * (len(samples) if self._batched else 1)
            return [score for task in tasks for score in (task.result() if task.done() else late)]
        finally:
            for task in tasks:
                task.cancel()

    def _lateness(self, timeout_s: float | None) -> str:
        return f"no answer from {self.environment.label} within {timeout_s or 0:.1f} s"

    async def _one(self, sample: Sample) -> list[Score]:
        try:
            return [checked(self.environment, await self._call(self.environment.score, sample))]
        except Exception as error:  # noqa: BLE001  # whatever the user's code raised is the answer, and reaches the caller as FAILED
            return [failed(self.environment, error)]

    async def _batch(self, samples: Sequence[Sample]) -> list[Score]:
        try:
            values = list(await self._call(self.environment.score_batch, samples))
            if len(values) != len(samples):
                raise ValueError(f"score_batch returned {len(values)} results for {len(samples)} samples")
            return [checked(self.environment, value) for value in values]
        except Exception as error:  # noqa: BLE001  # as above
            return [failed(self.environment, error)] * len(samples)

    async def _call(self, method: Callable[..., Any], argument: object) -> Any:
        await self._slots.acquire()
        if inspect.iscoroutinefunction(method):
            try:
                return await method(argument)
            finally:
                self._slots.release()
        # A thread can't be stopped: it keeps its slot until it ends, however long ago its caller gave up.
        running = _in_thread(method, argument)
        running.add_done_callback(lambda _: self._slots.release())
        result = await asyncio.shield(running)
        return await result if inspect.isawaitable(result) else result


def _in_thread(function: Callable[[Any], Any], argument: object) -> asyncio.Future[Any]:
    """Run in a daemon thread: one that hangs must not keep the process from ending, as a pool's would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(argument)
        except BaseException as raised:  # noqa: BLE001  # handed to the caller, SystemExit included
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="headrace-score").start()
    return future
