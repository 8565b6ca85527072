"""A program of two turns that is held between them while a file is there. It leaves another for each time that an episode begins, one once
it is held, and one at its end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import headrace

FOLDER = Path(os.environ.get("HELD_PROGRAM", "."))


class Held(headrace.Environment):
    async def episode(self, e: headrace.Episode) -> float:
        name = f"{e.group_id}.{e.index}"
        (FOLDER / f"{name}.{e.idempotency_key.replace('/', '-')}.began").touch()
        said = await e.chat(e.messages)
        while (FOLDER / "hold").exists():
            (FOLDER / f"{name}.held").touch()
            await asyncio.sleep(0.1)
        await e.chat([*e.messages, said, {"role": "user", "content": "again"}])
        (FOLDER / f"{name}.ended").touch()
        return float(e.index % 2)
