"""The rewards of `benchmarks.end_to_end`. `digits` is for both sides: TRL calls the function itself, and the pipeline serves it as it
stands (`target: end_to_end_rewards.py:digits`). `exact` is for TRL alone: the pipeline has it built in.

`REWARD_LATENCY_S` is what a sample takes, in seconds. TRL waits for one sample after the other, because it calls the function once for a
batch. The pipeline has several calls at a time, as many as an environment takes by default.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

TOKENS = 64
LATENCY_S = float(os.environ.get("REWARD_LATENCY_S", "0"))


async def digits(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Return the share of digits in completions of `TOKENS` tokens."""
    rewards = []
    for completion in completions:
        if LATENCY_S:
            await asyncio.sleep(LATENCY_S)
        rewards.append(sum(character.isdigit() for character in completion[0]["content"]) / TOKENS)
    return rewards


def exact(end_token: int) -> Any:
    def reward(
        completions: list[list[dict[str, str]]], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        """The `math` environment with `require_stop`."""
        texts = [completion[0]["content"].strip() for completion in completions]
        return [
            float(text.isdecimal() and int(text) == int(right) and end_token in ids)
            for text, ids, right in zip(texts, completion_ids, answer, strict=True)
        ]

    return reward
