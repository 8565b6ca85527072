"""What programs use besides OpenAI's client, unchanged: the OpenAI Agents SDK and LiteLLM."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.support.gateways import open_episode
from tests.support.toy_policy import ToyPolicy
from tests.support.toy_sessions import user


async def test_the_agents_sdk_plays_with_tools_and_every_loop_is_one_path() -> None:
    sdk: Any = pytest.importorskip("agents", reason="pip install openai-agents")
    sdk.set_tracing_disabled(True)
    looked: list[dict[str, Any]] = []

    async def look(context: Any, arguments: str) -> str:
        looked.append(json.loads(arguments))
        return "found"

    tool = sdk.FunctionTool("look", "looks", {"type": "object", "properties": {}}, look, strict_json_schema=False)
    paths = 0
    async with open_episode(max_request_bytes=10**6) as opened, opened.client() as client:
        model = sdk.OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = sdk.Agent(name="seeker", instructions="seek", model=model, tools=[tool])
        while not looked or paths < 5:
            result = await sdk.Runner.run(agent, f"the {paths}th", max_turns=20)
            paths += 1
            assert result.raw_responses
        ending = await opened.episode.end()
    assert ending.paths == sum(call.parent < 0 for call in ending.calls) == paths
    assert len(ending.calls) == paths + len(looked), "each result of a tool is a turn of its path"


async def test_litellm_talks_over_several_turns() -> None:
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("pip install litellm")
    litellm: Any = importlib.import_module("litellm")
    # it gives back no reasoning, so a template that shows that of older answers would make roots
    async with open_episode(ToyPolicy("stripped"), max_request_bytes=10**6) as opened:
        told: dict[str, Any] = {"model": "openai/policy", "api_base": opened.url, "api_key": "none"}
        messages: list[Any] = [user("hi")]
        for turn in range(3):
            answer = await litellm.acompletion(**told, messages=messages)
            messages += [answer.choices[0].message.model_dump(), user(f"and {turn}?")]
        stream = await litellm.acompletion(**told, messages=messages, stream=True)
        assert [chunk async for chunk in stream]
        ending = await opened.episode.end()
    assert [call.parent for call in ending.calls] == [-1, 0, 1, 2]
