"""Runs a user's code, a few calls at a time: coroutines in the event loop, plain functions in threads."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any


class Slots:
    """Limits calls to `count` at a time. `on_free` is called when a slot becomes free."""

    def __init__(self, count: int, on_free: Callable[[], None]) -> None:
        self.count = self.free = count
        self._on_free = on_free

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

    async def call(self, method: Callable[..., Any], argument: object, give_back: Callable[[], None]) -> Any:
        """Call `method` with `argument`, and return its result. Its slot is given back when it ends. An exception ends this call alone,
        even a `SystemExit`."""
        if inspect.iscoroutinefunction(method):
            try:
                return await method(argument)
            except SystemExit as error:  # raised from a task, it would end the whole process
                raise _of_this_call(error) from error
            finally:
                give_back()
        # A thread can't be stopped: it keeps its slot until it ends, even if the caller has given up.
        running = _in_thread(method, argument)
        waiting, owed = True, False

        def ended(done: asyncio.Future[Any]) -> None:
            nonlocal owed
            owed = waiting and done.exception() is None and inspect.isawaitable(done.result())
            if not owed:
                give_back()

        running.add_done_callback(ended)
        try:
            result = await asyncio.shield(running)
            return await result if inspect.isawaitable(result) else result
        finally:
            waiting = False
            if owed:
                give_back()


def _of_this_call(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def _in_thread(function: Callable[[Any], Any], argument: object) -> asyncio.Future[Any]:
    """Run the function in a daemon thread. Unlike a pool's thread, one that hangs does not keep the process from exiting."""
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
        except BaseException as raised:  # noqa: BLE001  # passed to the caller, even SystemExit
            error = _of_this_call(raised)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="headrace-score").start()
    return future
