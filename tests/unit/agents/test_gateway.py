"""The gateway over HTTP, with real clients and replicas that are toys: answers, refusals, clocks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import ssl
from typing import Any

import openai
import pytest

from headrace.base.errors import LeaseLost
from headrace.net.replica_client import SampleRequest
from headrace_services.agents import gateway as gateway_module
from tests.support.gateways import HI, ask, gate, open_episode, renders_anything
from tests.support.toy_sessions import LIMITS, TOOLS, user
from tests.support.waiting import eventually


async def test_an_openai_client_talks_over_several_turns() -> None:
    async with open_episode() as opened, opened.client() as client:
        messages = list(HI)
        for turn in range(3):
            answer = (await ask(client, messages)).choices[0]
            assert answer.finish_reason in ("stop", "tool_calls")
            messages += [answer.message.model_dump(), user(f"and {turn}?")]
        ending = await opened.episode.end()
    assert [call.parent for call in ending.calls] == [-1, 0, 1]
    assert [call.completion_token_ids.tolist() for call in opened.kept] == [
        call.completion_token_ids.tolist() for call in ending.calls
    ]


async def test_the_key_is_an_api_key_too() -> None:
    shared = openai.DefaultAsyncHttpxClient(verify=ssl.create_default_context())  # as docs/agents.md advises
    async with (
        open_episode() as opened,
        opened.client(base_url=f"{opened.address}/v1", api_key=opened.key, http_client=shared) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await ask(client)).usage.completion_tokens > 0


@pytest.mark.parametrize("seed", range(6))
async def test_a_stream_says_what_an_answer_does(seed: int) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "extra_body": {"return_token_ids": True}}
    messages = [user(f"hi {seed}")]
    async with open_episode() as opened, opened.client() as client:
        whole = (await ask(client, messages, **asked)).model_dump()
    async with open_episode() as opened, opened.client() as client:
        stream = await ask(client, messages, **asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk.model_dump() async for chunk in stream]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    message = whole["choices"][0]["message"]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message.get("reasoning", "")
    calls = [{**call, "index": None} for delta in deltas for call in delta.get("tool_calls") or ()]
    assert calls == [{**call, "index": None} for call in message["tool_calls"] or ()]
    last = chunks[-2]["choices"][0]
    assert last["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert last["token_ids"] == whole["choices"][0]["token_ids"]
    assert last["logprobs"] == whole["choices"][0]["logprobs"]
    assert chunks[-1]["usage"] == whole["usage"]


async def test_token_ids_and_log_probabilities_are_those_of_the_record() -> None:
    async with open_episode() as opened, opened.client() as client:
        answer = await ask(client, logprobs=True, extra_body={"return_token_ids": True})
    (call,) = opened.kept
    choice = answer.choices[0]
    assert answer.prompt_token_ids == call.context_token_ids.tolist()
    assert choice.token_ids == call.completion_token_ids.tolist()
    assert [each.token for each in choice.logprobs.content] == [f"token_id:{token}" for token in choice.token_ids]
    assert [each.logprob for each in choice.logprobs.content] == call.logprobs.tolist()


async def test_no_answer_leaves_before_its_call_is_kept() -> None:
    async with open_episode() as opened, opened.client() as client:
        opened.may_keep.clear()
        asking = asyncio.create_task(ask(client))
        await eventually(lambda: any(call.answer for call in opened.episode.session.calls))
        done, _ = await asyncio.wait([asking], timeout=0.05)
        assert not done
        opened.may_keep.set()
        await asking
        assert len(opened.kept) == 1


async def test_parallel_calls_are_kept_in_the_order_of_their_numbers() -> None:
    async with open_episode(replicas=3) as opened, opened.client() as client:
        await asyncio.gather(*(ask(client, [user(f"{number}")]) for number in range(20)))
        ending = await opened.episode.end()
    assert len(opened.kept) == len(ending.calls) == 20


async def test_a_stream_stays_alive_while_the_policy_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "_KEEP_ALIVE_S", 0.01)
    async with open_episode() as opened, opened.http() as client:
        go = gate(opened)
        async with client.stream("POST", "/chat/completions", json={"messages": HI, "stream": True}) as response:
            parts = response.aiter_text()
            assert (await anext(parts)).startswith(":")
            go.set()
            rest = "".join([part async for part in parts])
    assert rest.endswith("data: [DONE]\n\n")


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"logit_bias": {"5": 100}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"guided_regex": "a+"},
        {"tool_choice": "required", "tools": list(TOOLS)},
        {"tool_choice": {"type": "function", "function": {"name": "look"}}, "tools": list(TOOLS)},
        {"tools": [{"type": "web_search"}]},
        {"parallel_tool_calls": False},
        {"use_beam_search": True},
        {"prompt_logprobs": 0},
        {"top_logprobs": 5, "logprobs": True},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"continue_final_message": True},
        {"stop_token_ids": [5]},
        {"ignore_eos": True},
        {"min_tokens": 5},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"stop": [1]},
        {"stop": ["a"] * 17},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]},
        {"messages": [{"role": "wizard", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": "hi", "seen": 2**70}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]},
        {"stream": "yes"},
        {"include_reasoning": False},
        {"priority": 5},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"temperature": True},
        {"seed": False},
    ],
    ids=lambda options: json.dumps(options)[:60],
)
async def test_what_would_change_what_is_sampled_is_refused_with_a_reason(options: dict[str, Any]) -> None:
    async with open_episode() as opened, opened.http() as client:
        response = await client.post("/chat/completions", content=json.dumps({"messages": HI, **options}))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert not opened.kept
        assert opened.episode.session.limit is None


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"messages": NaN}', b"[" * 100_000, b"\xff", b'{"messages": ' + b"[" * 80 + b"]" * 80 + b"}"],
)
async def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    async with open_episode(max_request_bytes=10**6) as opened, opened.http() as client:
        response = await client.post("/chat/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ["[" * 50_000, "[" * 400 + "]" * 400, "{", "1e999", '"\\ud800"'])
async def test_arguments_of_tools_are_any_text(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "?"}]
    async with open_episode(max_request_bytes=10**6) as opened, opened.http() as client:
        opened.replicas["replica-1"].render = renders_anything  # type: ignore[method-assign]
        response = await client.post("/chat/completions", json={"messages": messages})
    assert response.status_code == 200


async def test_options_of_sampling_are_imposed_and_what_was_asked_is_kept() -> None:
    seen: list[SampleRequest] = []

    async def before(request: SampleRequest) -> None:
        seen.append(request)

    async with open_episode() as opened, opened.client() as client:
        opened.replicas["replica-1"].before = before
        harmless = {"n": 1, "user": "me", "tool_choice": "auto", "tools": TOOLS, "response_format": {"type": "text"}}
        await ask(client, temperature=0.0, top_p=0.5, presence_penalty=1.0, seed=5, stop="z", max_tokens=7, **harmless)
    (request,) = seen
    assert (request.temperature, request.top_p, request.top_k) == (1.0, 1.0, None)
    assert request.seed != 5
    assert request.stop == ("z",)
    assert request.sampling.bad_words == ("@",)
    assert request.max_new_tokens == 7
    assert opened.episode.imposed == {"temperature": [0.0], "top_p": [0.5], "presence_penalty": [1.0], "seed": [5]}


async def test_few_of_many_values_that_were_asked_for_are_kept() -> None:
    async with open_episode() as opened, opened.client() as client:
        for number in range(30):
            await ask(client, temperature=number / 100)
        await ask(client, temperature=0.01)
        assert opened.episode.imposed == {"temperature": [number / 100 for number in range(16)]}


async def test_a_limit_is_an_error_of_the_contexts_length() -> None:
    async with open_episode(limits=dataclasses.replace(LIMITS, calls=1)) as opened, opened.client() as client:
        await ask(client)
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=r"agents\.max_rollout_turns") as refused:
                await ask(client)
            assert refused.value.code == "context_length_exceeded"
        assert (await opened.episode.end()).limit is not None


async def test_without_tools_to_choose_none_is_parsed() -> None:
    for number in range(20):
        async with open_episode() as opened, opened.client() as client:
            messages = [user(f"{number}")]
            parsed = (await ask(client, messages, tools=TOOLS)).choices[0].message
            if parsed.tool_calls:
                plain = (await ask(client, messages, tools=TOOLS, tool_choice="none")).choices[0].message
                assert not plain.tool_calls
                return
    raise AssertionError


# -- clocks and ends ---------------------------------------------------------------------------------------------------------


async def test_a_call_that_takes_too_long_is_an_error_that_clients_retry() -> None:
    now = [0.0]
    async with open_episode(clock=lambda: now[0]) as opened, opened.client() as client:
        gate(opened)
        asking = asyncio.create_task(ask(client))
        await eventually(lambda: opened.replicas["replica-1"].sampling)
        now[0] = 20.0
        opened.episode.look()
        with pytest.raises(openai.InternalServerError, match=r"agents\.call_s") as error:
            await asking
        assert error.value.status_code == 504
        assert (await opened.episode.end()).dropped == {"failed": 1}


async def test_an_answer_that_can_not_be_kept_does_not_leave() -> None:
    async with open_episode() as opened, opened.client() as client:
        opened.fail_to_keep = LeaseLost("the lease is void")
        with pytest.raises(openai.InternalServerError, match="has ended"):
            await ask(client)
        assert isinstance(await opened.episode.over, LeaseLost)
        assert not (await opened.episode.end()).calls


async def test_the_end_of_an_episode_ends_its_calls() -> None:
    async with open_episode() as opened, opened.client() as client:
        gate(opened)
        asking = asyncio.create_task(ask(client))
        await eventually(lambda: opened.replicas["replica-1"].sampling)
        await opened.episode.end()
        assert opened.replicas["replica-1"].sampling == 0
        with pytest.raises(openai.APIStatusError, match="ended"):
            await asking
