"""A traced trajectory, from the scorer through the hub to a user's environment, however it is reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import grpc
import msgspec
import pytest
from opentelemetry import baggage, trace

import headrace
from headrace import Environment, Episode, Sample
from headrace.config.telemetry import TelemetryConfig
from headrace.env.server import serving
from headrace.net import tracing
from headrace.net.tracing import SpanContext, group_span
from headrace.replay import EnvironmentLimits, ReplayClient
from headrace.v1 import trajectory_pb2
from headrace_services.agents.program_starter import HubPrograms
from tests.support.buffer import healthy_replica, make_group, make_trajectory
from tests.support.collector import Collector, collecting
from tests.support.raw_environment import Request, raw_environment, scored
from tests.support.reward_hub import WAIT_S, Hub, scoring, start_hub
from tests.support.waiting import eventually

N = 2
pytestmark = pytest.mark.limits(prompts_per_step=2, environments={"told": EnvironmentLimits()})


class Noting(Environment):
    """Notes in which span, and with which baggage, a sample is scored."""

    build = "1"

    def __init__(self) -> None:
        self.noted: list[tuple[Sample | Episode, SpanContext, object]] = []

    def note(self, sample: Sample | Episode) -> float:
        span = trace.get_current_span().get_span_context()
        self.noted.append((sample, SpanContext(span.trace_id, span.span_id), baggage.get_baggage("headrace.group_id")))
        return 1.0


class InThread(Noting):
    def score(self, sample: Sample) -> float:
        return self.note(sample)


class InLoop(Noting):
    async def score(self, sample: Sample) -> float:
        return self.note(sample)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch, run_id: str) -> Iterator[Collector]:
    with collecting() as found:
        for name, value in found.variables.items():
            monkeypatch.setenv(name, value)
        with tracing.exporting(TelemetryConfig(), "replay", run_id):
            yield found


async def push(replay: ReplayClient) -> list[str]:
    groups = [msgspec.structs.replace(make_group(order, n=N), env_name="told") for order in range(2)]
    await replay.enqueue(groups, (await replay.state()).timeline)
    replica = await healthy_replica(replay)
    for lease in await replay.lease(replica, len(groups)):
        for index in range(N):
            await replay.push(lease, make_trajectory(lease, index))
    return [group.id for group in groups]


def scored_spans(collector: Collector, name: str) -> int:
    return sum(span["status"] == "SCORED" for span in collector.named(name))


async def check(collector: Collector, replay: ReplayClient, environment: Noting) -> None:
    groups = await push(replay)
    # a trajectory that came before its environment did is tried again
    await eventually(lambda: scored_spans(collector, "score") == scored_spans(collector, "environment") == 4)
    by_id = {span.id: span for span in collector.spans}
    assert len(environment.noted) == 4
    for sample, at, group in environment.noted:
        of_environment = by_id[at]
        assert of_environment.parent is not None
        scored = by_id[of_environment.parent]
        assert (of_environment.name, scored.name) == ("environment", "score")
        assert (scored["group_id"], scored["index"], scored["status"]) == (sample.group_id, sample.index, "SCORED")
        assert scored.parent == group_span(replay.run_id, sample.group_id)
        assert group == sample.group_id
    assert {sample.group_id for sample, *_ in environment.noted} == set(groups)


@pytest.mark.parametrize("kind", [InThread, InLoop])
async def test_a_served_environment_continues_the_trace(
    collector: Collector, replay: ReplayClient, kind: type[Noting]
) -> None:
    environment = kind()
    async with (
        serving(environment) as port,
        start_hub({"told": {"target": f"127.0.0.1:{port}"}}) as hub,
        scoring(replay, hub.port),
    ):
        await check(collector, replay, environment)


async def test_an_attached_environment_continues_the_trace(collector: Collector, replay: ReplayClient) -> None:
    environment = InLoop()
    async with start_hub({"told": {"attached": True}}) as hub, scoring(replay, hub.port):
        attached = await asyncio.to_thread(headrace.attach, f"127.0.0.1:{hub.port}", environment, "told", wait=False)
        try:
            await check(collector, replay, environment)
        finally:
            await asyncio.to_thread(attached.stop)


async def test_the_metadata_of_a_call_has_the_context_for_any_language(
    collector: Collector, replay: ReplayClient
) -> None:
    met: list[tuple[dict[str, str], list[str], list[str]]] = []

    async def answer(request: Request, context: grpc.aio.ServicerContext) -> list[trajectory_pb2.Result]:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        met.append(
            (
                metadata,
                *([getattr(each, name) for each in request.trajectories] for name in ("traceparent", "group_id")),
            )
        )
        return [scored(1.0) for _ in request.trajectories]

    async with (
        raw_environment(answer) as target,
        start_hub({"told": {"target": target}}) as hub,
        scoring(replay, hub.port),
    ):
        await push(replay)
        await eventually(lambda: len(collector.named("environment")) == 4)
    places = {span.id for span in collector.named("environment")}
    assert {SpanContext.parse(traceparent) for _, traces, _ in met for traceparent in traces} == places
    for metadata, traces, groups in met:
        assert metadata["traceparent"] == traces[0]
        assert metadata["baggage"] == ",".join(f"headrace.group_id={group}" for group in dict.fromkeys(groups))


async def test_a_program_continues_the_trace_of_its_episode(collector: Collector) -> None:
    class Player(Noting):
        async def episode(self, e: Episode) -> float:
            return self.note(e)

    player, root = Player(), group_span("run", "g")
    async with serving(player) as port, start_hub({"told": {"target": f"127.0.0.1:{port}", "episodes": True}}) as hub:
        await eventually(lambda: is_ready(hub))
        with tracing.span("episode", root):
            played = Episode(
                "http://127.0.0.1:1/v1", "key", (), deadline=time.monotonic() + WAIT_S, environment="told", group_id="g"
            )
            outcome = await HubPrograms([hub.channel]).run(played)
        assert outcome.score is not None
        assert outcome.score.status == "SCORED", outcome.score
        await eventually(lambda: len(collector.spans) == 2)
    of_environment, episode = collector.spans
    assert [(at, group) for _, at, group in player.noted] == [(of_environment.id, "g")]
    assert (of_environment.name, of_environment.parent) == ("environment", episode.id)
    assert (episode.name, episode.parent) == ("episode", root)


async def is_ready(hub: Hub) -> bool:
    return bool((await hub.environments())["told"].ready)
