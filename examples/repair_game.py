"""A game of two turns, for `examples/repair_game.yaml`: add two numbers; who is wrong is told so, and may answer once more.

The program owns its loop: it calls the policy by `e.chat` as often as it likes, and returns the reward. Any client of OpenAI's API would
do as well (docs/agents.md).
"""

from __future__ import annotations

import headrace


class Repair(headrace.Environment):
    """1 for the right sum, half of it for the right sum in the second turn."""

    name = "repair"
    deterministic = False  # what the policy answers is drawn

    async def episode(self, e: headrace.Episode) -> headrace.Score:
        messages = list(e.messages)
        first = await e.chat(messages)
        if first.get("content") == e.public["answer"]:
            return headrace.Score("SCORED", 1.0, {"first": 1.0})
        # the problem once more, behind a minus: this model has no letters
        messages += [first, {"role": "user", "content": f"-{messages[-1]['content']}"}]
        second = await e.chat(messages)
        right = float(second.get("content") == e.public["answer"])
        return headrace.Score("SCORED", 0.5 * right, {"first": 0.0, "second": right})
