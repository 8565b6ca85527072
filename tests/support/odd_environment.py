"""An environment that does what a completion tells it to."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path

import headrace
from headrace.net import rpc

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
            case "hang once":  # whoever comes second scores it
                seen = Path(sample.extra_env_info["touch"])
                if not seen.exists():
                    seen.write_text(str(os.getpid()))
                    time.sleep(3600)
            case "meet":  # returns when another process has been asked the same
                folder = Path(sample.extra_env_info["folder"])
                (folder / str(os.getpid())).touch()
                while len(list(folder.iterdir())) < 2:
                    time.sleep(0.01)
            case "huge":
                return headrace.Score("SCORED", 1.0, metadata={"said": "x" * 100_000_000})
            case "modules":
                heavy = sorted({*BEYOND_THE_BASE} & sys.modules.keys())
                return headrace.Score("SCORED", 1.0, metadata={"heavy": heavy})
        return float(len(sample.completion))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--attach", help="host:port of a hub")
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--token")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument(
        "--answer-within",
        type=float,
        help="seconds, of a deadline that is later: however long the machine stands still",
    )
    arguments = parser.parse_args()
    if arguments.answer_within is not None:
        rpc.time_before = lambda deadline_s, most_s: arguments.answer_within  # type: ignore[assignment]
    logging.basicConfig(level=logging.INFO)
    if arguments.attach is None:
        headrace.serve(Odd(), port=arguments.port)
    else:
        given = {"capacity": arguments.capacity, "token": arguments.token, "insecure": arguments.insecure}
        headrace.attach(arguments.attach, Odd(), "odd", **given)
