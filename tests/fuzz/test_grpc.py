"""Malformed messages to every method of both gRPC services: a status that says whose fault it is, and the server lives."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from headrace import Environment, Episode, Sample
from headrace.base.errors import CodecError
from headrace.env.server import serving
from headrace.env.wire import episode_from_wire, episode_to_wire, sample_from_wire, sample_to_wire
from headrace.net import rpc
from headrace.v1 import environment_pb2, episode_pb2, reward_pb2, trajectory_pb2
from tests.support.mutation import Mutator
from tests.support.reward_hub import WAIT_S, start_hub

SAMPLES = [
    Sample(
        "132",
        {"answer": "132"},
        environment="math",
        group_id="e0-train-0",
        messages=({"role": "user", "content": "5+127"},),
    ),
    Sample(
        "131", {"answer": "132", "tags": ["a", {"b": 1}]}, environment="math", completion_token_ids=(1, 2, 3), index=1
    ),
]
TRAJECTORIES = [sample_to_wire(sample) for sample in SAMPLES]
EPISODE = episode_to_wire(
    Episode(
        "http://127.0.0.1:1/s/key/v1",
        "key",
        ({"role": "user", "content": "5+127"},),
        {"board": [1, {"b": 2}]},
        environment="mine",
        group_id="e0-train-0",
    )
)
# Texts that are no JSON object, or a strange one.
JSON = [
    "[]",
    "1",
    "null",
    "{",
    '{"a": NaN}',
    '{"a": Infinity}',
    '{"a": 1, "a": 2}',
    '{"a": "\\ud800"}',
    '{"a": ' + "9" * 5000 + "}",
    "[" * 100_000,
    '{"a":' * 5000 + "1" + "}" * 5000,
    '{"answer": 1e999}',
    "\x00",
    "x" * 1_000_000,
    '{"answer": {"answer": []}}',
]
# Statuses that blame the caller. UNKNOWN and INTERNAL would blame the server, and UNAVAILABLE say that it is gone.
BLAME_THE_CALLER = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
LARGEST = 2 * 1024**2
OFFER = reward_pb2.Offer(
    environment=environment_pb2.DescribeResponse(name="Mine"), capacity=4, name="mine", kind=reward_pb2.WORK_KIND_SCORE
)
REGISTER = reward_pb2.AttachRequest(register=reward_pb2.Register(process_id="a", offers=[OFFER]))
AT_ONCE = 20
# More: a round takes a second, in which work waits for somebody who has room.
STREAMS_AT_ONCE = 500


class Exact(Environment):
    def score(self, sample: Sample) -> float:
        return float(sample.completion == sample.extra_env_info.get("answer"))

    async def episode(self, e: Episode) -> float:
        return float(len(e.messages))


@contextlib.asynccontextmanager
async def environment() -> AsyncIterator[tuple[int, Any]]:
    async with serving(Exact()) as port:
        yield port, environment_pb2


@contextlib.asynccontextmanager
async def hub() -> AsyncIterator[tuple[int, Any]]:
    env = {"math": {}, "mine": {"attached": True}}
    async with start_hub(env, max_message_bytes=LARGEST, workers=1) as running:
        yield running.port, reward_pb2


def messages_of(service: Any) -> dict[str, tuple[Any, bool]]:
    """A good request of each method, and whether it is a stream."""
    if service is environment_pb2:
        return {
            "Describe": (environment_pb2.DescribeRequest(), False),
            "Score": (environment_pb2.EnvironmentServiceScoreRequest(trajectories=TRAJECTORIES), False),
            "RunEpisode": (environment_pb2.EnvironmentServiceRunEpisodeRequest(episode=EPISODE), False),
        }
    return {
        "Score": (reward_pb2.ScoreRequest(trajectories=TRAJECTORIES), False),
        "RunEpisode": (reward_pb2.RunEpisodeRequest(episode=EPISODE), False),
        "Attach": (REGISTER, True),
        "ListEnvironments": (reward_pb2.ListEnvironmentsRequest(), False),
    }


def malformed(good: Any, mutator: Mutator) -> bytes:
    """A request that differs from a good one in a few fields or bytes."""
    random = mutator.random
    if not good.ByteSize() or random.random() < 0.4:
        return mutator.bytes(good.SerializeToString())
    request = type(good)()
    request.CopyFrom(good)
    if good.DESCRIPTOR.name.endswith("RunEpisodeRequest"):
        _spoil_episode(request.episode, mutator)
        return bytes(request.SerializeToString())
    trajectories = getattr(request, "trajectories", None) or [turn.trajectory for turn in getattr(request, "turns", ())]
    for trajectory in trajectories:
        if random.random() < 0.7:
            _spoil(trajectory, mutator)
    if trajectories and random.random() < 0.1:
        request.MergeFrom(good)
    return bytes(request.SerializeToString())


def _spoil(trajectory: Any, mutator: Mutator) -> None:
    random = mutator.random
    text = random.choice([*JSON, json.dumps(mutator.structure({"answer": "132", "tags": ["a"]}), default=repr)])
    match random.choice(["extra_env_info_json", "extra_json", "text", "finish_reason", "index", "ids", "messages"]):
        case "extra_env_info_json":
            trajectory.extra_env_info_json = text
        case "extra_json":
            trajectory.messages.add(role="user", extra_json=text)
        case "text":
            name = random.choice(["group_id", "environment", "task_name", "completion", "idempotency_key"])
            setattr(
                trajectory, name, random.choice(["", "\0", "é\u2028", "x" * 1_000_000, "math ", "../math", "\n" * 3000])
            )
        case "finish_reason":
            trajectory.finish_reason = random.choice([0, 3, 99, -1])
        case "index":
            trajectory.index = random.choice([0, 2**32 - 1])
        case "ids":
            trajectory.completion_token_ids.extend(random.choice([[-1], [2**31 - 1] * 5, [0] * 100_000]))
        case _:
            trajectory.messages.extend([trajectory_pb2.ChatMessage()] * random.choice([1, 3000]))


def _spoil_episode(episode: episode_pb2.Episode, mutator: Mutator) -> None:
    random = mutator.random
    match random.choice(["json", "text", "deadline_ms", "base_url", "messages"]):
        case "json":
            episode.public_json = random.choice(JSON)
        case "text":
            name = random.choice(["group_id", "environment", "task_name", "api_key", "idempotency_key"])
            setattr(episode, name, random.choice(["", "\0", "é\u2028", "x" * 1_000_000, "\r\nhost: a"]))
        case "deadline_ms":
            episode.deadline_ms = random.choice([0, 1, 2**32 - 1])
        case "base_url":
            episode.base_url = random.choice(["", "file:///etc/passwd", "http://", "http://[", "x" * 1_000_000])
        case _:
            episode.messages.add(role="user", extra_json=random.choice(JSON))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_what_is_no_json_number_is_refused(number: str) -> None:
    request = environment_pb2.EnvironmentServiceScoreRequest(trajectories=TRAJECTORIES[:1])
    request.trajectories[0].extra_env_info_json = f'{{"answer": {number}}}'
    async with environment() as (port, _), rpc.channel(f"127.0.0.1:{port}") as channel:
        code = await _send(channel, "/headrace.v1.EnvironmentService/Score", request.SerializeToString(), stream=False)
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_long_name_is_shortened_in_the_reason() -> None:
    """Past what a header holds, gRPC would drop the status with it."""
    request = environment_pb2.EnvironmentServiceScoreRequest(
        trajectories=[trajectory_pb2.Trajectory(group_id="\U0001f600" * 100_000)]
    )
    async with environment() as (port, _), rpc.channel(f"127.0.0.1:{port}") as channel:
        code = await _send(channel, "/headrace.v1.EnvironmentService/Score", request.SerializeToString(), stream=False)
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.timeout(0)  # as long as so many messages take
@pytest.mark.parametrize("serve", [environment, hub], ids=["EnvironmentService", "RewardService"])
async def test_malformed_messages(serve: Any, messages: int, session_seed: int) -> None:
    mutator = Mutator(Random(session_seed))
    async with serve() as (port, service), rpc.channel(f"127.0.0.1:{port}") as channel:
        (described,) = service.DESCRIPTOR.services_by_name.values()
        assert {method.name for method in described.methods} == messages_of(service).keys()
        for name, (good, stream) in messages_of(service).items():
            method = f"/{described.full_name}/{name}"
            wellformed = _answered(await _send(channel, method, good.SerializeToString(), stream=stream))
            for _ in range(0, messages, AT_ONCE):
                sent = [malformed(good, mutator) for _ in range(AT_ONCE)]
                codes = await asyncio.gather(*(_send(channel, method, data, stream=stream) for data in sent))
                for data, code in zip(sent, codes, strict=True):
                    said = f"{method} answered {code} to {data[:2000]!r} ({len(data)} bytes)"
                    replaced = stream and code is grpc.StatusCode.UNAVAILABLE  # by the next stream of the same process
                    assert code is grpc.StatusCode.OK or code in BLAME_THE_CALLER or replaced, said
                    if name in ("Score", "RunEpisode") and len(data) < LARGEST and not _decodes(type(good), data):
                        assert code is grpc.StatusCode.INVALID_ARGUMENT, said
            assert _answered(await _send(channel, method, good.SerializeToString(), stream=stream)) == wellformed


@pytest.mark.timeout(0)
async def test_malformed_streams(messages: int, session_seed: int) -> None:
    """After a good beginning: each stream ends with a reason, and what it was sent with an answer that no stream made up."""
    mutator = Mutator(Random(session_seed))
    credit = reward_pb2.Credit(name="mine", kind=reward_pb2.WORK_KIND_SCORE, amount=2)
    result = trajectory_pb2.Result(status=trajectory_pb2.STATUS_SCORED, reward=1)
    score = environment_pb2.EnvironmentServiceScoreResponse(results=[result])
    events = [
        reward_pb2.AttachRequest(credit=credit),
        reward_pb2.AttachRequest(answer=reward_pb2.Answer(work_id="0123456789abcdef", score=score)),
        reward_pb2.AttachRequest(drain=reward_pb2.Drain()),
    ]
    sample = Sample("132", environment="mine")
    together = min(messages, STREAMS_AT_ONCE)
    async with start_hub({"mine": {"attached": True}}, max_message_bytes=LARGEST) as running:
        for _ in range(0, messages, together):
            streams = []
            for _ in range(together):
                chosen = mutator.random.choices(events, k=mutator.random.randint(1, 4))
                rest = [event.SerializeToString() for event in chosen]
                rest[-1] = mutator.bytes(rest[-1])
                streams.append([REGISTER.SerializeToString(), *rest])
            method = "/headrace.v1.RewardService/Attach"
            sending = [_send(running.channel, method, *stream, stream=True) for stream in streams]
            scores, *codes = await asyncio.gather(running.score([sample] * 4), *sending)
            assert {found.status for found in scores} <= {"NOT_STARTED", "INTERRUPTED"}
            for sent, code in zip(streams, codes, strict=True):
                # a stream takes the place of the former one of its process
                fine = code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                assert fine or code in BLAME_THE_CALLER, f"{code} to {sent!r:.2000}"
        assert not (await running.environments())["mine"].ready


def _decodes(kind: Any, data: bytes) -> bool:
    try:
        request = kind.FromString(data)
        if "episode" in kind.DESCRIPTOR.fields_by_name:
            episode_from_wire(request.episode)
        else:
            for trajectory in request.trajectories:
                sample_from_wire(trajectory)
    except (CodecError, DecodeError):
        return False
    return True


def _answered(code: grpc.StatusCode) -> bool:
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED), code
    return code is grpc.StatusCode.OK


async def _send(channel: grpc.aio.Channel, method: str, *data: bytes, stream: bool) -> grpc.StatusCode:
    """The status of a call with these bytes as they stand."""
    try:
        if stream:
            async for _ in channel.stream_stream(method)(iter(data), timeout=WAIT_S):
                pass
        else:
            await channel.unary_unary(method)(*data, timeout=WAIT_S)
    except grpc.aio.AioRpcError as error:
        # what gRPC says on this side of a stream that the server ended while it was written to
        cut_off = stream and error.details() == "Internal error from Core"
        return grpc.StatusCode.CANCELLED if cut_off else error.code()
    return grpc.StatusCode.OK
