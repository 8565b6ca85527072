"""A gateway with an open episode, served over HTTP, whose replicas are toys: no buffer, no engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
import openai

from headrace.base.errors import HeadraceError
from headrace.config import Config
from headrace.net.http_access import HttpAccess
from headrace.net.replica_client import RenderRefused, ReplicaUnavailable, Sampled, SampleRequest
from headrace.net.service import bind, serve_openly
from headrace.records.trajectory import Call, Message, Sampling
from headrace.replay import Lease, Replica
from headrace_services.agents import metrics
from headrace_services.agents.fleet import Fleet, RunClock
from headrace_services.agents.gateway import Gateway, build_app
from headrace_services.agents.main import forwarding
from headrace_services.agents.running_episode import Keep, OpenEpisode
from headrace_services.agents.session import Clocks, SessionLimits
from tests.support.buffer import make_group
from tests.support.toy_policy import END, ToyPolicy
from tests.support.toy_sessions import CLOCKS, LIMITS, user
from tests.support.waiting import eventually

TIMELINE = "now"
HI: Any = [user("hi")]


def plain() -> dict[str, Any]:
    """For a client of `openai`, whose address has no TLS: else it reads the certificates of all authorities, for 20 ms of a core."""
    return {"http_client": openai.DefaultAsyncHttpxClient(verify=False)}


def lease(n: int = 1) -> Lease:
    group = make_group(
        0,
        n=n,
        group_id="group-1",
        env_name="talk",
        messages=({"role": "user", "content": "hi"},),
        prompt_token_ids=np.asarray([1], np.int32),
        sampling=Sampling(temperature=1.0, max_new_tokens=64, stop_token_ids=(END,), bad_words=("@",)),
    )
    return Lease(group, "token", 0, 0, 3, TIMELINE, "incarnation", 60.0, n, tuple(range(n)))


class ToyReplica:
    """`before` is called before each sampling, and may wait or raise."""

    def __init__(self, policy: ToyPolicy) -> None:
        self.policy = policy
        self.before: Callable[[SampleRequest], Any] = lambda request: asyncio.sleep(0)
        self.sampling = 0
        self.is_closed = False

    async def sample(self, request: SampleRequest) -> Sampled:
        self.sampling += 1
        try:
            await self.before(request)
        finally:
            self.sampling -= 1
        sampled = self.policy.sample(request)
        return msgspec.structs.replace(sampled, message=self.policy.derender(sampled, request.tools or ()))

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        if any(message["role"] not in ("system", "user", "assistant", "tool") for message in messages):
            raise RenderRefused("invalid", "the template knows no such role")
        return self.policy.render(messages, tools or (), answered=not add_generation_prompt)

    async def aclose(self) -> None:
        self.is_closed = True


def replica(name: str, state: Any = "HEALTHY", version: int = 3, timeline: str = TIMELINE) -> Replica:
    return Replica(name, state, version, timeline, {"url": name}, 0, 0.0)


@dataclasses.dataclass
class Open:
    """An open episode, and how programs reach it. `kept` are the calls that were kept, in order, and the `timelines` that wrote them."""

    episode: OpenEpisode
    gateway: Gateway
    fleet: Fleet
    replicas: dict[str, ToyReplica]
    address: str
    key: str
    kept: list[Call]
    timelines: list[str]
    opens: Callable[[Keep], OpenEpisode]
    fail_to_keep: HeadraceError | None = None
    may_keep: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"{self.address}/s/{self.key}/v1"

    @contextlib.asynccontextmanager
    async def beside(self) -> AsyncIterator[Open]:
        """Another episode of the same gateway."""
        kept: list[Call] = []

        async def keep(number: int, nonce: str, call: Call, timeline: str) -> None:
            kept.append(call)

        episode = self.opens(keep)
        key = self.gateway.open(episode)
        try:
            yield dataclasses.replace(self, episode=episode, key=key, kept=kept)
        finally:
            self.gateway.close(key)
            await episode.end()

    @contextlib.asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        given: dict[str, Any] = {"base_url": self.url, "api_key": "none", "max_retries": 0, "timeout": 60.0}
        if "http_client" not in options:
            given |= plain()
        async with openai.AsyncOpenAI(**(given | options)) as client:
            yield client

    @contextlib.asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=self.url, timeout=60.0, verify=False) as client:
            yield client


@contextlib.asynccontextmanager
async def open_episode(
    policy: ToyPolicy | None = None,
    *,
    replicas: int = 1,
    limits: SessionLimits = LIMITS,
    clocks: Clocks = CLOCKS,
    clock: Callable[[], float] | None = None,
    config: Config | None = None,
    **bounds: Any,
) -> AsyncIterator[Open]:
    """`config` says where the gateway listens, with which certificate, and how it asks others."""
    config = config or Config()
    toys = {
        f"replica-{number + 1}": ToyReplica(
            dataclasses.replace(policy or ToyPolicy(), replica=f"replica-{number + 1}", asked=[])
        )
        for number in range(replicas)
    }
    fleet = Fleet(lambda url: toys[url], RunClock() if clock is None else RunClock(clock))
    fleet.note(map(replica, toys))
    opened: Open

    async def keep(number: int, nonce: str, call: Call, timeline: str) -> None:
        await opened.may_keep.wait()
        for _ in range(number * 7 % 5):  # some take longer than those that began after them
            await asyncio.sleep(0)
        if opened.fail_to_keep is not None:
            raise opened.fail_to_keep
        assert number == len(opened.kept)
        opened.kept.append(call)
        opened.timelines.append(timeline)

    def opens(keep: Keep) -> OpenEpisode:
        return OpenEpisode("group-1[0]", lease(), 0, fleet, keep, limits, clocks, "42 group-1 0")

    episode = opens(keep)
    given = {"max_request_bytes": 10_000, "max_parallel_calls": 64, "max_requests_per_s": 1000.0}
    gateway = Gateway("policy", **(given | bounds))
    key = gateway.open(episode)
    certificate = HttpAccess.of(config, config.agents.host).certificate
    with contextlib.closing(bind(config.agents.host, 0, "agents.port")) as sock:
        app = build_app(gateway, forward := forwarding(config, certificate))
        async with forward, serve_openly(app, sock, certificate):
            scheme = "http" if certificate is None else "https"
            address = f"{scheme}://{config.agents.host}:{sock.getsockname()[1]}"
            opened = Open(episode, gateway, fleet, toys, address, key, [], [], opens)
            opened.may_keep.set()
            try:
                yield opened
            finally:
                await episode.end()


def unavailable(times: int) -> Callable[[SampleRequest], Any]:
    """A replica that is lost in the middle of its first `times` calls."""
    left = [times]

    async def before(request: SampleRequest) -> None:
        if left[0]:
            left[0] -= 1
            raise ReplicaUnavailable("it is gone")

    return before


async def ask(client: openai.AsyncOpenAI, messages: Any = HI, **options: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=messages, **options)


async def ask_and_go(opened: Open, client: httpx.AsyncClient) -> None:
    """Ask, and close the connection before there is an answer."""
    asking = asyncio.create_task(client.post("/chat/completions", json={"messages": HI}))
    calls = opened.episode.session.calls
    await eventually(lambda: [call.readers for call in calls] == [1])
    asking.cancel()
    await asyncio.wait([asking])
    await eventually(lambda: calls[0].readers == 0)


def gate(opened: Open) -> asyncio.Event:
    """What every sampling waits for from now on."""
    event = asyncio.Event()
    for toy in opened.replicas.values():
        toy.before = lambda request: event.wait()
    return event


def elsewhere(reason: str) -> float:
    """How often a replica did not do its part of a call."""
    return metrics.ASKED_ELSEWHERE.labels(reason)._value.get()


async def renders_anything(*_: Any, **__: Any) -> list[int]:
    """What a replica's `render` may be, to make large conversations cheap."""
    return [1]
