"""An environment of `benchmarks.attached`: it scores at once, or after some latency, on any number of streams.

python -m benchmarks.attached_environment HUB NAME STREAMS LATENCY_S
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import headrace
from headrace.attachment import Attachment, DialOptions


class Length(headrace.Environment):
    concurrency = 256  # four batches

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    async def score(self, sample: headrace.Sample) -> float:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        return float(len(sample.completion))


def main(hub: str, name: str, streams: int, latency_s: float) -> None:
    logging.getLogger("headrace").setLevel(logging.ERROR)  # while the hub starts, each stream says that it tries again
    for _ in range(streams):  # `headrace.attach` would put each in the place of the one before
        Attachment(hub, Length(latency_s), name, None, DialOptions)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
