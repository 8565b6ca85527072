"""A hub on one machine, and the environment that it calls on another, which is lost. A third one gets its name.

    unshare … python -m tests.support.lost_machine FOLDER

Runs inside namespaces of its own (`tests.chaos.runs.NAMESPACES`); exit code 0: the environment on the new machine is asked, soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from headrace import Sample
from headrace.env.server import serving
from tests.support.network import Network
from tests.support.odd_environment import Odd
from tests.support.processes import started
from tests.support.reward_hub import start_hub

PORT = 50400
# On a busy machine. TCP itself gives a connection up after a quarter of an hour.
SOON_S = 300.0


async def serve() -> None:
    async with serving(Odd(), host="0.0.0.0", port=PORT):
        await asyncio.Event().wait()


async def ask() -> None:
    """Say what becomes of one call after the other."""
    async with start_hub({"odd": {"target": f"far:{PORT}", "timeout_s": 2}}) as hub:
        while True:
            (score,) = await hub.score([Sample("three", environment="odd")])
            sys.stdout.write(f"{score.status}\n")
            sys.stdout.flush()
            await asyncio.sleep(0.1)


async def main(folder: Path) -> None:
    network = Network(folder / "hosts")

    def role(machine: str, number: int, what: str) -> list[str]:
        network.add(machine, number)
        return [*network.enter(machine), sys.executable, "-m", "tests.support.lost_machine", what]

    async with asyncio.timeout(SOON_S), contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(started(*role("far", 2, "serve")))
        hub = await stack.enter_async_context(started(*role("near", 3, "ask"), stdout=asyncio.subprocess.PIPE))
        assert hub.stdout is not None
        lines = hub.stdout

        async def told(status: str) -> None:
            while (line := await lines.readline()) != f"{status}\n".encode():
                assert line, "the hub ended"

        await told("SCORED")
        network.remove("far")
        await told("TIMED_OUT")
        await stack.enter_async_context(started(*role("far", 4, "serve")))
        await told("SCORED")


if __name__ == "__main__":
    roles = {"serve": serve, "ask": ask}
    asyncio.run(roles[sys.argv[1]]() if sys.argv[1] in roles else main(Path(sys.argv[1])))
