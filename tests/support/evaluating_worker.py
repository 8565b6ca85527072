"""A scoring worker whose one environment runs the completion as Python and pays what that leaves in `reward`: what no built-in one does."""

from __future__ import annotations

import os
from typing import Any

from headrace.config.environments import SandboxedConfig
from headrace.env.environment import Sample
from headrace.records.score import Score
from headrace_services.reward.environments.base import SandboxedEnvironment
from headrace_services.reward.scoring_worker import main

ENDS_AT_SIGHT = "end"


class Evaluating(SandboxedEnvironment[SandboxedConfig]):
    def __init__(self, name: str, env: SandboxedConfig) -> None:
        super().__init__(name, env)
        self.build = "1"

    def quick_score(self, sample: Sample) -> Score | None:
        if sample.completion == ENDS_AT_SIGHT:
            os._exit(1)
        return Score("SCORED", reward=0.0) if sample.completion == "" else None

    def judge(self, sample: Sample) -> float | Score:
        names: dict[str, Any] = {"reward": 0.0, "self": self}
        exec(sample.completion, names)  # the point of it
        return self.earned(names["reward"])

    def earned(self, reward: float) -> float:
        return reward


def make(name: str, env: SandboxedConfig) -> SandboxedEnvironment[SandboxedConfig]:
    return Evaluating(name, env)


if __name__ == "__main__":
    main(make)
