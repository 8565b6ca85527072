"""The peer of `benchmarks.end_to_end`: runs a script of TRL. Runs in TRL's virtual environment and imports no headrace.

    python end_to_end_peer.py SCRIPT THREADS

Prints one JSON line: of the end of every step the Unix time (`ends`), the CPU seconds until then (`cpu_s`), and its mean reward
(`rewards`).
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from typing import Any

import torch
import trl
from transformers import TrainerCallback


class Record(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu_s: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())
        self.cpu_s.append(time.process_time())

    def on_log(self, *arguments: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))


def main(script: str, threads: int) -> None:
    torch.set_num_threads(threads)
    record, trainer = Record(), trl.GRPOTrainer

    def recorded(**arguments: Any) -> Any:
        return trainer(**arguments, callbacks=[record])

    trl.GRPOTrainer = recorded
    runpy.run_path(script, run_name="__main__")
    found = {"ends": record.ends, "cpu_s": record.cpu_s, "rewards": record.rewards}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
