"""The replicas that sample for episodes: their states, their load, and a clock that runs only while one of them is HEALTHY.

A call whose replica is fenced or lost is sampled again on another, from the beginning. This is counted, because long completions are lost
more often than short ones. A silent replica counts as lost as soon as the buffer reports it. A call waits while no replica can take it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.base.errors import HeadraceError
from headrace.base.http_client import NotReached
from headrace.base.tasks import cancel
from headrace.net.replica_client import ReplicaFenced, ReplicaUnavailable, Sampled, SampleRequest
from headrace.records.trajectory import Message
from headrace.replay import Replica

from . import metrics
from .decisions import choose

log = logging.getLogger(__name__)

T = TypeVar("T")
# A call that has lost this many replicas fails.
_MOST_LOST = 3
# A replica that refused a call is tried again after this time, or as soon as there is news of the fleet.
_PAUSE_S = 1.0


class CallFailed(HeadraceError):
    """Raised for a call that has no answer, through no fault of its request. `late`: a clock of the run ended it. `again`: a retry may
    succeed."""

    def __init__(self, message: str, *, late: bool = False, again: bool = True) -> None:
        super().__init__(message)
        self.late, self.again = late, again


class ReplicaApi(Protocol):
    """The part of `headrace.net.replica_client.ReplicaClient` that calls need."""

    async def sample(self, request: SampleRequest) -> Sampled: ...

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]: ...

    async def aclose(self) -> None: ...


class RunClock:
    """Counts the seconds in which a replica could sample. The clocks of episodes stand still otherwise."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted = 0.0
        self._since: float | None = None  # when it started; None while it stands still

    def __call__(self) -> float:
        return self._counted + (0.0 if self._since is None else self._clock() - self._since)

    def run(self, goes: bool) -> None:
        self._counted = self()
        self._since = self._clock() if goes else None


class Fleet:
    """The replicas that this runner knows. `connect` returns a client for a URL."""

    def __init__(self, connect: Callable[[str], ReplicaApi], clock: RunClock) -> None:
        self._connect = connect
        self.clock = clock
        self._replicas: dict[str, Replica] = {}
        self._clients: dict[str, tuple[str, ReplicaApi]] = {}  # URL and client, by the replica's id
        self._closing: set[asyncio.Task[None]] = set()
        self._calls: Counter[str] = Counter()
        self._awaited: dict[asyncio.Future[HeadraceError], str] = {}  # the replica of each awaited answer
        self._news = asyncio.Event()

    @property
    def healthy(self) -> int:
        return sum(replica.state == "HEALTHY" for replica in self._replicas.values())

    def note(self, replicas: Iterable[Replica]) -> None:
        """Take the buffer's news of all replicas. None are given while the buffer is away: then no replica is known to be HEALTHY."""
        self._replicas = {replica.id: replica for replica in replicas if isinstance(replica.info.get("url"), str)}
        self.clock.run(self.healthy > 0)
        if self._replicas:  # an empty list may only mean that the buffer is away
            self._forget_others()
        for lost, replica in self._awaited.items():
            if not lost.done() and (why := self._reason_of_loss(replica)) is not None:
                lost.set_result(why)
        self._news.set()
        self._news = asyncio.Event()

    def _forget_others(self) -> None:
        """Close the clients of replicas that have left and have no running call."""
        self._calls = Counter({id_: calls for id_, calls in self._calls.items() if calls or id_ in self._replicas})
        used = set(self._calls) | set(self._replicas)
        for id_ in [id_ for id_ in self._clients if id_ not in used]:
            closing = asyncio.create_task(self._clients.pop(id_)[1].aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def sample(self, request: SampleRequest, parent: str | None) -> Sampled:
        """Sample from the replica `parent` if possible, else from another, on its timeline: the lease may outlive its own. Raises
        `RenderRefused`. Raises `CallFailed` if too many replicas are lost while they sample it, because the call itself may crash them."""

        async def one(client: ReplicaApi, timeline: str) -> Sampled:
            sampled = await client.sample(msgspec.structs.replace(request, timeline=timeline))
            if not sampled.token_ids:
                raise ReplicaUnavailable(f"{sampled.replica} answered without a token")
            if request.message and not sampled.message:
                raise ReplicaUnavailable(f"{sampled.replica} answered without a message")
            # the buffer judges its timeline, which may be a later one by now
            if min(sampled.spans).version < request.min_version:
                raise ReplicaFenced("stale", f"{sampled.replica} answered with weights of an older version")
            return sampled

        def pick(refused: set[str]) -> str | None:
            return choose(self._replicas.values(), self._calls, request.min_version, parent, refused)

        return await self._on_one(one, pick, samples=True)

    async def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, answered: bool, near: str | None
    ) -> list[int]:
        """Return the tokens of a conversation. `answered`: it ends with an answer, so no generation prompt follows. Raises
        `RenderRefused`."""
        listed = [dict(tool) for tool in tools] or None
        return await self._on_one(
            lambda client, _: client.render(messages, listed, add_generation_prompt=not answered),
            self._translator(near),
        )

    async def aclose(self) -> None:
        await asyncio.gather(*self._closing, *(client.aclose() for _, client in self._clients.values()))

    def _translator(self, near: str | None) -> Callable[[set[str]], str | None]:
        """Return a function that picks a replica for work without weights: `near`, which knows the call, or the least loaded live one."""

        def pick(refused: set[str]) -> str | None:
            alive = [each.id for each in self._replicas.values() if each.state != "DEAD" and each.id not in refused]
            return near if near in alive else min(alive, key=lambda each: (self._calls[each], each), default=None)

        return pick

    async def _on_one(
        self,
        ask: Callable[[ReplicaApi, str], Coroutine[Any, Any, T]],
        pick: Callable[[set[str]], str | None],
        *,
        samples: bool = False,
    ) -> T:
        """Return the answer of the replica that `pick` chooses, and `ask` asks on the timeline of its weights. One that can't answer is
        skipped for a moment, or until there is news."""
        refused: set[str] = set()
        lost: set[str] = set()
        while True:
            news = self._news
            replica = pick(refused)
            if replica is None:
                refused.clear()
                with contextlib.suppress(TimeoutError):
                    # not wait_for, which before Python 3.12 loses a cancellation that arrives with the news
                    async with asyncio.timeout(_PAUSE_S):
                        await news.wait()
                continue
            self._calls[replica] += 1
            try:
                return await self._answer(ask(self._client(replica), self._replicas[replica].timeline), replica)
            except (ReplicaFenced, ReplicaUnavailable) as error:
                log.info("%s: %s", replica, error)
                metrics.ASKED_ELSEWHERE.labels(getattr(error, "reason", "unavailable")).inc()
                refused.add(replica)
                may_have_request = isinstance(error, ReplicaUnavailable) and not isinstance(error.__cause__, NotReached)
                if samples and may_have_request:
                    lost.add(replica)
                    if len(lost) >= _MOST_LOST:
                        raise CallFailed(
                            f"{len(lost)} replicas were lost while they sampled this call, the last with: {error}",
                            again=False,
                        ) from error
            finally:
                self._calls[replica] -= 1

    async def _answer(self, ask: Coroutine[Any, Any, T], replica: str) -> T:
        """Await the answer of the replica. Raises the error of `_reason_of_loss` as soon as the replica is lost."""
        asking, lost = asyncio.create_task(ask), asyncio.get_running_loop().create_future()
        self._awaited[lost] = replica
        try:
            await asyncio.wait([asking, lost], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise lost.result()
            return asking.result()
        finally:
            del self._awaited[lost]
            await cancel([asking])

    def _reason_of_loss(self, replica: str) -> HeadraceError | None:
        """Return why this replica will not answer any more, or None. A replica in a refit may stop and then continue with newer weights, or
        with those of a later timeline. Where it can't, it says so."""
        known = self._replicas.get(replica)
        if known is None:
            # with no replica at all the buffer may only be away, and there is no other to ask
            return ReplicaUnavailable("it has left the fleet") if self._replicas else None
        if known.state == "DEAD":
            return ReplicaUnavailable("its heartbeats have stopped")
        return None

    def _client(self, replica: str) -> ReplicaApi:
        url = str(self._replicas[replica].info["url"])
        known = self._clients.get(replica)
        if known is None or known[0] != url:
            known = self._clients[replica] = url, self._connect(url)
        return known[1]
