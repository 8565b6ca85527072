"""One episode that runs: carries its calls out, each in a task of its own, so that a call outlives the connection of its client.

What is decided, `session.Session` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from headrace.errors import HeadraceError
from headrace.replay import Lease
from headrace.replica_client import RenderRefused, SampleRequest
from headrace.trajectory import Call
from headrace_services.agents import metrics
from headrace_services.agents.dialect import BadRequest, ChatRequest
from headrace_services.agents.fleet import CallFailed, Fleet
from headrace_services.agents.session import Clocks, Refused, Session, SessionCall, SessionLimits, SessionSummary

log = logging.getLogger(__name__)

# Values that are kept of an option that the run's value replaced.
_MOST_IMPOSED = 16
# Keeps a call under its number and a nonce of its own; returns once the buffer has it.
Keep = Callable[[int, str, Call], Awaitable[None]]


class OpenEpisode:
    """An episode that runs. `keep` keeps a finished call; its answer leaves after that. `over` is set when the program has to end: the
    name of the clock that has run out, or why no further answer can leave (the lease is lost, or a call could not be kept)."""

    def __init__(
        self,
        name: str,
        lease: Lease,
        index: int,
        fleet: Fleet,
        keep: Keep,
        limits: SessionLimits,
        clocks: Clocks,
        seed: str,
    ) -> None:
        self.name, self.lease, self.index = name, lease, index
        self.created = int(time.time())
        sampling = lease.group.sampling
        self.session = Session(limits, clocks, sampling.stop_token_ids, seed, fleet.clock())
        self.over: asyncio.Future[str | HeadraceError] = asyncio.get_running_loop().create_future()
        self.imposed: dict[str, list[object]] = {}
        self._fleet = fleet
        self._keep = keep
        self._keeping = asyncio.Lock()  # in the order of their numbers
        self._tasks: dict[SessionCall, asyncio.Task[None]] = {}
        self._hopeless: dict[bytes, str] = {}  # by the bodies of requests: why another try would fail, too
        self._given_up: dict[SessionCall, str] = {}  # by a clock, and by which

    def ask(self, request: ChatRequest) -> SessionCall:
        """The call that answers the request, under way. Raises `Refused`, and `CallFailed` for a request whose call failed for good."""
        if (why := self._hopeless.get(request.asked.body)) is not None:
            raise CallFailed(why, again=False)
        call, is_new = self.session.ask(request.asked, self._fleet.clock())
        if is_new:
            for option, value in request.imposed.items():
                values = self.imposed.setdefault(option, [])
                if value not in values and len(values) < _MOST_IMPOSED:
                    values.append(value)
                metrics.IMPOSED.labels(option).inc()
            task = asyncio.create_task(self._carry_out(call, parses_tools=request.parses_tools))
            self._tasks[call] = task
            task.add_done_callback(partial(self._done, call))
        return call

    async def wait(self, call: SessionCall) -> None:
        """Return when the call has its answer, which is kept. Raises `Refused`, `BadRequest`, `CallFailed`. To stop waiting does not stop
        the call."""
        task = self._tasks[call]
        await asyncio.wait([task])
        if task.cancelled():
            raise CallFailed("the episode has ended")
        task.result()

    def delivered(self, call: SessionCall) -> None:
        self.session.delivered(call)

    def left(self, call: SessionCall) -> None:
        self.session.left(call, self._fleet.clock())
        self._forget(call)

    def look(self) -> None:
        """Look at the clocks: give up the calls that are overdue, end the episode if it is."""
        now = self._fleet.clock()
        for call, why in list(self.session.overdue(now)):
            self._given_up[call] = why
            self._tasks[call].cancel()
        if (hung := self.session.hung(now)) is not None:
            self._end_for(hung)

    async def end(self) -> SessionSummary:
        """End the session: calls that are under way are given up, and the key is dead."""
        ending = self.session.end()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        return ending

    async def _carry_out(self, call: SessionCall, *, parses_tools: bool) -> None:
        """Raises `Refused`, `BadRequest`, `CallFailed`."""
        asks_again = True  # what clients do after an error that is not their fault
        try:
            await self._sample(call, parses_tools=parses_tools)
        except Refused:
            asks_again = False
            raise
        except RenderRefused as error:
            asks_again = False
            if error.reason == "context":
                raise self.session.no_room(self._fleet.clock(), str(error)) from error
            raise BadRequest(str(error), "messages") from error
        except asyncio.CancelledError:
            if call not in self._given_up:
                raise
            raise CallFailed(self._given_up[call], late=True) from None
        except CallFailed as error:
            asks_again = error.again
            if not error.again:
                self._hopeless[call.asked.body] = str(error)
            raise
        except HeadraceError as error:
            self._end_for(error)
            raise CallFailed("the episode has ended: what was sampled could not be kept") from error
        finally:
            if call.running:
                self.session.failed(call, self._fleet.clock(), again=asks_again)

    def _done(self, call: SessionCall, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more
        self._forget(call)

    def _forget(self, call: SessionCall) -> None:
        """Let go of the task of a call that failed, once nobody waits for it: its error holds the whole request."""
        if call.failed and call.readers == 0:
            self._tasks.pop(call, None)
            self._given_up.pop(call, None)

    def _end_for(self, why: str | HeadraceError) -> None:
        if not self.over.done():
            self.over.set_result(why)

    async def _sample(self, call: SessionCall, *, parses_tools: bool) -> None:
        session, fleet = self.session, self._fleet
        near = next((each.completion.replica for each in session.candidates(call) if each.completion is not None), None)
        with self._timed(call, "render"):
            rendered = await fleet.render(call.asked.messages, call.asked.tools, answered=False, near=near)
            while (earlier := session.unrendered(call, rendered)) is not None:
                answered = await fleet.render(earlier.history, call.asked.tools, answered=True, near=near)
                session.note_rendering(earlier, answered)
        placed = session.place(call, rendered, fleet.clock())
        # from here on `call.asked` has only the messages that the call adds; nothing keeps the others while it is sampled
        asked = call.asked
        del rendered
        with self._timed(call, "sample"):
            sampling = self.lease.group.sampling
            wanted = SampleRequest(
                token_ids=tuple(placed.token_ids.tolist()),
                max_new_tokens=placed.max_new_tokens,
                timeline=self.lease.timeline,
                min_version=self.lease.version,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop=tuple(dict.fromkeys([*sampling.stop_strings, *asked.stop])),
                stop_token_ids=sampling.stop_token_ids,
                seed=placed.seed,
                message=True,
                tools=[dict(tool) for tool in asked.tools] if parses_tools and asked.tools else None,
            )
            continued = None if call.parent is None else call.parent.completion
            sampled = await fleet.sample(wanted, None if continued is None else continued.replica)
        session.sampled(call, sampled)
        session.answered(call, sampled.message, fleet.clock())
        # from here on it is not given up: it has its number
        with self._timed(call, "keep"):
            async with self._keeping:
                await self._keep(call.number, secrets.token_hex(8), call.record(lambda each: each.number))

    @contextlib.contextmanager
    def _timed(self, call: SessionCall, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            call.timings[f"{phase}_s"] = seconds
            metrics.PHASES.labels(self.lease.group.env_name, phase).observe(seconds)
