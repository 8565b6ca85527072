"""A program whose instances can be told apart, and a grader that can be held up."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import headrace

CALLS = 3


async def play(e: headrace.Episode) -> float:
    """Notes that it was started, and names its instance in each request. An episode of index 1 begins once the file `gate` exists."""
    folder, instance = Path(e.public["folder"]), secrets.token_hex(8)
    with (folder / "started").open("a") as notes:
        notes.write(f"{e.group_id} {e.index} {e.attempt} {instance}\n")
    if e.index == 1:
        await exists(folder / e.public["gate"])
    messages = list(e.messages)
    for _ in range(CALLS):
        messages.append({"role": "user", "content": f"instance {instance}"})
        messages.append(await e.chat(messages))
    return float(e.index)


class Judge(headrace.Environment):
    """Scores once the file `verdict` exists; `grading` says that it was asked."""

    async def score(self, sample: headrace.Sample) -> float:
        folder = Path(sample.extra_env_info["folder"])
        (folder / "grading").touch()
        await exists(folder / "verdict")
        return 1.0


async def exists(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC110, ASYNC240  # another process makes it
        await asyncio.sleep(0.01)
