"""The process of a program that is a function: `python -m headrace_services.reward.function_process`.

Frames as in `scoring_worker`: the first one in is a `FunctionSpecification` as JSON, the answer `Started`. From then on it serves
`EnvironmentService` on a socket, until its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import IO

import msgspec

from headrace.config.data import EnvConfig
from headrace.environment import Environment
from headrace.environment_server import serving
from headrace.errors import HeadraceError
from headrace.program_function import load
from headrace.service import die_with_parent
from headrace_services.reward.frames import read_frame, write_frame
from headrace_services.reward.scoring_worker import Started


class FunctionSpecification(msgspec.Struct):
    """The environment `env.<name>`, and the address (unix:PATH) where its program is served."""

    name: str
    env: dict[str, object]
    address: str


def main() -> None:
    die_with_parent(signal.SIGKILL)
    # Ctrl-C reaches the whole terminal, and the hub ends this process itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the program prints must not end up between frames
    if (first := read_frame(requests)) is None:
        return
    specification = msgspec.json.decode(first, type=FunctionSpecification)
    env = EnvConfig.model_validate(specification.env)
    try:
        program = load(specification.name, str(env.function), env.concurrency)
    except HeadraceError as error:
        write_frame(replies, msgspec.json.encode(Started(problem=str(error))))
        return
    asyncio.run(_serve(program, specification, requests, replies))


async def _serve(
    program: Environment, specification: FunctionSpecification, requests: IO[bytes], replies: IO[bytes]
) -> None:
    async with serving(program, specification.address):
        write_frame(replies, msgspec.json.encode(Started(builds={specification.name: program.build})))
        await asyncio.to_thread(requests.read)


if __name__ == "__main__":
    main()
