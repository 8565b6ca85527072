"""Runs a user's code, a few calls at a time: coroutines in the event loop, plain functions in threads."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any


class Raised(Exception):
    """A user's code raised `error`.

    Python and asyncio take some exceptions for signs of their own (`StopIteration`, `CancelledError`, `SystemExit`), and lose them or end
    the process. So none leaves its call as it is.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error: BaseException = error.error if isinstance(error, Raised) else error


class Slots:
    """Limits calls to `count` at a time. `on_free` is called when a slot becomes free.

    `is_draining`: no more may be started. `is_cut`: nothing is waited for any more.
    """

    def __init__(self, count: int, on_free: Callable[[], None]) -> None:
        self.count = self.free = count
        self._on_free = on_free
        self.is_draining = False
        self._waiting: set[asyncio.Future[Any]] = set()
        self._cut = asyncio.Event()

    @property
    def busy(self) -> int:
        return self.count - self.free

    def take(self) -> Callable[[], None]:
        """Take a slot. Returns the function that gives it back."""
        self.free -= 1

        def give_back() -> None:
            self.free += 1
            self._on_free()

        return give_back

    @property
    def is_cut(self) -> bool:
        return self._cut.is_set()

    async def wait(self, tasks: Sequence[asyncio.Task[Any]], within_s: float | None) -> None:
        """Return when all tasks have ended, after `within_s`, or when `drain` gives them up. Those that have not ended are cancelled."""
        ended, cut = asyncio.ensure_future(asyncio.wait(tasks)), asyncio.ensure_future(self._cut.wait())
        self._waiting.add(ended)
        try:
            await asyncio.wait([ended, cut], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.discard(ended)
            for task in (*tasks, ended, cut):
                task.cancel()

    async def drain(self, grace_s: float) -> None:
        """Start nothing more. What is waited for has `grace_s` to finish."""
        self.is_draining = True
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=grace_s)
        self._cut.set()

    async def call(self, method: Callable[..., Any], argument: object, give_back: Callable[[], None]) -> Any:
        """Call `method` with `argument`, and return its result. Its slot is given back when it ends. Whatever it raises ends this call
        alone, as `Raised`."""
        if inspect.iscoroutinefunction(method):
            try:
                return await _await(method, argument)
            finally:
                give_back()
        # A thread can't be stopped: it keeps its slot until it ends, even if the caller has given up.
        running = _in_thread(method, argument)
        waiting, owed = True, False

        def ended(done: asyncio.Future[_Outcome]) -> None:
            nonlocal owed
            owed = waiting and done.result().is_awaitable
            if not owed:
                give_back()

        running.add_done_callback(ended)
        try:
            outcome = await asyncio.shield(running)
            if outcome.error is not None:
                raise Raised(outcome.error)
            return await _await(lambda result: result, outcome.result) if outcome.is_awaitable else outcome.result
        finally:
            waiting = False
            if owed:
                give_back()


async def _await(method: Callable[[Any], Any], argument: object) -> Any:
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)
    _is_users.set(True)
    try:
        return await method(argument)
    except BaseException as error:
        if is_cancellation(error):
            raise
        # a StopIteration can't leave a coroutine: Python wraps it
        is_wrapped = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
        raise Raised(error.__cause__ if is_wrapped and error.__cause__ else error) from None


# whether the task that runs is a user's, as are those that it starts
_is_users = contextvars.ContextVar("is_users", default=False)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(_Contained(coroutine) if _is_users.get() else coroutine, loop=loop, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine in a task that a user's code has started. If it raised `SystemExit`, asyncio would end the loop, and so the process;
    `GeneratorExit` would close whoever awaits it."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __await__(self) -> Any:
        return self._own.__await__()

    def send(self, value: Any) -> Any:
        return self._step(self._own.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._own.throw, *error)

    def close(self) -> None:
        self._own.close()

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        try:
            return step(*given)
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            raise Raised(error) from None


def is_cancellation(error: BaseException) -> bool:
    """Whether the task that runs is being cancelled, and the error says so. Any other one is the user's own."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and bool(task.cancelling())


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What a call in a thread returned (`is_awaitable`: to be awaited) or raised."""

    result: Any = None
    is_awaitable: bool = False
    error: BaseException | None = None


def _in_thread(function: Callable[[Any], Any], argument: object) -> asyncio.Future[_Outcome]:
    """Run the function in a daemon thread, with the caller's context variables. Unlike a pool's thread, one that hangs does not keep the
    process from exiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Outcome] = loop.create_future()

    def settle(outcome: _Outcome) -> None:
        if not future.cancelled():
            future.set_result(outcome)

    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(function, argument)
            outcome = _Outcome(result, inspect.isawaitable(result))
        except BaseException as error:  # noqa: BLE001  # a user's: the caller gets it, whatever it is
            outcome = _Outcome(error=error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True, name="headrace-score").start()
    return future
