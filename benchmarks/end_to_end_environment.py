"""The environment of `benchmarks.end_to_end`: share of digits in a completion, after some latency.

python end_to_end_environment.py PORT LATENCY_S
"""

from __future__ import annotations

import sys
import time

import headrace

TOKENS = 64


class Digits(headrace.Environment):
    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    def score(self, sample: headrace.Sample) -> float:
        time.sleep(self.latency_s)
        return sum(character.isdigit() for character in sample.completion) / TOKENS


if __name__ == "__main__":
    headrace.serve(Digits(float(sys.argv[2])), port=int(sys.argv[1]))
