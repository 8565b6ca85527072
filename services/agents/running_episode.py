"""One running episode. Each call runs in its own task, so it outlives the connection of its client.

`session.Session` makes all decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from headrace.base.errors import HeadraceError
from headrace.base.tasks import cancel
from headrace.net import tracing
from headrace.net.replica_client import RenderRefused, SampleRequest
from headrace.records.trajectory import Call
from headrace.replay import Lease

from . import metrics
from .dialect import BadRequest, ChatRequest
from .fleet import CallFailed, Fleet
from .session import Clocks, Refused, Session, SessionCall, SessionLimits, SessionSummary

log = logging.getLogger(__name__)

# Different values that are kept of an option that the run's value replaced.
_MOST_IMPOSED = 16
# Keeps a call under its number, its nonce, and the timeline of the weights that wrote it. Returns once the buffer has it.
Keep = Callable[[int, str, Call, str], Awaitable[None]]


class OpenEpisode:
    """A running episode. `keep` stores a finished call; its answer leaves afterwards. `over` is set when the program has to end: to the
    clock that has run out, or to the error that stops all further answers (the lease is lost, or a call could not be kept)."""

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
        self.span: tracing.Span = tracing.NO_SPAN  # under which its calls are
        self._fleet = fleet
        self._keep = keep
        self._keeping = asyncio.Lock()  # keeps calls in the order of their numbers
        self._tasks: dict[SessionCall, asyncio.Task[None]] = {}
        self._hopeless: dict[bytes, str] = {}  # why another try would fail too, by the body of the request
        self._given_up: dict[SessionCall, str] = {}  # the clock that ended each call

    def ask(self, request: ChatRequest) -> SessionCall:
        """Return the call that answers the request, and start it if it is new. Raises `Refused`, and `CallFailed` for a request whose call
        failed for good."""
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
        """Wait until the call's answer is kept. Cancelling the wait does not cancel the call. Raises `Refused`, `BadRequest`,
        `CallFailed`."""
        task = self._tasks[call]
        await asyncio.wait([task])
        if task.cancelled():
            raise CallFailed("the episode has ended")
        task.result()

    def note_departure(self, call: SessionCall) -> None:
        self.session.note_departure(call, self._fleet.clock())
        self._forget(call)

    def look(self) -> None:
        """Check the clocks: give up overdue calls, and end the episode if its time is up."""
        now = self._fleet.clock()
        for call, why in list(self.session.overdue(now)):
            self._given_up[call] = why
            self._tasks[call].cancel()
        if (hung := self.session.hung(now)) is not None:
            self._end_for(hung)

    async def end(self) -> SessionSummary:
        """End the session and give up the calls that are still running."""
        ending = self.session.end()
        await cancel(self._tasks.values())
        return ending

    async def _carry_out(self, call: SessionCall, *, parses_tools: bool) -> None:
        """Raises `Refused`, `BadRequest`, `CallFailed`."""
        asks_again = True  # clients retry after an error that is not their fault
        try:
            told = tracing.named(group_id=self.lease.group.id, index=self.index)
            with tracing.span("call", self.span.id, attributes=told):
                await self._answer(call, parses_tools=parses_tools)
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
            raise CallFailed("the episode has ended: the sampled answer could not be kept") from error
        finally:
            if call.running:
                self.session.note_failure(call, self._fleet.clock(), again=asks_again)

    def _done(self, call: SessionCall, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved, as nobody may be waiting
        self._forget(call)

    def _forget(self, call: SessionCall) -> None:
        """Drop the task of a failed call once nobody waits for it. Its error holds the whole request."""
        if call.failed and call.readers == 0:
            self._tasks.pop(call, None)
            self._given_up.pop(call, None)

    def _end_for(self, why: str | HeadraceError) -> None:
        if not self.over.done():
            self.over.set_result(why)

    async def _answer(self, call: SessionCall, *, parses_tools: bool) -> None:
        session, fleet = self.session, self._fleet
        near = next((each.completion.replica for each in session.candidates(call) if each.completion is not None), None)
        with self._timed(call, "render"):
            rendered = await fleet.render(call.asked.messages, call.asked.tools, answered=False, near=near)
            while (earlier := session.find_unrendered(call, rendered)) is not None:
                answered = await fleet.render(earlier.history, call.asked.tools, answered=True, near=near)
                session.note_rendering(earlier, answered)
        placed = session.place(call, rendered, fleet.clock())
        # `call.asked` now holds only the messages that the call adds; nothing keeps the others while it is sampled
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
                bad_words=sampling.bad_words,
                seed=placed.seed,
                message=True,
                tools=[dict(tool) for tool in asked.tools] if parses_tools and asked.tools else None,
            )
            continued = None if call.parent is None else call.parent.completion
            sampled = await fleet.sample(wanted, None if continued is None else continued.replica)
        session.note_sampling(call, sampled)
        session.note_answer(call, sampled.message, fleet.clock())
        # the call has its number now, and is no longer given up
        with self._timed(call, "keep"):
            async with self._keeping:
                record = call.record(lambda each: each.number)
                await self._keep(call.number, secrets.token_hex(8), record, sampled.timeline)

    @contextlib.contextmanager
    def _timed(self, call: SessionCall, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            call.timings[f"{phase}_s"] = seconds
            metrics.PHASES.labels(self.lease.group.env_name, phase).observe(seconds)
