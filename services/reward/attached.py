"""Environments in processes that dial in (`Attach`): one stream for each process, and their work spread over them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence

from headrace.config.data import EnvConfig
from headrace.errors import CodecError, HeadraceError
from headrace.flow import Flow
from headrace.trajectory import BUILD_BYTES
from headrace.v1 import environment_pb2, episode_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb
from headrace_services.reward.answers import accepted, accepted_outcome, ended, result_of

_LARGEST_CAPACITY = 65536
# How long a call waits for credit: for one on its way, or for another process to take what was lost.
_CREDIT_WAIT_S = 1.0
# Of a message, for what is not in its trajectories.
_ENVELOPE_BYTES = 256


_KINDS = (pb.WORK_KIND_SCORE, pb.WORK_KIND_EPISODE)
_FULL = "all that are attached have all that they can take"
_LATE = "the attached process that had it gave no answer in time"
# An environment, and what a piece of its work is.
Offered = tuple[str, pb.WorkKind.ValueType]


class StreamEnded(HeadraceError):
    """The stream of a process ended before it had answered."""


class AttachedStream:
    """One stream: what a process offers, and what it has been sent. Events that break the rules raise `CodecError`."""

    def __init__(self, register: pb.Register, max_message_bytes: int, address: str = "") -> None:
        """`address` is the process's."""
        self.address = address
        self.process_id = register.process_id
        self._offers = _offers(register)
        self._registered = time.monotonic()
        self.max_message_bytes = min(register.max_message_bytes or max_message_bytes, max_message_bytes)
        self.ended: str | None = None  # why
        self._draining = False
        self._flows = {offered: Flow(offer.capacity) for offered, offer in self._offers.items()}
        self._work: dict[str, tuple[Offered, asyncio.Future[pb.Answer] | None]] = {}
        self._events: asyncio.Queue[pb.AttachResponse | None] = asyncio.Queue()

    @property
    def takes_work(self) -> bool:
        return self.ended is None and not self._draining

    @property
    def names(self) -> list[str]:
        """The environments on offer."""
        return list(dict.fromkeys(name for name, _ in self._offers))

    def offer(self, name: str, kind: pb.WorkKind.ValueType = pb.WORK_KIND_SCORE) -> pb.Offer | None:
        return self._offers.get((name, kind))

    def described(self, name: str) -> environment_pb2.DescribeResponse:
        """What environment `name` says of itself, whatever of its work is on offer."""
        return self._any(name).environment

    def began(self, name: str) -> float:
        """When its process first offered environment `name`, by the monotonic clock."""
        return self._registered - self._any(name).age_ms / 1000

    def build(self, name: str) -> str:
        return self.described(name).build

    def capacity(self, name: str) -> int:
        """Trajectories and episodes of environment `name` that it can work on at a time."""
        return sum(offer.capacity for (of, _), offer in self._offers.items() if of == name)

    def held(self, name: str) -> int:
        """Trajectories and episodes of environment `name` that it has not answered."""
        return sum(flow.held for (of, _), flow in self._flows.items() if of == name)

    def room(self, name: str, kind: pb.WorkKind.ValueType = pb.WORK_KIND_SCORE) -> int:
        """Trajectories, or episodes, of environment `name` that it may be sent now."""
        flow, calls = self._flows[name, kind], self._offers[name, kind].environment.calls
        limited = kind == pb.WORK_KIND_SCORE and calls and flow.pieces >= calls
        return flow.credit if self.takes_work and not limited else 0

    def send(
        self, name: str, batch: Sequence[trajectory_pb2.Trajectory], timeout_s: float
    ) -> tuple[str, asyncio.Future[pb.Answer]]:
        """(its work id; the answer to come, or `StreamEnded`)."""
        event = _work(name, timeout_s)
        for trajectory in batch:  # copied once; a message that is given to another's constructor is copied again
            event.work.score.trajectories.add().CopyFrom(trajectory)
        return self._send(event, pb.WORK_KIND_SCORE, len(batch))

    def send_episode(
        self, name: str, episode: episode_pb2.Episode, timeout_s: float
    ) -> tuple[str, asyncio.Future[pb.Answer]]:
        """As `send`."""
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
        """Nobody waits for it any more. It keeps its room until the process answers it."""
        if work_id in self._work:
            self._work[work_id] = self._work[work_id][0], None
            self._events.put_nowait(pb.AttachResponse(cancel=pb.Cancel(work_id=work_id, reason=reason)))

    def receive(self, request: pb.AttachRequest) -> None:
        match request.WhichOneof("event"):
            case "credit":
                credit = request.credit
                if (credit.name, credit.kind) not in self._flows:
                    kind = pb.WorkKind.Name(credit.kind) if credit.kind in pb.WorkKind.values() else credit.kind
                    raise CodecError(f"credit for {credit.name!r} ({kind}), which this stream doesn't offer")
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
        """What goes to the process, until `end`."""
        while (event := await self._events.get()) is not None:
            yield event

    def end(self, reason: str) -> None:
        """Give up what is not answered. What is said first is the reason."""
        if self.ended is None:
            self.ended = reason
            self._events.put_nowait(None)
            for _, answer in self._work.values():
                if answer is not None and not answer.done():
                    answer.set_exception(StreamEnded(reason))


class AttachedBackend:
    """An environment in processes that dial in. Several share its load: each piece of work goes to the one with the most credit.

    Of several builds the newest has the work: that of the process which offered itself last. The others wait until all of that build
    have gone, so that an edit takes the place of what is still attached elsewhere, and builds don't take turns.

    What a process held when its stream ended goes to another one, once: it may be what ended it.
    """

    kind = pb.EnvironmentStatus.KIND_ATTACHED
    awaited = True

    def __init__(self, name: str, env: EnvConfig, hub: str) -> None:
        """`hub` is the address of the hub on its own machine."""
        self._name = name
        self._env = env
        self._hub = hub
        self._streams: list[AttachedStream] = []  # in the order in which their processes began
        self._changed = asyncio.Event()

    def join(self, stream: AttachedStream) -> None:
        """Send it work. One of the same process is over: the process has lost it."""
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
        """There may be credit, or somebody, that there was not."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def score(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], timeout_s: float | None
    ) -> list[trajectory_pb2.Result]:
        """As `BuiltInBackend.score`."""
        problem = self._problem()
        if problem is not None:
            return [self._result(trajectory_pb2.STATUS_NOT_STARTED, problem)] * len(trajectories)
        limit = self._env.timeout_s if timeout_s is None else min(self._env.timeout_s, timeout_s)
        full = self._result(trajectory_pb2.STATUS_NOT_STARTED, _FULL)
        return await self._spread(trajectories, asyncio.get_running_loop().time() + limit, full, is_second=False)

    async def run_episode(self, episode: episode_pb2.Episode, timeout_s: float) -> episode_pb2.EpisodeOutcome:
        """As `RemoteBackend.run_episode`. It goes to one process, and to no other when that is gone: it had begun."""
        kind = pb.WORK_KIND_EPISODE
        if (problem := self._problem(kind)) is not None:
            return ended(trajectory_pb2.STATUS_NOT_STARTED, problem, self._name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        stream = await self._with_room(kind, min(deadline, loop.time() + _CREDIT_WAIT_S))
        if stream is None:
            return ended(trajectory_pb2.STATUS_NOT_STARTED, _FULL, self._name)
        if episode.ByteSize() > stream.max_message_bytes - _ENVELOPE_BYTES:
            return ended(trajectory_pb2.STATUS_INVALID, _too_large(episode, stream), self._name)
        work_id, answer = stream.send_episode(self._name, episode, deadline - loop.time())
        try:
            async with asyncio.timeout_at(deadline):
                outcome = (await answer).episode.outcome
        except TimeoutError:
            stream.withdraw(work_id, "its deadline has passed")
            return ended(trajectory_pb2.STATUS_TIMED_OUT, _LATE, self._name)
        except StreamEnded as error:
            return ended(trajectory_pb2.STATUS_INTERRUPTED, f"{error}, while it was at work", self._name)
        except asyncio.CancelledError:
            stream.withdraw(work_id, "the caller has gone")
            raise
        return accepted_outcome(outcome, self._name, stream.described(self._name))

    async def describe(self) -> tuple[environment_pb2.DescribeResponse | None, str | None]:
        """As `BuiltInBackend.describe`: of the newest build, with the capacity of all processes that are of it."""
        problem = self._problem(pb.WORK_KIND_EPISODE if self._env.episodes else pb.WORK_KIND_SCORE)
        if problem is not None:
            return None, problem
        attached = self._attached()
        offers = [offer for stream in attached if (offer := stream.offer(self._name)) is not None]
        calls = [offer.environment.calls for offer in offers]
        description = environment_pb2.DescribeResponse()
        description.CopyFrom(attached[-1].described(self._name))
        description.capacity = sum(offer.capacity for offer in offers)
        description.calls = sum(calls) if all(calls) else 0
        programs = (stream.offer(self._name, pb.WORK_KIND_EPISODE) for stream in attached)
        description.episodes = sum(offer.capacity for offer in programs if offer is not None)
        return description, None

    def processes(self) -> list[pb.AttachedProcess]:
        """Who is attached, the longest first."""
        name, working, now = self._name, self._attached(), time.monotonic()
        return [
            pb.AttachedProcess(
                address=stream.address,
                build=stream.build(name),
                capacity=stream.capacity(name),
                in_hand=stream.held(name),
                age_ms=round(1000 * (now - stream.began(name))),
                works=stream in working,
            )
            for stream in self._streams
        ]

    def _attached(self) -> list[AttachedStream]:
        """The streams of the newest build, the one that offered itself last at the end."""
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
            return f"what is attached as {self._name} has no `{method}`; attach an environment that defines it"
        return f'nobody is attached; run headrace.attach("{self._hub}", …, name="{self._name}")'

    async def _spread(
        self,
        batch: Sequence[trajectory_pb2.Trajectory],
        deadline: float,
        otherwise: trajectory_pb2.Result,
        *,
        is_second: bool,
    ) -> list[trajectory_pb2.Result]:
        """Send in pieces what there is credit for; the rest gets `otherwise`."""
        loop = asyncio.get_running_loop()
        until = min(deadline, loop.time() + _CREDIT_WAIT_S)
        pieces: list[asyncio.Future[list[trajectory_pb2.Result]]] = []
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
                # before anything else is awaited, so that nobody else takes the credit
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
        piece: Sequence[trajectory_pb2.Trajectory],
        deadline: float,
        *,
        is_second: bool,
    ) -> list[trajectory_pb2.Result]:
        """The answer to a piece of work, by the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                description = stream.described(self._name)
                answered = (await answer).score.results
                results = accepted(answered, piece, "an attached process", self._name, description)
            for result in results:
                result.build = result.build or description.build
            return results
        except TimeoutError:
            stream.withdraw(work_id, "its deadline has passed")
            return [self._result(trajectory_pb2.STATUS_TIMED_OUT, _LATE)] * len(piece)
        except StreamEnded as error:
            lost = self._result(trajectory_pb2.STATUS_INTERRUPTED, f"{error}, while it was at work")
            if is_second:
                return [lost] * len(piece)
            return await self._spread(piece, deadline, lost, is_second=True)
        except asyncio.CancelledError:
            stream.withdraw(work_id, "the caller has gone")
            raise

    async def _with_room(self, kind: pb.WorkKind.ValueType, until: float) -> AttachedStream | None:
        """The one with the most room for work of this kind, as soon as there is any; None if there is none by `until`."""
        while True:
            takers = [stream for stream in self._attached() if stream.offer(self._name, kind) is not None]
            stream = max(takers, key=lambda stream: stream.room(self._name, kind), default=None)
            if stream is not None and stream.room(self._name, kind):
                return stream
            try:
                await asyncio.wait_for(self._changed.wait(), until - asyncio.get_running_loop().time())
            except TimeoutError:
                return None

    def _result(self, status: trajectory_pb2.Status.ValueType, message: str) -> trajectory_pb2.Result:
        return result_of(status, message, self._name)


def _work(name: str, timeout_s: float) -> pb.AttachResponse:
    """A piece of work, without what is to be done."""
    work = pb.Work(work_id=secrets.token_hex(8), name=name, deadline_ms=round(1000 * timeout_s))
    return pb.AttachResponse(work=work)


def _too_large(message: trajectory_pb2.Trajectory | episode_pb2.Episode, stream: AttachedStream) -> str:
    return f"its {message.ByteSize()} bytes are more than the attached process takes ({stream.max_message_bytes})"


def _offers(register: pb.Register) -> dict[Offered, pb.Offer]:
    """Raises `CodecError` for offers that can't be taken."""
    offers: dict[Offered, pb.Offer] = {}
    builds: dict[str, str] = {}
    for offer in register.offers:
        build = offer.environment.build
        if len(build.encode()) > BUILD_BYTES:
            raise CodecError(f"offer of {offer.name!r}: its build has more than {BUILD_BYTES} bytes")
        if offer.kind not in _KINDS:
            known = " and ".join(pb.WorkKind.Name(kind) for kind in _KINDS)
            raise CodecError(f"offer of {offer.name!r}: its kind is {offer.kind}; this hub sends {known} alone")
        if not 1 <= offer.capacity <= _LARGEST_CAPACITY:
            raise CodecError(f"offer of {offer.name!r}: its capacity is {offer.capacity}, not 1 to {_LARGEST_CAPACITY}")
        if (offer.name, offer.kind) in offers:
            raise CodecError(f"{offer.name!r} is offered twice for {pb.WorkKind.Name(offer.kind)}")
        if builds.setdefault(offer.name, build) != build:
            raise CodecError(f"offers of {offer.name!r} are of builds {builds[offer.name]!r} and {build!r}; give one")
        offers[offer.name, offer.kind] = offer
    if not offers or not register.process_id:
        raise CodecError("register without offers, or without process_id")
    return offers


def _fitting(sizes: Iterable[int], most: int) -> int:
    """How many of the first messages of these sizes fit into `most` bytes, each with its length before it."""
    count = total = 0
    for size in sizes:
        total += size + 6
        if total > most:
            break
        count += 1
    return count
