"""The process of a function, a verifiers environment or a file: `python -m headrace_services.reward.function_process`.

Its specification is a `FunctionSpecification` (`frames`). It serves `EnvironmentService` on a socket, until its standard input ends, or the
nested process of a verifiers environment does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import IO, Any

import msgspec

from headrace.base.errors import HeadraceError
from headrace.base.tasks import run_until
from headrace.config.environments import FunctionConfig, TargetConfig, VerifiersConfig, read_environment
from headrace.env import environment_file, slots
from headrace.env.environment import Environment
from headrace.env.program_function import load
from headrace.env.server import serving
from headrace.env.verifiers.program import playing

from .frames import HubPipes, Started


class FunctionSpecification(msgspec.Struct):
    """The environment `env.<name>`, and the address (unix:PATH) at which to serve it."""

    name: str
    env: dict[str, object]
    address: str


def main() -> None:
    hub = HubPipes()
    slots.run(_serve(hub.specification(FunctionSpecification), hub))


async def _serve(specification: FunctionSpecification, hub: HubPipes) -> None:
    name = specification.name
    async with contextlib.AsyncExitStack() as stack:
        try:
            environment, died = await stack.enter_async_context(_environment(specification))
        except HeadraceError as error:
            hub.say(Started(problem=str(error)))
            return
        await stack.enter_async_context(serving(environment, specification.address))
        hub.say(Started(builds={name: environment.build}))
        await run_until(died(), _read_to_end(hub.requests))


@contextlib.asynccontextmanager
async def _environment(
    specification: FunctionSpecification,
) -> AsyncIterator[tuple[Environment, Callable[[], Coroutine[Any, Any, object]]]]:
    """Yield the environment, and a function whose result completes once the environment has died. Raises `HeadraceError`."""
    name, env = specification.name, read_environment(specification.env)
    match env:
        case VerifiersConfig():
            socket = f"{specification.address.removeprefix('unix:')}-verifiers"
            async with playing(name, env, socket) as (program, process):
                yield program, process.wait
        case TargetConfig():
            yield environment_file.load(env.target), asyncio.Event().wait
        case FunctionConfig():
            yield load(name, env.function, env.concurrency), asyncio.Event().wait
        case _:
            raise TypeError(f"env.{name} is not run in a process of its own: {type(env).__name__}")


async def _read_to_end(stream: IO[bytes]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stream)
    await reader.read()


if __name__ == "__main__":
    main()
