"""The environment of a chaos run, as a user would serve one: its reward is a pure function of question and answer, so that an
auditor can work it out again; it takes as long as a file says, which paces the run; some problems are made to fail.

    python -m tests.chaos.environment PORT HOST PACE_FILE
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from pathlib import Path

import headrace


class Paced(headrace.Environment):
    name = "paced"
    build = "chaos-1"
    concurrency = 256

    def __init__(self, pace: Path) -> None:
        self._pace = pace
        self._seen: set[str] = set()

    async def score(self, sample: headrace.Sample) -> float:
        await asyncio.sleep(float(self._pace.read_text()))
        mood = sample.extra_env_info["mood"]
        if mood == "poison":
            raise RuntimeError("this problem can't be scored")
        if mood == "flaky" and sample.group_id not in self._seen:
            self._seen.add(sample.group_id)
            raise RuntimeError("not at the first time")
        if mood == "flat":
            return 0.5
        return zlib.crc32(f"{sample.messages[-1]['content']}|{sample.completion}".encode()) % 1000 / 1000


if __name__ == "__main__":
    headrace.serve(Paced(Path(sys.argv[3])), port=int(sys.argv[1]), host=sys.argv[2], insecure=True)
