"""A program that leaves what it did in its artifacts, and a grader of it, which is served by a process of its own."""

from __future__ import annotations

import argparse
import logging

import headrace

_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
_TURNS = 3


async def play(e: headrace.Episode) -> None:
    """Answer the tool calls of the policy; leave how many there were, and say no reward."""
    messages = list(e.messages)
    tools = 0
    for turn in range(_TURNS):
        said = await e.chat(messages, tools=_TOOLS)
        messages.append(said)
        if turn == _TURNS - 1:
            break
        for call in said.get("tool_calls") or ():
            tools += 1
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"square {tools}"})
        messages.append({"role": "user", "content": "and?"})
    e.artifacts.update(tools=tools, messages=len(messages), hint=e.public["hint"])


class Seen(headrace.Environment):
    """Rewards an episode whose artifacts, conversation and answer key agree: only who sees all three can."""

    build = "1"

    def score(self, sample: headrace.Sample) -> headrace.Score:
        said, left = sample.conversation, sample.artifacts
        results = [message for message in said if message["role"] == "tool"]
        asked = [call["id"] for message in said[:-1] for call in message.get("tool_calls") or ()]
        agrees = (
            len(said) == left["messages"]
            and said[0] == sample.messages[0]
            and (said[-1]["content"] or "") in sample.completion
            and [message["content"] for message in results] == [f"square {n + 1}" for n in range(left["tools"])]
            and [message["tool_call_id"] for message in results] == asked
            and left["hint"] == sample.extra_env_info["hint"]
        )
        return headrace.Score(
            "SCORED", float(agrees), {"tools": left["tools"]}, {"key": sample.extra_env_info["answer"]}
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    logging.basicConfig(level=logging.INFO)
    headrace.serve(Seen(), port=parser.parse_args().port)
