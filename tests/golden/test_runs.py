"""`metrics.jsonl` of short runs of examples, by the command line: every key, and every number that is no time.

A run repeats because the bound on age is 0, so that one version of the weights samples a step; because there is one replica, and what it
samples has seeds (`seeds.py`; the product gives them to calls of programs); and because the model's weights come from a seed. Which
requests the engine computes together may still move a log-probability in its seventh digit.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.golden import comparison, seeds
from tests.support.ports import free_ports
from tests.support.up import Up

ROOT = Path(__file__).parents[2]
REWARDS = Path(__file__).with_name("rewards.py")
# Of these only that they are there: how long something took, what is derived from that, and how long a trajectory waited.
TIMES = ("timing/", "efficiency/", "performance/", "scoring_time/", "scoring_wait/")
# Of numbers of another processor, whose rounding errors have grown over three steps.
ELSEWHERE = 1e-3
SMALL = {
    "num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 3, "max_val_samples": 8,
    "val_at_start": True, "val_period": 2, "val_at_end": True,
}  # fmt: skip
OWN = {"data.default.env_name": "digits", "env.digits.target": f"{REWARDS}:Digits"}
# The program is /bin/grep, with what the policy wrote as the file that it searches: the share of four digits that a completion has.
CODE = {
    "data.default": "{dataset_name: null, env_name: holds}",
    "env.holds": '{type: code, runs_with: [/bin/grep, -c, -f, "-"], partial_credit: true}',
}


@dataclasses.dataclass(frozen=True)
class Run:
    """`changes`: overrides of the example. `stops`: a first start ends after so many steps, a second one goes on."""

    example: str
    changes: Mapping[str, Any]
    algorithm: str = "grpo"
    stops: int | None = None


RUNS = {
    "grpo": Run("arithmetic_tiny", OWN),
    "ppo": Run("ppo_arithmetic", {**OWN, "ppo.policy_training_start_step": 1}, "ppo"),
    "episodes": Run(
        "repair_game",
        {
            "data.default.env_name": "turns",
            "env.turns": f"{{target: {REWARDS}:Turns, episodes: true, public: [answer]}}",
            "agents.max_rollout_turns": 3,
        },
    ),
    "adapter": Run("lora_arithmetic", OWN),
    "code": Run("cispo_arithmetic", CODE),
    "resumed": Run("dapo_arithmetic", {**OWN, "grpo.val_period": 1, "checkpointing.save_period": 1}, stops=2),
}


def start(run: Run, steps: int, folder: Path, model: Path) -> None:
    """Take the run to this step."""
    redis, replay, reward, reward_http = free_ports(4)
    asynchrony = f"{run.algorithm}.async_{run.algorithm}.max_trajectory_age_steps"
    changes = {
        "run.dir": folder,
        "run.id": "golden",
        "policy.model_name": model,
        "replay.redis_port": redis,
        "replay.port": replay,
        "reward.port": reward,
        "reward.http_port": reward_http,
        **{f"{run.algorithm}.{key}": json.dumps(value) for key, value in SMALL.items()},
        asynchrony: 0,
        **run.changes,
        f"{run.algorithm}.max_num_steps": steps,
    }
    if "env.holds" in changes:
        for part, first in (("train", 10), ("validation", 60)):
            changes[f"data.{part}.data_path"] = problems(folder / f"{part}.jsonl", first)
            changes[f"data.{part}.size"] = 1000  # the default: a file has a size of its own
    up = Up(
        ROOT / "examples" / f"{run.example}.yaml",
        *(f"{key}={value}" for key, value in changes.items()),
        output=folder / f"up-{steps}.out",
        cwd=ROOT,  # from where an example finds its programs
        environ=seeds.services(folder / f"services-{steps}"),
    )
    assert up.ends() == 0, up.said()


def problems(file: Path, first: int) -> Path:
    """Sums, with a test for each of four digits."""
    digits = list("1234")
    tests = {"inputs": digits, "outputs": ["1"] * len(digits)}
    rows = [{"input": f"{i}+{i}", "output": "", **tests} for i in range(first, first + 30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def lines(journal: Path) -> dict[str, list[dict[str, Any]]]:
    """Of the journal, by their kind, without times and random names. Builds are digests of code: an environment's name says which it is.

    A validation ends before or after the step beside it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for text in journal.read_text().splitlines():
        line = json.loads(text)
        assert line.pop("time") > 0
        assert re.fullmatch(r"[0-9a-f]+", line.pop("timeline"))
        if "builds" in line:
            line["builds"] = sorted(line["builds"])
        line["metrics"] = {
            name: None if name.startswith(TIMES) else value for name, value in line.get("metrics", {}).items()
        }
        found.setdefault(line.pop("kind"), []).append(line)
    return found


@pytest.mark.slow
@pytest.mark.nightly  # `make golden` runs it; the steps of these runs are in test_learning.py
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
def test_metrics_of_a_run(name: str, tmp_path: Path, tiny_model: Path) -> None:
    run = RUNS[name]
    for steps in filter(None, (run.stops, SMALL["max_num_steps"])):
        start(run, steps, tmp_path, tiny_model)
    comparison.check_numbers(f"runs/{name}.json", lines(tmp_path / "golden" / "metrics.jsonl"), ELSEWHERE)
