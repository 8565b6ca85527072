"""Runs a user's code, a few calls at a time: coroutines in the event loop, plain functions in threads. `run` runs the loop."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from headrace.base.printable import printable
from headrace.env.environment import describe_error

_log = logging.getLogger("headrace.env.environment")
T = TypeVar("T")


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
        alone, as `Raised`; so does `SystemExit` or `KeyboardInterrupt` in a callback or a task that it has started."""
        task = asyncio.current_task()
        assert task is not None
        call = _Call(task)
        _call.set(call)
        result = None
        try:
            result = await self._finish(method, argument, give_back)
        except (asyncio.CancelledError, Raised):
            if call.error is None:
                raise
        finally:
            call.over = True
        if call.error is None:
            return result
        task.uncancel()
        raise Raised(call.error)

    async def _finish(self, method: Callable[..., Any], argument: object, give_back: Callable[[], None]) -> Any:
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
    try:
        return await method(argument)
    except BaseException as error:
        if is_cancellation(error):
            raise
        # a StopIteration can't leave a coroutine: Python wraps it
        is_wrapped = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
        raise Raised(error.__cause__ if is_wrapped and error.__cause__ else error) from None


@dataclasses.dataclass
class _Call:
    """A call of a user's code, in `task`. `error` ends it, which something that it has started has raised."""

    task: asyncio.Task[Any]
    error: BaseException | None = None
    over: bool = False

    def end(self, error: BaseException) -> None:
        if self.over:
            _log.error("what a call has left behind raised %s", _describe(error))
        elif self.error is None:
            self.error = error
            self.task.cancel()


# the call of a user's code to which the task, callback or thread that runs belongs
_call: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("call", default=None)


def run(main: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None) -> T:
    """Run `main`, as `asyncio.run` does, in a loop in which a user's code may run. `SystemExit` and `KeyboardInterrupt` end a loop from
    any of its callbacks: from one that a call of the user's code has left there, they end that call."""
    with asyncio.Runner(loop_factory=None if loop is None else lambda: loop) as runner:
        task = runner.get_loop().create_task(main)
        while True:
            try:
                return runner.get_loop().run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                if task.done() or not _contain(error):
                    raise
            except asyncio.CancelledError:
                _log.error("a user's code has cancelled tasks that are not its own; the process ends")
                raise


def _contain(error: BaseException) -> bool:
    """End the call of a user's code one of whose callbacks has raised `error`. Return whether a callback has; in a handler of a signal,
    anything may have been interrupted."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    # the first: an exception that was raised before has those of that time too
    handle = next((frame.f_locals["self"] for frame in frames if frame.f_code is asyncio.Handle._run.__code__), None)
    call = None if handle is None else handle._context.get(_call)
    if call is not None:
        call.end(error)
    elif isinstance(error, SystemExit):
        _log.error(
            "a user's code raised %s; %s", _describe(error), "the process ends" if handle is None else "it goes on"
        )
    return call is not None or (handle is not None and isinstance(error, SystemExit))


def _describe(error: BaseException) -> str:
    """Return the error, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{printable(describe_error(error))} ({frame.filename}:{frame.lineno}, in {frame.name})"


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    call = _call.get()
    return asyncio.Task(coroutine if call is None else _Contained(coroutine, call), loop=loop, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine in a task that a call of a user's code has started. If it raised `SystemExit`, asyncio would end the loop;
    `GeneratorExit` would close whoever awaits it."""

    def __init__(self, own: Any, call: _Call) -> None:
        self._own, self._call = own, call

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
            is_awaited = getattr(asyncio.current_task(), "_callbacks", None)
            if not (is_awaited or isinstance(error, GeneratorExit)):
                self._call.end(error)
            raise Raised(error) from error


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
