"""An agent with a tool, for `examples/calculator.yaml`: add two numbers, with a calculator at hand.

The policy decides itself whether to call the tool. Its calls come as OpenAI's API has them, found in what it wrote by vLLM's parser
(`policy.generation.vllm_cfg.tool_parser`); a client of OpenAI's would do as well as `e.chat` (docs/agents.md).
"""

from __future__ import annotations

import json
from typing import Any

import headrace

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 47+85"}},
            "required": ["expression"],
        },
    },
}
MOST_CALLS = 3


class Calculator(headrace.Environment):
    """1 for the right sum, however it was come by."""

    name = "calculator"
    deterministic = False  # what the policy answers is drawn

    async def episode(self, e: headrace.Episode) -> headrace.Score:
        messages = list(e.messages)
        called = 0.0
        for _ in range(MOST_CALLS):
            said = await e.chat(messages, tools=[CALCULATOR])
            messages.append(said)
            if not said.get("tool_calls"):
                break
            called = 1.0
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result(call["function"])}
                for call in said["tool_calls"]
            ]
        right = float(messages[-1]["role"] == "assistant" and messages[-1].get("content") == e.public["answer"])
        return headrace.Score("SCORED", right, {"called": called, "told" if called else "guessed": right})


def result(function: dict[str, Any]) -> str:
    """What the tool answers to a call. The policy wrote it: nothing of it needs to be as it should be."""
    if function["name"] != "calculator":
        return f"there is no tool {function['name']}"
    try:
        return str(sum(int(number) for number in json.loads(function["arguments"])["expression"].split("+")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"can't compute {function['arguments']}: {error!r}"
