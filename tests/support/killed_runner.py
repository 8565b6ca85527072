"""`headrace agents` that ends by SIGKILL at a boundary: `python -m tests.support.killed_runner BOUNDARY FOLDER CONFIG`.

    appended     its last call is in the buffer, and its answer has not left
    unfinished   the program has returned, and the buffer does not know it
    finished     the buffer has taken the episode, and the runner has not heard of it
    none         it is not killed

It is struck in the episode with index 1 of the first group. Its sibling has been handed in by then, and has left FOLDER/handed-in behind.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from headrace.config import load
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Call
from headrace.replay import Lease, ReplayClient
from headrace_services.agents import main
from tests.support.noted_program import CALLS

BOUNDARY, FOLDER = sys.argv[1], Path(sys.argv[2])


def die_at(boundary: str, lease: Lease, index: int) -> None:
    if (boundary, lease.group.order, index) == (BOUNDARY, 0, 1):
        os.kill(os.getpid(), signal.SIGKILL)


class Struck(ReplayClient):
    async def append(
        self, lease: Lease, index: int, number: int, nonce: str, call: Call, timeline: str | None = None
    ) -> None:
        await super().append(lease, index, number, nonce, call, timeline)
        if number == CALLS - 1:
            die_at("appended", lease, index)

    async def finish(self, lease: Lease, index: int, trajectory: AnyTrajectory | None, score: Score | None) -> Any:
        die_at("unfinished", lease, index)
        again = await super().finish(lease, index, trajectory, score)
        die_at("finished", lease, index)
        if (lease.group.order, index) == (0, 0):
            (FOLDER / "handed-in").touch()
        return again


if __name__ == "__main__":
    with mock.patch.object(main, "ReplayClient", Struck):
        main.main(load(sys.argv[3]))
