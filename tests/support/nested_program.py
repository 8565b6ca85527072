"""A program that asks the policy several questions at once, each of which leads to others, and that scores what came of it: both are
attached from one process."""

from __future__ import annotations

import argparse
import asyncio

import headrace

DEPTH = 2
CALLS = 2 ** (DEPTH + 1) - 1


class Nested(headrace.Environment):
    build = "1"
    concurrency = 1

    async def episode(self, e: headrace.Episode) -> None:
        async def ask(question: str) -> None:
            await e.chat([*e.messages, {"role": "user", "content": question}])
            if len(question) < DEPTH:
                await asyncio.gather(ask(f"{question}a"), ask(f"{question}b"))

        await ask("")

    async def score(self, sample: headrace.Sample) -> float:
        return float(len(sample.completion_token_ids))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--attach", help="host:port of a hub")
    parser.add_argument("--capacity", type=int)
    arguments = parser.parse_args()
    headrace.attach(arguments.attach, Nested(), "judge", wait=False)
    headrace.attach(arguments.attach, Nested(), "talk", capacity=arguments.capacity)
