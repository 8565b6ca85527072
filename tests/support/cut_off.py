"""A hub, and two processes attached to it: one is on a machine of its own, whose cable is pulled while it is at work, and put back.

    unshare … python -m tests.support.cut_off FOLDER

Runs inside namespaces of its own (`tests.chaos.runs.NAMESPACES`); exit code 0: the other process scored its work, and it came back.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from headrace import Sample
from tests.support.network import SUBNET, Network
from tests.support.reward_hub import WAIT_S, attach_environment, start_hub
from tests.support.waiting import eventually

ODD = Path(__file__).with_name("odd_environment.py")


async def main(folder: Path) -> None:
    network = Network()
    network.add("far", 2)
    seen = folder / "seen"
    async with start_hub({"odd": {"attached": True}}, host="0.0.0.0") as hub, contextlib.AsyncExitStack() as stack:
        attach = [sys.executable, str(ODD), "--insecure", "--attach", f"{SUBNET}.1:{hub.port}"]
        far = await asyncio.create_subprocess_exec(*network.enter("far"), *attach)
        stack.callback(far.kill)
        await hub.attached("odd", 16)
        call = asyncio.create_task(hub.score([Sample("hang once", {"touch": str(seen)}, environment="odd")]))
        await eventually(lambda: seen.exists() and seen.read_text() != "")
        assert seen.read_text() == str(far.pid)
        await stack.enter_async_context(attach_environment(ODD, hub))
        await hub.attached("odd", 32)
        network.cut("far")
        (score,) = await asyncio.wait_for(call, WAIT_S)
        assert (score.status, score.reward) == ("SCORED", 9), score
        await hub.attached("odd", 16)
        network.heal("far")
        await hub.attached("odd", 32)
        listed = (await hub.environments())["odd"]
        assert [process.address.split(":")[0] for process in listed.processes] == [f"{SUBNET}.2", "127.0.0.1"], listed
        assert (listed.recent.scored, listed.recent.failed) == (1, 0)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
