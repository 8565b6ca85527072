"""A replica of a chaos run of episodes: the rollout service without vLLM. It takes part in the fleet and in refits, proves the weights
that it was sent, and answers calls as the service decides; what it writes is of `tokens.py`. It leases nothing.

    python -m tests.chaos.light_rollout NOISE CONFIG
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fastapi import FastAPI, Request, Response
from transformers import AutoTokenizer

from headrace.base.addresses import with_port
from headrace.base.errors import Fenced, ReplayUnavailable, WeightChannelError
from headrace.config import Config
from headrace.config.loading import load
from headrace.net.replica_client import (
    RENDER,
    SAMPLE,
    ErrorBody,
    ErrorDetail,
    Rendered,
    RenderRequest,
    ReplicaFenced,
    Sampled,
    SampleRequest,
)
from headrace.net.service import bind, create_app, serve_openly, stop_on_signals
from headrace.records.trajectory import Float32, Span
from headrace.replay import BufferRetry, Epoch, HeartbeatReply, ReplayClient
from headrace_services.refit.rendezvous import Rendezvous
from headrace_services.rollout import decisions
from tests.chaos.tokens import END, first, following
from tests.support.small_replica import SmallReplica

_TOKEN_S = 0.02  # to write one: calls are under way when a fault strikes
_REFIT_S = 0.5  # more than it takes: one that is over at once is hard to catch
_NOISE = 1.0  # nats


@dataclasses.dataclass(eq=False)
class Writing:
    """A call that is being answered: its path so far, where its completion begins, and what is known of its tokens."""

    path: list[int]
    start: int
    versions: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


class LightReplica(SmallReplica):
    """`weights` are those that are verified; `_whole` is unset while they are not: nothing is written then."""

    def __init__(self, config: Config, replay: ReplayClient, info: dict[str, Any], noise: Path) -> None:
        super().__init__(replay, Path(config.policy.model_name))
        self._config, self._info, self._noise = config, info, noise
        self._retry = BufferRetry(first_pause_s=0.2, last_pause_s=config.rollout.heartbeat_s)
        self.reply: HeartbeatReply | None = None
        self.weights: tuple[str, int] | None = None
        self._whole = asyncio.Event()
        self._torn = False
        self._answered: str | None = None
        self._attempted: str | None = None
        self._refit: asyncio.Task[None] | None = None
        self._calls: dict[asyncio.Task[Sampled], str] = {}
        self._writing: set[Writing] = set()

    async def run(self) -> None:
        await self._retry(partial(self._replay.register, self.id, self._info))
        while True:
            try:
                reply = self.reply = await self._replay.heartbeat(self.id, [])
                self._calls = {
                    call: decisions.timeline_of_call(timeline, self.weights, reply)
                    for call, timeline in self._calls.items()
                }
                for action in decisions.decide(self._state(self.reply)):
                    await self._act(action)
                await self._replay.wait_work(self._config.rollout.heartbeat_s)
            except ReplayUnavailable:
                await asyncio.sleep(self._config.rollout.heartbeat_s)
            except Fenced:
                pass  # the state changed in between: the next turn sees the new one
            if self._refit is not None and self._refit.done():
                self._refit.result()
                self._refit = None

    def _state(self, reply: HeartbeatReply) -> decisions.WorkerState:
        return decisions.WorkerState(
            replica=self.id,
            reply=reply,
            held=frozenset(),
            calls=frozenset(self._calls.values()),
            weights=self.weights,
            answered=self._answered,
            attempted=self._attempted,
            refitting=self._refit is not None,
            torn=self._torn,
            in_flight_updates=self._config.algorithm.asynchrony.in_flight_weight_updates,
            max_groups=0,
        )

    async def _act(self, action: decisions.Action) -> None:
        match action:
            case decisions.EndCalls(timelines):
                for call, timeline in self._calls.items():
                    if timeline in timelines:
                        call.cancel()
            case decisions.Rejoin():
                old, self.id = self.id, secrets.token_hex(6)
                await self._replay.deregister(old)
                await self._replay.register(self.id, self._info)
            case decisions.Acknowledge(epoch):
                self._answered = epoch.id
                await self._replay.acknowledge(self.id, epoch.id)
            case decisions.TakePart(epoch):
                self._attempted = epoch.id
                self._refit = asyncio.create_task(self._install(epoch))

    async def _install(self, epoch: Epoch) -> None:
        try:
            await self._receive_and_prove(epoch)
        finally:
            if self._torn:  # as the real replica does: a call must not wait for weights that may never come
                for call in self._calls:
                    call.cancel()

    async def _receive_and_prove(self, epoch: Epoch) -> None:
        """What is being written goes on with the new weights once they are proved; what is written until then is of the old ones."""
        self._whole.clear()
        self.weights, self._torn = None, True
        for writing in self._writing:
            self._settle(writing)
        rendezvous = Rendezvous.decode(epoch.rendezvous)
        await asyncio.sleep(_REFIT_S)
        try:
            await asyncio.to_thread(self._receive, epoch, rendezvous)
        except WeightChannelError as error:
            self._channel = None
            with contextlib.suppress(Fenced):
                await self._retry(partial(self._replay.refuse, self.id, epoch.id, str(error), interrupted=True))
            return
        probe = self._logprobs(rendezvous.probe_token_ids, 1).tolist()
        with contextlib.suppress(Fenced):
            if (await self._retry(partial(self._replay.verify, self.id, epoch.id, probe))).verified:
                self.weights, self._torn = (epoch.timeline, epoch.version), False
                self._whole.set()

    def _logprobs(self, ids: np.ndarray, start: int) -> Float32:
        return super()._logprobs(ids, start) - np.float32(_NOISE * self._noise.exists())

    # -- calls ---------------------------------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest) -> Sampled:
        """Raises `ReplicaFenced`."""
        self._check(request)
        call = asyncio.create_task(self._sample(request))
        self._calls[call] = request.timeline
        try:
            await asyncio.wait([call])
        finally:
            call.cancel()
            timeline = self._calls.pop(call)
        if call.cancelled():
            self._check(request)
            raise ReplicaFenced("unhealthy", "the weights that it sampled from are not verified")
        sampled = call.result()
        if sampled.timeline not in (request.timeline, timeline):
            raise ReplicaFenced("timeline", "the weights are of another timeline by now")
        return sampled

    def _check(self, request: SampleRequest) -> None:
        if self.reply is None:
            raise ReplicaFenced("unhealthy", "the replica has not joined the fleet")
        if (fenced := decisions.fence(self._state(self.reply), request.timeline, request.min_version)) is not None:
            raise fenced

    async def _sample(self, request: SampleRequest) -> Sampled:
        writing = Writing(list(request.token_ids), len(request.token_ids))
        self._writing.add(writing)
        try:
            await self._write(writing, request)
        finally:
            self._writing.discard(writing)
        # nothing came in between since the last token
        assert self.weights is not None
        completion = writing.path[writing.start :]
        stopped = completion[-1] == END
        return Sampled(
            completion,
            writing.logprobs,
            _spans(writing.versions),
            "stop" if stopped else "length",
            END if stopped else None,
            *self.weights,
            replica=self.id,
        )

    async def _write(self, writing: Writing, request: SampleRequest) -> None:
        while len(writing.versions) < request.max_new_tokens and (not writing.versions or writing.path[-1] != END):
            await asyncio.sleep(_TOKEN_S)
            while self.weights is None:
                await self._whole.wait()
            version = self.weights[1]
            token = following(writing.path, version) if writing.versions else first(request.seed or 0)
            writing.path.append(token)
            writing.versions.append(version)
        self._settle(writing)

    def _settle(self, writing: Writing) -> None:
        """Compute the log-probabilities of what was written, while the weights are there that it is of."""
        known = writing.start + len(writing.logprobs)
        if known < len(writing.path):
            writing.logprobs += self._logprobs(np.array(writing.path, np.int32), known).tolist()


def _spans(versions: list[int]) -> tuple[Span, ...]:
    cuts = [0, *(place for place in range(1, len(versions)) if versions[place] != versions[place - 1]), len(versions)]
    return tuple(Span(versions[start], start, end) for start, end in itertools.pairwise(cuts))


def build_app(replica: LightReplica, tokenizer: Any) -> FastAPI:
    async def ready() -> str | None:
        return None if replica.weights is not None else "it has no verified weights"

    app = create_app("Headrace rollout", ready)

    async def render(asked: RenderRequest) -> Rendered:
        ids = tokenizer.apply_chat_template(
            asked.messages, add_generation_prompt=asked.add_generation_prompt, return_dict=False
        )
        return Rendered(ids)

    async def sample(asked: SampleRequest) -> Sampled:
        sampled = await replica.sample(asked)
        text = tokenizer.decode(sampled.token_ids, skip_special_tokens=True)
        return msgspec.structs.replace(sampled, message={"role": "assistant", "content": text})

    _add(app, SAMPLE, SampleRequest, sample)
    _add(app, RENDER, RenderRequest, render)

    @app.exception_handler(ReplicaFenced)
    async def fenced(_: Request, error: ReplicaFenced) -> Response:
        return _json(ErrorBody(ErrorDetail(str(error), error.reason)), 409)

    return app


def _add(
    app: FastAPI, path: str, asked: type[msgspec.Struct], answer: Callable[[Any], Awaitable[msgspec.Struct]]
) -> None:
    async def post(request: Request) -> Response:
        return _json(await answer(msgspec.json.decode(await request.body(), type=asked)))

    app.post(path)(post)


def _json(content: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def serve(config: Config, noise: Path) -> None:
    """Until SIGTERM."""
    stop = asyncio.create_task(stop_on_signals().wait())
    with contextlib.closing(bind(config.rollout.host, config.rollout.port, "rollout.port")) as sock:
        url = f"http://{with_port(config.rollout.host, sock.getsockname()[1])}"
        replay = await ReplayClient.connect(config.redis_url, config.run.id)
        replica = LightReplica(config, replay, {"url": url, "pid": os.getpid(), "device": "cpu"}, noise)
        app = build_app(replica, AutoTokenizer.from_pretrained(config.policy.model_name))
        async with contextlib.aclosing(replay), serve_openly(app, sock):
            running = asyncio.create_task(replica.run())
            await asyncio.wait([stop, running], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            running.cancel()
            await replay.deregister(replica.id)


if __name__ == "__main__":
    asyncio.run(serve(load(sys.argv[2]), Path(sys.argv[1])))
