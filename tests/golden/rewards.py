"""Environments that find differences between the completions of a model of random weights."""

from __future__ import annotations

import headrace


def share(text: str) -> float:
    """Of its characters, how many are digits."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


class Digits(headrace.Environment):
    """The share of digits, and as a component the length."""

    name = "digits"

    def score(self, sample: headrace.Sample) -> headrace.Score:
        return headrace.Score("SCORED", share(sample.completion), {"length": float(len(sample.completion))})


class Turns(headrace.Environment):
    """A program: as many turns as the first answer has digits, up to three; the reward is the last answer's share of digits."""

    name = "turns"

    async def episode(self, e: headrace.Episode) -> headrace.Score:
        messages = list(e.messages)
        said = await e.chat(messages)
        turns = min(sum(character.isdigit() for character in said.get("content") or ""), 3)
        for _ in range(turns - 1):
            messages += [said, {"role": "user", "content": f"-{messages[-1]['content']}"[:8]}]
            said = await e.chat(messages)
        return headrace.Score("SCORED", share(said.get("content") or ""), {"turns": float(max(turns, 1))})
