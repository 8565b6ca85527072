"""Attaches one environment to a run's reward hub: dials the hub, scores samples and runs episodes. It listens on no port."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import logging
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from headrace.base.addresses import target_is_local
from headrace.base.backoff import pause_after
from headrace.base.errors import CodecError, ConfigError, ServiceError, is_outage
from headrace.env import slots
from headrace.env.environment import Environment
from headrace.env.episode import EpisodeOutcome
from headrace.env.flow import Flow
from headrace.env.programs import Programs
from headrace.env.server import GRACE_S, STALL_S, BatchScorer
from headrace.env.wire import (
    episode_from_wire,
    fit_outcome,
    fit_results,
    outcome_to_wire,
    sample_from_wire,
    score_to_wire,
)
from headrace.net import rpc, tracing
from headrace.net.credentials import Credentials
from headrace.net.service import stop_signals
from headrace.records.score import Score
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc
from headrace.v1 import trajectory_pb2

_log = logging.getLogger("headrace.env.environment")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 5.0
_LINE_S = 0.5
# Refusals that another try won't change.
_FINAL = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}


@dataclasses.dataclass(frozen=True)
class DialOptions:
    """The options for dialling a hub: with TLS or without (`rpc.TlsSettings`), and a function that returns the caller's token."""

    tls: bool = False
    tls_ca: str | None = None
    token: Callable[[], str] | None = None


class Attachment:
    """An environment that is attached to a hub, in a thread with its own event loop.

    `scored` counts the samples and episodes answered with a score, `failed` those that failed.
    """

    def __init__(
        self, hub: str, environment: Environment, name: str, capacity: int | None, options: Callable[[], DialOptions]
    ) -> None:
        self.hub, self.name = hub, name
        self.scored = self.failed = 0
        self._scorer = BatchScorer(environment, capacity=capacity, on_free=self._grant)
        self._programs = (
            Programs(environment, capacity=capacity, on_free=self._grant) if environment.runs_episodes else None
        )
        self._options = options
        self._process_id = secrets.token_hex(16)
        self._began = time.monotonic()
        self._stream: _Stream | None = None  # set while attached
        self._admitted = False  # the hub has accepted it once
        self._trouble = "connecting"
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"headrace-attach-{name}")
        self._thread.start()

    @property
    def line(self) -> str:
        """The attachment's state and counts, in one line."""
        busy = self._scorer.busy + (0 if self._programs is None else self._programs.busy)
        counts = f"{busy} at work, {self.scored} scored, {self.failed} failed"
        state = "attached" if self._stream is not None else f"not attached ({self._trouble})"
        return f"environment {self.name}, {state} to {self.hub}: {counts}"

    def stop(self) -> None:
        """Take no more work, finish what is in progress within two seconds, and detach."""
        self._ask_to_stop()
        self._thread.join()

    def wait(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the attachment is stopped by `stop`, Ctrl-C (in a notebook, by interrupting the cell) or SIGTERM. Return True as soon
        as `until` is true, while the attachment continues. A status line is shown meanwhile. Raises `ServiceError` if the hub refuses the
        environment for good."""
        live = sys.stdout.isatty() or "ipykernel" in sys.modules
        shown, found = "", False
        with self._stopped_by_signals():
            while self._thread.is_alive() and not (found := until()):
                self._thread.join(_LINE_S)
                if live and self.line != shown:
                    sys.stdout.write(f"\r{self.line.ljust(len(shown))}")
                    sys.stdout.flush()
                    shown = self.line
        if shown:
            sys.stdout.write("\n")
        if self._error is not None:
            raise self._error
        return found

    @contextlib.contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """Handle signals directly, in the main thread, which alone receives them. Handlers of a running event loop would wait for the loop,
        which waits for this call."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {signum: signal.signal(signum, lambda *_: self._ask_to_stop()) for signum in stop_signals()}
        try:
            yield
        finally:
            for signum, handler in former.items():
                signal.signal(signum, handler)

    def _ask_to_stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the thread has ended
            self._loop.call_soon_threadsafe(self._stopping.set)

    def _run(self) -> None:
        try:
            slots.run(self._keep_attached(), self._loop)
        except BaseException as error:  # noqa: BLE001  # `wait` raises it
            self._error = error
            _log.error("environment %s is no longer attached: %s", self.name, str(error) or repr(error))

    async def _keep_attached(self) -> None:
        tries = 0
        while not self._stopping.is_set():
            try:
                async with self._dialled() as (stub, metadata):
                    await self._serve(stub, metadata)
                trouble = "the hub ended the stream"
            except grpc.aio.AioRpcError as error:
                trouble = f"{error.code().name}: {error.details()}"
                if error.code() in _FINAL and not (self._admitted and error.code() is grpc.StatusCode.UNAUTHENTICATED):
                    raise ServiceError(f"{self.hub} refused environment {self.name!r}: {trouble}") from None
            except ConfigError as error:  # a file that is being replaced
                if not (self._admitted and is_outage(error)):
                    raise
                trouble = str(error)
            was_attached, self._stream = self._stream is not None, None
            if self._stopping.is_set():
                return
            if was_attached or self._trouble != trouble:
                _log.warning("environment %s is not attached to %s (%s); trying again", self.name, self.hub, trouble)
            self._trouble = trouble
            # random, so that many that lost one hub don't return at once
            tries = 1 if was_attached else tries + 1
            pause = pause_after(tries, _FIRST_PAUSE_S, _LAST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause * random.uniform(0.5, 1.0))

    @contextlib.asynccontextmanager
    async def _dialled(self) -> AsyncIterator[tuple[Any, list[tuple[str, str]]]]:
        """Yield a stub, and the metadata of its calls."""
        options = await asyncio.to_thread(self._options)
        async with rpc.channel(self.hub, security=options, keep_alive=True) as channel:
            yield pb_grpc.RewardServiceStub(channel), [] if options.token is None else [rpc.bearer(options.token())]

    async def _serve(self, stub: Any, metadata: Sequence[tuple[str, str]]) -> None:
        """Work for the hub until the stream ends or the attachment is stopped."""
        stream = _Stream(self._scorer, self._programs, self.name, self._count)
        call = stub.Attach(metadata=metadata)
        writing = asyncio.create_task(_write(call, stream.requests(self._process_id, self._began)))
        reading = asyncio.create_task(self._read(stream, call))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await stream.drain()
                await asyncio.wait([reading], timeout=GRACE_S)
            if reading.done():
                reading.result()
        finally:
            for task in (reading, stopping, writing):
                task.cancel()
            call.cancel()
            stream.close()

    async def _read(self, stream: _Stream, call: Any) -> None:
        try:
            async for event in call:
                stream.receive(event)
                if self._stream is None:
                    self._stream, self._admitted = stream, True
                    _log.info("environment %s is attached to %s", self.name, self.hub)
        except CodecError as error:
            raise ServiceError(
                f"{self.hub} breaks the protocol of the stream ({error}); is it of another release?"
            ) from error

    def _grant(self) -> None:
        if self._stream is not None:
            self._stream.grant()

    def _count(self, statuses: Iterable[trajectory_pb2.Status.ValueType]) -> None:
        for status in statuses:
            self.scored += status == trajectory_pb2.STATUS_SCORED
            self.failed += status not in (trajectory_pb2.STATUS_SCORED, trajectory_pb2.STATUS_NOT_STARTED)


async def _write(call: Any, requests: AsyncIterator[pb.AttachRequest]) -> None:
    # the reader gets the error that ended the stream
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        # the first request states the age of the process, and connecting may take as long as the network is away
        await call.wait_for_connection()
        async for request in requests:
            await call.write(request)
        await call.done_writing()


class _Stream:
    """One stream: work in progress, and a queue of outgoing messages. Only its own event loop calls it."""

    def __init__(
        self,
        scorer: BatchScorer,
        programs: Programs | None,
        name: str,
        count: Callable[[Iterable[trajectory_pb2.Status.ValueType]], None],
    ) -> None:
        self._scorer = scorer
        self._programs = programs
        self._name = name
        self._count = count
        self._workers: dict[pb.WorkKind.ValueType, BatchScorer | Programs] = {}
        if scorer.environment.scores_samples:
            self._workers[pb.WORK_KIND_SCORE] = scorer
        if programs is not None:
            self._workers[pb.WORK_KIND_EPISODE] = programs
        self._flows = {kind: Flow(worker.capacity) for kind, worker in self._workers.items()}
        self._max_message_bytes = 0  # until the hub has reported it
        self._outgoing: asyncio.Queue[pb.AttachRequest | None] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[pb.Answer]] = {}
        self._closed = False

    async def requests(self, process_id: str, began: float) -> AsyncIterator[pb.AttachRequest]:
        """Yield the messages to the hub. `began` is when the process first offered its environment, by the monotonic clock."""
        offers = [
            pb.Offer(
                environment=self._scorer.description,
                capacity=worker.capacity,
                name=self._name,
                kind=kind,
                age_ms=round(1000 * (time.monotonic() - began)),
            )
            for kind, worker in self._workers.items()
        ]
        register = pb.Register(process_id=process_id, offers=offers, max_message_bytes=rpc.MAX_MESSAGE_BYTES)
        yield pb.AttachRequest(register=register)
        while (request := await self._outgoing.get()) is not None:
            yield request

    def receive(self, event: pb.AttachResponse) -> None:
        """Handle a message of the hub. Raises `CodecError` for work beyond the credit."""
        match event.WhichOneof("event"):
            case "registered":
                self._max_message_bytes = event.registered.max_message_bytes
                self.grant()
            case "work":
                work = event.work
                kind, size, doing = self._begin(work)
                if kind not in self._flows:
                    raise CodecError(f"work {work.work_id!r} is of a kind that was not offered")
                self._flows[kind].send(work.work_id, size)
                task = asyncio.create_task(doing(work))
                self._tasks[work.work_id] = task
                task.add_done_callback(functools.partial(self._answer, kind, work.work_id))
            case "cancel":
                withdrawn = self._tasks.get(event.cancel.work_id)
                if withdrawn is not None:
                    withdrawn.cancel()

    def grant(self) -> None:
        """Grant the hub credit for the work that can be started now."""
        for kind, flow in self._flows.items():
            amount = flow.room(self._workers[kind].busy)
            if amount and self._max_message_bytes and not self._closed:
                flow.grant(amount)
                credit = pb.Credit(name=self._name, kind=kind, amount=amount)
                self._outgoing.put_nowait(pb.AttachRequest(credit=credit))

    async def drain(self) -> None:
        """Finish and answer the work in progress, for a limited time, and end the stream."""
        self._outgoing.put_nowait(pb.AttachRequest(drain=pb.Drain()))
        await asyncio.gather(*(worker.drain(GRACE_S) for worker in self._workers.values()))
        if self._tasks:
            await asyncio.wait(self._tasks.values())
            await asyncio.sleep(0)  # lets their callbacks run
        self._outgoing.put_nowait(None)

    def close(self) -> None:
        """Cancel the work in progress: its answers have no receiver any more."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()

    def _begin(
        self, work: pb.Work
    ) -> tuple[pb.WorkKind.ValueType, int, Callable[[pb.Work], Coroutine[Any, Any, pb.Answer]]]:
        """Return the work's kind, its size, and the method that does it."""
        if work.WhichOneof("batch") == "episode":
            return pb.WORK_KIND_EPISODE, 1, self._play
        return pb.WORK_KIND_SCORE, len(work.score.trajectories), self._score

    async def _score(self, work: pb.Work) -> pb.Answer:
        answer = pb.Answer(work_id=work.work_id)
        try:
            samples = [sample_from_wire(trajectory) for trajectory in work.score.trajectories]
        except CodecError as error:
            results = [score_to_wire(Score("INVALID", message=str(error)))] * len(work.score.trajectories)
        else:
            traces = [trajectory.traceparent for trajectory in work.score.trajectories]
            scores = await self._scorer.score(samples, rpc.time_before(work.deadline_ms / 1000, STALL_S), traces)
            results = fit_results([score_to_wire(score) for score in scores], self._max_message_bytes)
        self._count(result.status for result in results)
        answer.score.results.extend(results)
        return answer

    async def _play(self, work: pb.Work) -> pb.Answer:
        assert self._programs is not None
        try:
            episode = episode_from_wire(work.episode.episode, rpc.time_before(work.deadline_ms / 1000))
        except CodecError as error:
            outcome = outcome_to_wire(EpisodeOutcome(Score("INVALID", message=str(error))))
        else:
            with tracing.handed_over(work.episode.episode.traceparent, episode.group_id):
                ended = await self._programs.run(episode)
            outcome = fit_outcome(outcome_to_wire(ended), self._max_message_bytes)
        # an outcome without a result is a success: a grader scores it
        self._count([outcome.result.status if outcome.HasField("result") else trajectory_pb2.STATUS_SCORED])
        answer = pb.Answer(work_id=work.work_id)
        answer.episode.outcome.CopyFrom(outcome)
        return answer

    def _answer(self, kind: pb.WorkKind.ValueType, work_id: str, task: asyncio.Task[pb.Answer]) -> None:
        del self._tasks[work_id]
        if self._closed:
            return
        # an empty answer: withdrawn work has ended
        answer = pb.Answer(work_id=work_id) if task.cancelled() else task.result()
        self._outgoing.put_nowait(pb.AttachRequest(answer=answer))
        self._flows[kind].answer(work_id)
        self.grant()


_current: dict[tuple[str, str], Attachment] = {}


def attach(
    hub: str, environment: Environment, name: str, capacity: int | None, options: Callable[[], DialOptions]
) -> Attachment:
    """Attach `environment`, and replace this process's earlier attachment to the same hub under the same name."""
    if (former := _current.get((hub, name))) is not None:
        former.stop()
    _current[hub, name] = Attachment(hub, environment, name, capacity, options)
    return _current[hub, name]


@atexit.register
def _stop_all() -> None:
    for attached in _current.values():
        attached.stop()


def dial_options(
    hub: str, name: str, *, token: str | None, token_file: str | None, tls_ca: str | None, insecure: bool
) -> Callable[[], DialOptions]:
    """Return a function that gives the options. It is called each time `hub` is dialled: another run may be behind a port of this machine
    by then.

    Raises `ConfigError` for options that don't go together, or that would send a token in plain text to another machine.
    """
    if token is not None and token_file is not None:
        raise ConfigError(f"token and token_file {token_file!r}: give one of them")
    local = target_is_local(hub)
    secured = tls_ca is not None or not (local or insecure)
    if token is None and token_file is None:
        if not (local or insecure):
            raise ConfigError(
                f"hub {hub!r} is on another machine: give token or token_file (`headrace env token {name}` on the run's machine prints it)"
            )
        return (
            functools.partial(_local_options, hub, name, DialOptions(secured, tls_ca))
            if local
            else lambda: DialOptions()
        )
    role = f"environment {name}"
    if token_file is not None:
        return functools.partial(
            DialOptions, secured, tls_ca, functools.partial(Credentials(Path(token_file)).token, role)
        )
    # a whole line of the file, or the token alone
    presented = str(token).strip().removeprefix(f"{role} ")
    return functools.partial(DialOptions, secured, tls_ca, lambda: presented)


def _local_options(hub: str, name: str, otherwise: DialOptions) -> DialOptions:
    """Return the options with the credentials of the run whose hub listens on this port."""
    import yaml  # slow to import, and needed here alone

    from headrace.net.listeners import listener, saved_config

    port = hub.rpartition(":")[2]
    process = listener(int(port)) if port.isdecimal() else None
    saved = None if process is None else saved_config(process)
    if saved is None:
        return otherwise
    try:
        config = yaml.safe_load(saved.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{saved}, the configuration of the run at {hub}, can't be read: {error}") from error
    security = config.get("security") or {}
    if security.get("credentials") is None:
        return otherwise
    if not ((config.get("env") or {}).get(name) or {}).get("attached"):
        raise ConfigError(
            f"the run at {hub} ({saved.parent}) declares no attached environment {name!r}; add env.{name}: {{attached: true}} to its "
            "configuration"
        )
    return DialOptions(
        tls=otherwise.tls or any(security.get(key) is not None for key in ("tls_cert", "tls_ca")),
        tls_ca=otherwise.tls_ca or security.get("tls_ca"),
        token=Credentials(Path(security["credentials"])).make_token_source(f"environment {name}"),
    )
