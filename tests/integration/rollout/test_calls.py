"""The calls of episodes on a replica as a process, as its client makes them. The tests follow one replica, which is refitted in flight,
through its life."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from headrace.net.credentials import Credentials
from headrace.net.replica_client import (
    PATHS,
    RenderRefused,
    ReplicaClient,
    ReplicaFenced,
    ReplicaUnavailable,
    Sampled,
    SampleRequest,
)
from tests.support.mutation import Mutator
from tests.support.paced_engine import LONG
from tests.support.rollout_fleet import CONTEXT, IN_FLIGHT, Fleet, Process, running_fleet
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

TOOL = {"type": "function", "function": {"name": "calculate", "description": "", "parameters": {"type": "object"}}}
TOKENS = "operator boss\nreader eye\nagents runner\n"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(redis_url: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("calls")
    (folder / "credentials").write_text(TOKENS)
    (folder / "credentials").chmod(0o600)
    settings = {
        "security": {"credentials": str(folder / "credentials")},
        "policy": {"generation": {"vllm_cfg": {"tool_parser": "hermes", "max_num_seqs": 1}}},
    }
    async with running_fleet(folder, redis_url, model, settings) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(fleet: Fleet) -> Process:
    process = await fleet.start(**IN_FLIGHT)
    process.http.headers.update(bearer("boss"))
    return process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: Fleet, replica: Process) -> AsyncIterator[ReplicaClient]:
    token = Credentials(fleet.folder / "credentials").make_token_source("agents")
    client = ReplicaClient(str(replica.http.base_url), token)
    yield client
    await client.aclose()


PROMPT = (1, 68, 69, 70, 3, 20, 30)


def request(**changes: Any) -> SampleRequest:
    fields = {"token_ids": PROMPT, "max_new_tokens": 32, "timeline": "timeline-0", "min_version": 0}
    return SampleRequest(**{**fields, **changes})


def long(**changes: Any) -> SampleRequest:
    """It takes seconds: the likeliest token is never the last."""
    return request(temperature=0.0, max_new_tokens=LONG, **changes)


def difference(fleet: Fleet, asked: SampleRequest, it: Sampled) -> float:
    """Largest |log-probability difference| to transformers, under the weights that the spans name."""
    ids, start = np.array([*asked.token_ids, *it.token_ids]), len(asked.token_ids) - 1
    truth = [fleet.policy.logprobs_of(ids, version)[start + begin : start + end] for version, begin, end in it.spans]
    return float(np.abs(np.concatenate(truth) - it.logprobs).max())


async def sampling(client: ReplicaClient, replica: Process, asked: SampleRequest) -> asyncio.Task[Sampled]:
    """Make a call, and return it once the engine has sampled tokens for it. One that was over before anybody looked is made again."""
    before = await replica.sampled()
    call = asyncio.create_task(client.sample(asked))

    async def look() -> bool:
        nonlocal before, call
        if call.done():
            call.result()
            before = await replica.sampled()
            call = asyncio.create_task(client.sample(asked))
        return await replica.sampled() > before

    await eventually(look)
    return call


async def fenced(call: Any) -> str:
    with pytest.raises(ReplicaFenced) as refusal:
        await call
    return refusal.value.reason


async def calls(replica: Process, outcome: str) -> float:
    return await replica.metric(f'headrace_rollout_calls_total{{outcome="{outcome}"}}')


async def test_without_verified_weights_it_renders_and_samples_nothing(client: ReplicaClient, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "2+2?"}]
    expected = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, return_dict=False)
    assert await client.render(messages, [TOOL]) == expected
    assert await fenced(client.sample(request())) == "unhealthy"


async def test_only_agents_and_the_operator_make_calls(replica: Process) -> None:
    async with httpx.AsyncClient(base_url=replica.http.base_url, timeout=60) as stranger:
        for path in PATHS:
            assert (await stranger.post(path, json={})).status_code == 401
            assert (await stranger.post(path, json={}, headers=bearer("eye"))).status_code == 403
            assert (await stranger.post(path, json={}, headers=bearer("boss"))).status_code == 400
            assert (await stranger.post(path, json={}, headers=bearer("runner"))).status_code == 400
        for path in ("/metrics", "/weights", "/v1/models", "/openapi.json", "/readyz"):
            assert (await stranger.get(path, headers=bearer("runner"))).status_code == 403, path
        completion = {"prompt": [3, 4], "max_tokens": 2}
        assert (await stranger.post("/v1/completions", json=completion, headers=bearer("runner"))).status_code == 403


async def test_log_probabilities_are_the_trainers(client: ReplicaClient, fleet: Fleet, replica: Process) -> None:
    assert (await fleet.refit(0)).verified == (replica.replica,)
    await eventually(lambda: _ready(replica))
    answers = await asyncio.gather(*(client.sample(request()) for _ in range(8)))
    for it in answers:
        assert difference(fleet, request(), it) < 1e-4
        assert it.spans == ((0, 0, len(it.token_ids)),)
        assert (it.timeline, it.version, it.replica) == ("timeline-0", 0, replica.replica)
    assert len({tuple(it.token_ids) for it in answers}) == 8
    assert await calls(replica, "answered") == 8
    assert await replica.metric("headrace_rollout_call_tokens_total") == sum(len(it.token_ids) for it in answers)
    assert await replica.metric("headrace_rollout_call_prompt_tokens_total") == 8 * len(PROMPT)


async def test_what_was_computed_before_is_not_computed_again(client: ReplicaClient, replica: Process) -> None:
    asked = request(token_ids=PROMPT * 40, max_new_tokens=1)
    assert (await client.sample(asked)).cached_tokens == 0
    assert (await client.sample(asked)).cached_tokens > len(PROMPT) * 20
    assert await replica.metric("headrace_rollout_call_cached_tokens_total") > len(PROMPT) * 20


async def _ready(replica: Process) -> bool:
    return (await replica.http.get("/readyz")).status_code == 200


async def test_equal_seeds_draw_equal_tokens(client: ReplicaClient) -> None:
    for seed in (0, 7, 2**63 - 1, -(2**63)):
        one, two = await asyncio.gather(*(client.sample(request(seed=seed)) for _ in range(2)))
        assert one.token_ids == two.token_ids
    assert one.token_ids != (await client.sample(request(seed=8))).token_ids


async def test_it_says_what_ended_a_completion(client: ReplicaClient, tokenizer: Any) -> None:
    free = await client.sample(request(temperature=0.0))
    assert (free.finish_reason, free.stop_reason, len(free.token_ids)) == ("length", None, 32)
    text = tokenizer.decode(free.token_ids)
    end = next(token for token in free.token_ids if token != free.token_ids[0])
    length = free.token_ids.index(end) + 1
    by_token = await client.sample(request(temperature=0.0, stop_token_ids=(end,)))
    assert (by_token.token_ids, by_token.finish_reason) == (free.token_ids[:length], "stop")
    assert by_token.stop_reason == end
    stop = next(character for character in text if character.isascii() and character.isprintable())
    by_text = await client.sample(request(temperature=0.0, stop=("never written", stop)))
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", stop)
    assert by_text.token_ids == free.token_ids[: len(by_text.token_ids)]
    assert free.message == {}
    for it, stops in ((free, {}), (by_token, {"stop_token_ids": (end,)}), (by_text, {"stop": (stop,)})):
        again = await client.sample(request(temperature=0.0, message=True, tools=[TOOL], **stops))
        assert again.token_ids == it.token_ids
        said = text if it is free else tokenizer.decode(it.token_ids[:-1])
        assert again.message == {"role": "assistant", "content": said}


async def test_the_openai_api_reads_tool_calls_with_the_same_parser(replica: Process) -> None:
    body = {"messages": [{"role": "user", "content": "2+2?"}], "tools": [TOOL], "max_tokens": 4}
    answer = await replica.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        ({"token_ids": ()}, "invalid", "token_ids is empty"),
        ({"token_ids": (3, 260)}, "invalid", r"token_ids\[1\] is 260"),
        ({"token_ids": (-1,)}, "invalid", r"token_ids\[0\] is -1"),
        ({"token_ids": (3,) * CONTEXT}, "context", "2048 tokens, which with max_new_tokens 32"),
        ({"max_new_tokens": 2042}, "context", "max_new_tokens 2042"),
        ({"temperature": 2.5}, "invalid", "temperature must be in"),
        ({"temperature": -1.0}, "invalid", "temperature"),
        ({"top_p": 0.0}, "invalid", "top_p"),
        ({"stop": ("",)}, "invalid", "empty string"),
        ({"stop_token_ids": (10**9,)}, "invalid", r"stop_token_ids\[0\]"),
        ({"max_new_tokens": 0}, "invalid", "max_new_tokens"),
        ({"seed": 2**63}, "invalid", "seed"),
        ({"top_k": 2**31}, "invalid", "top_k"),
        ({"stop": ("\ud800",)}, "invalid", "written as JSON"),
    ],
)
async def test_a_request_that_no_replica_can_answer_is_refused_by_its_value(
    client: ReplicaClient, replica: Process, changes: dict[str, Any], reason: str, said: str
) -> None:
    with pytest.raises(RenderRefused, match=said) as refused:
        await client.sample(request(**changes))
    assert refused.value.reason == reason
    assert not await calls(replica, "failed")


async def test_what_no_replica_can_render_or_parse_is_refused(client: ReplicaClient) -> None:
    with pytest.raises(RenderRefused, match="empty conversation"):
        await client.render([])
    with pytest.raises(RenderRefused, match=r"tools\.0"):
        await client.sample(request(message=True, tools=[{}]))
    with pytest.raises(RenderRefused, match="maximum context length") as refused:
        await client.render([{"role": "user", "content": "x" * CONTEXT}])
    assert refused.value.reason == "context"


async def test_the_openai_api_computes_no_more_than_the_engine_has_slots(replica: Process) -> None:
    for stream in (False, True):
        body = {"prompt": list(PROMPT), "max_tokens": 2, "n": 2, "stream": stream}
        answer = await replica.http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "n: 2 sequences" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 10**6, b'{"token_ids": [1e999]}'])
@pytest.mark.parametrize("path", PATHS)
async def test_what_is_no_request_is_refused(replica: Process, path: str, content: bytes) -> None:
    answer = await replica.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("declares", [True, False])
async def test_a_body_that_is_too_large_is_refused_with_the_limit(replica: Process, path: str, declares: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 2**20

    headers = {"content-type": "application/json", **({"content-length": str(20 * 2**20)} if declares else {})}
    answer = await replica.http.post(path, content=parts(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "too_large"
    assert "agents.max_request_bytes" in answer.json()["error"]["message"]


GOOD: dict[str, dict[str, Any]] = {
    "/sample": {
        **{"token_ids": [3, 4], "max_new_tokens": 4, "timeline": "timeline-0", "min_version": 0, "seed": 1},
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["a"], "stop_token_ids": [9]},
        **{"message": True, "tools": [TOOL]},
    },
    "/render": {"messages": [{"role": "user", "content": "1"}], "tools": [TOOL], "add_generation_prompt": False},
}


@pytest.mark.parametrize("path", PATHS)
async def test_malformed_requests_get_a_documented_status(replica: Process, session_seed: int, path: str) -> None:
    mutator = Mutator(Random(f"{session_seed} {path}"))
    route = (await replica.http.get("/openapi.json")).json()["paths"][path]["post"]
    assert {"200", "400", "401", "403", "409", "413", "415", "500"} <= route["responses"].keys()
    assert "token_ids" in json.dumps(route)
    for _ in range(100):
        body = mutator.structure(GOOD[path])
        headers = {"content-type": "application/json"}
        answer = await replica.http.post(path, content=json.dumps(body, default=repr), headers=headers)
        said = f"{body!r:.1000} answered {answer.status_code} {answer.text:.500}"
        assert answer.status_code in (200, 400, 409), said
        assert answer.status_code == 200 or answer.json()["error"]["message"], said
    assert (await replica.http.post(path, json=GOOD[path])).status_code == 200


async def test_law_4_another_timeline_and_weights_too_old_are_fenced(client: ReplicaClient) -> None:
    assert await fenced(client.sample(request(timeline="timeline-9"))) == "timeline"
    assert await fenced(client.sample(request(min_version=1))) == "stale"
    assert (await client.sample(request(min_version=-(10**30)))).version == 0


async def test_a_caller_that_goes_away_ends_its_call_in_the_engine(client: ReplicaClient, replica: Process) -> None:
    before = await calls(replica, "abandoned")
    call = await sampling(client, replica, long())
    call.cancel()

    async def idle() -> bool:
        return not await replica.generating()

    await eventually(idle)
    await eventually(lambda: _more(replica, "abandoned", before))


async def _more(replica: Process, outcome: str, before: float) -> bool:
    return await calls(replica, outcome) == before + 1


async def test_a_refit_in_flight_marks_the_tokens_of_either_version(
    client: ReplicaClient, fleet: Fleet, replica: Process
) -> None:
    """Though it computes one sequence at a time, and another one waits, the replica proves its weights while the first runs on."""
    call = await sampling(client, replica, long())
    other = asyncio.create_task(client.sample(request()))
    fleet.policy.train()
    assert len((await fleet.refit(1)).verified) == 1
    assert not call.done()
    assert not other.done()
    it = await call
    assert [span.version for span in (await other).spans] == [1]
    assert [span.version for span in it.spans] == [0, 1]
    assert (len(it.token_ids), it.version) == (LONG, 1)
    assert difference(fleet, long(), it) < 1e-4


async def test_law_4_a_refit_that_fails_its_proof_takes_the_calls_with_it(
    client: ReplicaClient, fleet: Fleet, replica: Process
) -> None:
    fleet.policy.train()
    made = [await sampling(client, replica, long(min_version=1))]
    # one after the other: on a busy machine the first may be over before the weights are there
    made += [asyncio.create_task(client.sample(long(min_version=1))) for _ in range(3)]
    assert (await fleet.refit(2, wrong_by=0.5)).verified == ()
    assert await fenced(made[-1]) == "unhealthy"
    await asyncio.gather(*made, return_exceptions=True)
    assert await fenced(client.sample(request())) == "unhealthy"
    assert await client.render([{"role": "user", "content": "x"}])
    assert len((await fleet.refit(2)).verified) == 1
    await eventually(lambda: _ready(replica))
    it = await client.sample(request(min_version=2))
    assert difference(fleet, request(), it) < 1e-4


async def test_law_4_a_rewind_ends_the_calls_of_weights_that_it_undoes(
    client: ReplicaClient, fleet: Fleet, replica: Process
) -> None:
    call = await sampling(client, replica, long())
    fleet.timeline = "timeline-1"
    await fleet.replay.rewind(0, fleet.timeline)
    assert await fenced(call) == "timeline"
    assert await fenced(client.sample(request())) == "timeline"
    assert await fenced(client.sample(request(timeline="timeline-1"))) == "unhealthy"
    assert len((await fleet.refit(0)).verified) == 1
    await eventually(lambda: _ready(replica))
    assert (await client.sample(request(timeline="timeline-1"))).timeline == "timeline-1"
    assert await fenced(client.sample(request())) == "timeline"


async def test_law_2_a_call_goes_on_over_a_rewind_to_its_weights(
    client: ReplicaClient, fleet: Fleet, replica: Process
) -> None:
    """It is paused, and then goes on with those of the new timeline."""
    version = 1 + await fleet.trained_step()
    assert len((await fleet.refit(version)).verified) == 1
    await eventually(lambda: _ready(replica))
    call = await sampling(client, replica, long(timeline="timeline-1"))
    fleet.timeline = "timeline-2"
    await fleet.replay.rewind(version, fleet.timeline)
    assert len((await fleet.refit(version)).verified) == 1
    it = await call
    assert (it.timeline, it.version, {span.version for span in it.spans}) == ("timeline-2", version, {version})
    assert difference(fleet, long(), it) < 1e-4


async def test_a_replica_that_is_stopped_hands_its_calls_back(client: ReplicaClient, replica: Process) -> None:
    call = await sampling(client, replica, long(timeline="timeline-2"))
    replica.popen.terminate()
    assert await fenced(call) == "leaving"
    assert await replica.ended() == 0
    with pytest.raises(ReplicaUnavailable):
        await client.sample(request())
