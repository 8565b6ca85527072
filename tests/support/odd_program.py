"""Programs that do what the field `do` of their problem tells them to: as an environment that is served or attached, and as a function."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path

import headrace


def say(path: str, text: str = "") -> None:
    Path(path).write_text(text)


async def play(e: headrace.Episode) -> float | headrace.Score | None:
    match e.public.get("do"):
        case "raise":
            raise RuntimeError("the board is broken")
        case "die":
            os._exit(3)
        case "hang":
            try:
                say(e.public["touch"])
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                say(e.public["cancelled"])
                raise
        case "say who and hang":
            say(e.public["touch"], str(os.getpid()))
            await asyncio.sleep(3600)
        case "leave":
            e.artifacts["left"] = True
            return None
        case "told":
            e.artifacts["told"] = {"public": e.public, "messages": list(e.messages), "attempt": e.attempt}
            return 1.0
        case "huge":
            e.artifacts["left"] = "x" * 2_000_000
            return 1.0
    answer = await e.chat(e.messages)
    return float(answer["content"])


class Odd(headrace.Environment):
    build = "2"
    episodes = 4
    reward_max = 100.0

    async def episode(self, e: headrace.Episode) -> float | headrace.Score | None:
        return await play(e)


class OddGrader(Odd):
    """Scores, too."""

    concurrency = 2

    async def score(self, sample: headrace.Sample) -> float:
        return float(len(sample.completion))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--attach", help="host:port of a hub")
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--both", action="store_true", help="score, too")
    parser.add_argument("--grader", help="be attached under this name as well, and score")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    environment = OddGrader() if arguments.both else Odd()
    if arguments.grader is not None:
        headrace.attach(arguments.attach, OddGrader(), arguments.grader, wait=False)
    if arguments.attach is None:
        headrace.serve(environment, port=arguments.port)
    else:
        headrace.attach(arguments.attach, environment, "odd", capacity=arguments.capacity)
