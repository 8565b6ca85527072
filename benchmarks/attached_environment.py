"""An environment of `benchmarks.attached`: it scores at once, or after some latency.

python -m benchmarks.attached_environment HUB NAME LATENCY_S
"""

from __future__ import annotations

import asyncio
import sys

import headrace


class Length(headrace.Environment):
    concurrency = 256  # four batches

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    async def score(self, sample: headrace.Sample) -> float:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        return float(len(sample.completion))


if __name__ == "__main__":
    headrace.attach(sys.argv[1], Length(float(sys.argv[3])), sys.argv[2])
