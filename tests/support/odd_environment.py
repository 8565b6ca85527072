"""An environment that does what a completion tells it to."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path

import headrace

# What only services need.
BEYOND_THE_BASE = (
    "torch",
    "vllm",
    "transformers",
    "headrace_services",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "math_verify",
)


class Odd(headrace.Environment):
    build = "2"

    def score(self, sample: headrace.Sample) -> float | headrace.Score:
        match sample.completion:
            case "raise":
                raise RuntimeError("the judge is out")
            case "nan":
                return float("nan")
            case "die":
                os._exit(3)
            case "hang":
                if "touch" in sample.extra_env_info:
                    Path(sample.extra_env_info["touch"]).touch()
                time.sleep(3600)
            case "modules":
                heavy = sorted({*BEYOND_THE_BASE} & sys.modules.keys())
                return headrace.Score("SCORED", 1.0, metadata={"heavy": heavy})
        return float(len(sample.completion))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    logging.basicConfig(level=logging.INFO)
    headrace.serve(Odd(), port=parser.parse_args().port)
