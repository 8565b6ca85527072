"""Environments in processes that dial in (`Attach`): one stream per process, with their work spread over all of them."""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections.abc import AsyncIterator, Iterable

from headrace.base.errors import CodecError, HeadraceError
from headrace.config.environments import AttachedConfig
from headrace.env.flow import Flow
from headrace.records.score import BUILD_BYTES
from headrace.v1 import environment_pb2, episode_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb

from .answers import check_outcome, check_results, make_outcome, make_result
from .backend import Described, Results, Trajectories

_LARGEST_CAPACITY = 65536
# How long a call waits in all for credit that is on its way, or for another process to take work that was lost. What doesn't begin by then
# has not started: later it would have less than the call's time, and be charged for it.
_CREDIT_WAIT_S = 1.0
# bytes of a message reserved for everything but its trajectories
_ENVELOPE_BYTES = 256


_KINDS = (pb.WORK_KIND_SCORE, pb.WORK_KIND_EPISODE)
_FULL = "every attached process is at capacity"
_LATE = "the attached process that had it did not answer in time"
# an environment, and the kind of its work
Offered = tuple[str, pb.WorkKind.ValueType]


class StreamEnded(HeadraceError):
    """Raised when the stream of a process ends before the process has answered."""


class AttachedStream:
    """One stream: what its process offers, and the work that it has been sent. Events that break the rules raise `CodecError`."""

    def __init__(self, register: pb.Register, max_message_bytes: int, address: str = "") -> None:
        """`address` is the address of the process."""
        self.address = address
        self.process_id = register.process_id
        self._offers = _offers(register)
        self._registered = time.monotonic()
        self.max_message_bytes = min(register.max_message_bytes or max_message_bytes, max_message_bytes)
        self.ended: str | None = None  # the reason
        self._draining = False
        self._flows = {offered: Flow(offer.capacity) for offered, offer in self._offers.items()}
        self._work: dict[str, tuple[Offered, asyncio.Future[pb.Answer] | None]] = {}
        self._events: asyncio.Queue[pb.AttachResponse | None] = asyncio.Queue()

    @property
    def takes_work(self) -> bool:
        return self.ended is None and not self._draining

    @property
    def names(self) -> list[str]:
        """The names of the offered environments."""
        return list(dict.fromkeys(name for name, _ in self._offers))

    def offer(self, name: str, kind: pb.WorkKind.ValueType = pb.WORK_KIND_SCORE) -> pb.Offer | None:
        return self._offers.get((name, kind))

    def describe(self, name: str) -> environment_pb2.DescribeResponse:
        """Return how environment `name` describes itself, whatever kind of its work is offered."""
        return self._any(name).environment

    def began(self, name: str) -> float:
        """Return when the process first offered environment `name`, by the monotonic clock."""
        return self._registered - self._any(name).age_ms / 1000

    def build(self, name: str) -> str:
        return self.describe(name).build

    def capacity(self, name: str) -> int:
        """Return how many trajectories and episodes of environment `name` the process can work on at a time."""
        return sum(offer.capacity for (of, _), offer in self._offers.items() if of == name)

    def count_held(self, name: str) -> int:
        """Return how many trajectories and episodes of environment `name` the process has not answered."""
        return sum(flow.held for (of, _), flow in self._flows.items() if of == name)

    def room(self, name: str, kind: pb.WorkKind.ValueType = pb.WORK_KIND_SCORE) -> int:
        """Return how many trajectories (or episodes) of environment `name` may be sent now."""
        flow, calls = self._flows[name, kind], self._offers[name, kind].environment.calls
        limited = kind == pb.WORK_KIND_SCORE and calls and flow.pieces >= calls
        return flow.credit if self.takes_work and not limited else 0

    def send(self, name: str, batch: Trajectories, timeout_s: float) -> tuple[str, asyncio.Future[pb.Answer]]:
        """Send a batch, and return its work id and a future. The future holds the answer, or `StreamEnded`."""
        event = _work(name, timeout_s)
        for trajectory in batch:  # copied once here; passing the messages to a constructor would copy them again
            event.work.score.trajectories.add().CopyFrom(trajectory)
        return self._send(event, pb.WORK_KIND_SCORE, len(batch))

    def send_episode(
        self, name: str, episode: episode_pb2.Episode, timeout_s: float
    ) -> tuple[str, asyncio.Future[pb.Answer]]:
        """Send an episode, like `send`."""
        event = _work(name, timeout_s)
        event.work.episode.episode.CopyFrom(episode)
        return self._send(event, pb.WORK_KIND_EPISODE, 1)

    def _send(
        self, event: pb.AttachResponse, kind: pb.WorkKind.ValueType, size: int
    ) -> tuple[str, asyncio.Future[pb.Answer]]:
        work = event.work
        self._flows[work.name, kind].send(work.work_id, size)
        self._events.put_nowait(event)
        answer: asyncio.Future[pb.Answer] = asyncio.get_running_loop().create_future()
        self._work[work.work_id] = (work.name, kind), answer
        return work.work_id, answer

    def _any(self, name: str) -> pb.Offer:
        return next(offer for (of, _), offer in self._offers.items() if of == name)

    def withdraw(self, work_id: str, reason: str) -> None:
        """Cancel a piece of work that nobody waits for any more. It occupies its room until the process answers."""
        if work_id in self._work:
            self._work[work_id] = self._work[work_id][0], None
            self._events.put_nowait(pb.AttachResponse(cancel=pb.Cancel(work_id=work_id, reason=reason)))

    def receive(self, request: pb.AttachRequest) -> None:
        match request.WhichOneof("event"):
            case "credit":
                credit = request.credit
                if (credit.name, credit.kind) not in self._flows:
                    kind = pb.WorkKind.Name(credit.kind) if credit.kind in pb.WorkKind.values() else credit.kind
                    raise CodecError(f"credit for {credit.name!r} ({kind}), which this stream does not offer")
                self._flows[credit.name, credit.kind].grant(credit.amount)
            case "answer":
                offered, answer = self._work.pop(request.answer.work_id, (None, None))
                if offered is not None:
                    self._flows[offered].answer(request.answer.work_id)
                if answer is not None and not answer.done():
                    answer.set_result(request.answer)
            case "drain":
                self._draining = True
            case other:
                raise CodecError(
                    f"event {other or 'nothing'}: send register first and once, then credit, answer or drain"
                )

    async def events(self) -> AsyncIterator[pb.AttachResponse]:
        """Yield the events for the process, until `end`."""
        while (event := await self._events.get()) is not None:
            yield event

    def end(self, reason: str) -> None:
        """End the stream and give up all unanswered work. The first call's reason counts."""
        if self.ended is None:
            self.ended = reason
            self._events.put_nowait(None)
            for _, answer in self._work.values():
                if answer is not None and not answer.done():
                    answer.set_exception(StreamEnded(reason))


class AttachedBackend:
    """An environment in processes that dial in. Several processes share the load: each piece of work goes to the one with the most credit.

    If there are several builds, all work goes to the newest: the build of the process that was offered last. The others wait until every
    process of that build has gone. So an edited environment replaces the versions that are still attached elsewhere, and builds don't take
    turns.

    When a stream ends, the work that its process held goes to another process, but only once: that work may be what ended the process.
    """

    kind = pb.EnvironmentStatus.KIND_ATTACHED
    awaited = True

    def __init__(self, name: str, env: AttachedConfig, hub: str) -> None:
        """`hub` is the hub's address on its own machine."""
        self._name = name
        self._env = env
        self._hub = hub
        self._streams: list[AttachedStream] = []  # in the order in which their processes began
        self._changed = asyncio.Event()

    def join(self, stream: AttachedStream) -> None:
        """Start sending work to a stream. An older stream of the same process is over: the process has lost it."""
        for other in self._streams:
            if other.process_id == stream.process_id:
                other.end("its process has opened another stream")
        self._streams.append(stream)
        self._streams.sort(key=lambda stream: stream.began(self._name))
        self.wake()

    def leave(self, stream: AttachedStream) -> None:
        self._streams.remove(stream)
        self.wake()

    def wake(self) -> None:
        """Wake the calls that wait for credit or for a process, because there may be some now."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def score(self, trajectories: Trajectories, timeout_s: float | None) -> Results:
        problem = self._problem()
        if problem is not None:
            return [self._result(trajectory_pb2.STATUS_NOT_STARTED, problem)] * len(trajectories)
        limit = self._env.timeout_s if timeout_s is None else min(self._env.timeout_s, timeout_s)
        full = self._result(trajectory_pb2.STATUS_NOT_STARTED, _FULL)
        return await self._spread(trajectories, asyncio.get_running_loop().time() + limit, full, is_second=False)

    async def run_episode(self, episode: episode_pb2.Episode, timeout_s: float) -> episode_pb2.EpisodeOutcome:
        """Run an episode, like `RunsEpisodes.run_episode`. It goes to one process only: if that process disappears, the episode has
        begun."""
        kind = pb.WORK_KIND_EPISODE
        if (problem := self._problem(kind)) is not None:
            return make_outcome(trajectory_pb2.STATUS_NOT_STARTED, problem, self._name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        stream = await self._with_room(kind, min(deadline, loop.time() + _CREDIT_WAIT_S))
        if stream is None:
            return make_outcome(trajectory_pb2.STATUS_NOT_STARTED, _FULL, self._name)
        if episode.ByteSize() > stream.max_message_bytes - _ENVELOPE_BYTES:
            return make_outcome(trajectory_pb2.STATUS_INVALID, _too_large(episode, stream), self._name)
        work_id, answer = stream.send_episode(self._name, episode, deadline - loop.time())
        try:
            async with asyncio.timeout_at(deadline):
                outcome = (await answer).episode.outcome
        except TimeoutError:
            stream.withdraw(work_id, "its deadline has passed")
            return make_outcome(trajectory_pb2.STATUS_TIMED_OUT, _LATE, self._name)
        except StreamEnded as error:
            return make_outcome(
                trajectory_pb2.STATUS_INTERRUPTED, f"{error}, while the episode was running", self._name
            )
        except asyncio.CancelledError:
            stream.withdraw(work_id, "the caller has gone")
            raise
        return check_outcome(outcome, self._name, stream.describe(self._name))

    async def describe(self) -> Described:
        """Describe the newest build, like `EnvironmentBackend.describe`, with the capacity of all processes of that build."""
        problem = self._problem(pb.WORK_KIND_EPISODE if self._env.episodes else pb.WORK_KIND_SCORE)
        if problem is not None:
            return None, problem
        attached = self._attached()
        offers = [offer for stream in attached if (offer := stream.offer(self._name)) is not None]
        calls = [offer.environment.calls for offer in offers]
        description = copy.deepcopy(attached[-1].describe(self._name))
        description.capacity = sum(offer.capacity for offer in offers)
        description.calls = sum(calls) if all(calls) else 0
        programs = (stream.offer(self._name, pb.WORK_KIND_EPISODE) for stream in attached)
        description.episodes = sum(offer.capacity for offer in programs if offer is not None)
        return description, None

    def processes(self) -> list[pb.AttachedProcess]:
        """Return the attached processes, the one attached for longest first."""
        name, working, now = self._name, self._attached(), time.monotonic()
        return [
            pb.AttachedProcess(
                address=stream.address,
                build=stream.build(name),
                capacity=stream.capacity(name),
                in_hand=stream.count_held(name),
                age_ms=round(1000 * (now - stream.began(name))),
                works=stream in working,
            )
            for stream in self._streams
        ]

    def _attached(self) -> list[AttachedStream]:
        """Return the streams of the newest build, the one offered last at the end."""
        name = self._name
        takers = [stream for stream in self._streams if stream.takes_work]
        newest = takers[-1].build(name) if takers else ""
        return [stream for stream in takers if stream.build(name) == newest]

    def _problem(self, kind: pb.WorkKind.ValueType = pb.WORK_KIND_SCORE) -> str | None:
        attached = self._attached()
        if any(stream.offer(self._name, kind) is not None for stream in attached):
            return None
        if attached:
            method = "score" if kind == pb.WORK_KIND_SCORE else "episode"
            return f"the environment attached as {self._name} has no `{method}`; attach one that defines it"
        return f'no process is attached; run headrace.attach("{self._hub}", …, name="{self._name}")'

    async def _spread(
        self, batch: Trajectories, deadline: float, otherwise: trajectory_pb2.Result, *, is_second: bool
    ) -> Results:
        """Send as much as there is credit for, in pieces. The rest gets the result `otherwise`."""
        loop = asyncio.get_running_loop()
        until = min(deadline, loop.time() + _CREDIT_WAIT_S)
        pieces: list[asyncio.Future[Results]] = []
        start = 0
        try:
            while start < len(batch) and loop.time() < deadline:
                stream = await self._with_room(pb.WORK_KIND_SCORE, until)
                if stream is None:
                    break
                room = min(stream.room(self._name), self._env.max_batch_size)
                sizes = (trajectory.ByteSize() for trajectory in batch[start : start + room])
                piece = batch[start : start + _fitting(sizes, stream.max_message_bytes - _ENVELOPE_BYTES)]
                if not piece:
                    pieces.append(loop.create_future())
                    too_large = _too_large(batch[start], stream)
                    pieces[-1].set_result([self._result(trajectory_pb2.STATUS_INVALID, too_large)])
                    start += 1
                    continue
                # before the next await, so that no other call takes the credit
                work_id, answer = stream.send(self._name, piece, deadline - loop.time())
                settle = self._settle(stream, work_id, answer, piece, deadline, is_second=is_second)
                pieces.append(asyncio.create_task(settle))
                start += len(piece)
            results = [result for piece in await asyncio.gather(*pieces) for result in piece]
        finally:
            for each in pieces:
                each.cancel()
        return [*results, *[otherwise] * (len(batch) - start)]

    async def _settle(
        self,
        stream: AttachedStream,
        work_id: str,
        answer: asyncio.Future[pb.Answer],
        piece: Trajectories,
        deadline: float,
        *,
        is_second: bool,
    ) -> Results:
        """Return the results of a piece of work, by the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                description = stream.describe(self._name)
                answered = (await answer).score.results
                results = check_results(answered, piece, "an attached process", self._name, description)
            for result in results:
                result.build = result.build or description.build
            return results
        except TimeoutError:
            stream.withdraw(work_id, "its deadline has passed")
            return [self._result(trajectory_pb2.STATUS_TIMED_OUT, _LATE)] * len(piece)
        except StreamEnded as error:
            lost = self._result(trajectory_pb2.STATUS_INTERRUPTED, f"{error}, while the trajectory was being scored")
            if is_second:
                return [lost] * len(piece)
            return await self._spread(piece, deadline, lost, is_second=True)
        except asyncio.CancelledError:
            stream.withdraw(work_id, "the caller has gone")
            raise

    async def _with_room(self, kind: pb.WorkKind.ValueType, until: float) -> AttachedStream | None:
        """Wait for room for work of this kind, and return the stream with the most. Return None if there is no room by `until`."""
        while True:
            takers = [stream for stream in self._attached() if stream.offer(self._name, kind) is not None]
            stream = max(takers, key=lambda stream: stream.room(self._name, kind), default=None)
            if stream is not None and stream.room(self._name, kind):
                return stream
            try:
                # not wait_for, which before Python 3.12 loses a cancellation that arrives with the change
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                return None

    def _result(self, status: trajectory_pb2.Status.ValueType, message: str) -> trajectory_pb2.Result:
        return make_result(status, message, self._name)


def _work(name: str, timeout_s: float) -> pb.AttachResponse:
    """Return an event for a piece of work, without its content."""
    work = pb.Work(work_id=secrets.token_hex(8), name=name, deadline_ms=round(1000 * timeout_s))
    return pb.AttachResponse(work=work)


def _too_large(message: trajectory_pb2.Trajectory | episode_pb2.Episode, stream: AttachedStream) -> str:
    return f"its {message.ByteSize()} bytes are more than the attached process accepts ({stream.max_message_bytes})"


def _offers(register: pb.Register) -> dict[Offered, pb.Offer]:
    """Return the offers by environment and kind of work. Raises `CodecError` for invalid offers."""
    offers: dict[Offered, pb.Offer] = {}
    builds: dict[str, str] = {}
    for offer in register.offers:
        build = offer.environment.build
        if len(build.encode()) > BUILD_BYTES:
            raise CodecError(f"offer of {offer.name!r}: its build has more than {BUILD_BYTES} bytes")
        if offer.kind not in _KINDS:
            known = " and ".join(pb.WorkKind.Name(kind) for kind in _KINDS)
            raise CodecError(f"offer of {offer.name!r}: its kind is {offer.kind}; this hub sends only {known}")
        if not 1 <= offer.capacity <= _LARGEST_CAPACITY:
            raise CodecError(f"offer of {offer.name!r}: its capacity is {offer.capacity}, not 1 to {_LARGEST_CAPACITY}")
        if (offer.name, offer.kind) in offers:
            raise CodecError(f"{offer.name!r} is offered twice for {pb.WorkKind.Name(offer.kind)}")
        if builds.setdefault(offer.name, build) != build:
            raise CodecError(
                f"offers of {offer.name!r} have builds {builds[offer.name]!r} and {build!r}; give a single build"
            )
        offers[offer.name, offer.kind] = offer
    if not offers or not register.process_id:
        raise CodecError("register without offers, or without process_id")
    return offers


def _fitting(sizes: Iterable[int], most: int) -> int:
    """Return how many of the first messages of these sizes fit into `most` bytes, each preceded by its length."""
    count = total = 0
    for size in sizes:
        total += size + 6
        if total > most:
            break
        count += 1
    return count
