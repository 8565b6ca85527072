from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.replay import Limits
from tests.support.trainer_process import PROMPTS, STEPS, Trainer, ended


@pytest.fixture
def base_limits(base_limits: Limits) -> Limits:
    """A replica that was killed is given up soon, and one that a busy machine keeps waiting is not."""
    return dataclasses.replace(base_limits, replica_dead_s=8.0)


@pytest.fixture
def settings(tmp_path: Path, tiny_model: Path, redis_url: str, run_id: str) -> dict[str, Any]:
    """The configuration of a short run, for a test to change before its trainer starts."""
    source = {"dataset_name": "arithmetic", "task_config": {"digits": 1}, "env_name": "sums"}
    return {
        "run": {"id": run_id, "dir": str(tmp_path)},
        "grpo": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": 2,
            "max_num_steps": STEPS,
            "use_leave_one_out_baseline": False,
            "val_period": 2,
            "val_at_start": True,
            "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": {
            "model_name": str(tiny_model),
            "max_total_sequence_length": 32,
            "precision": "float32",
            "optimizer": {"kwargs": {"lr": 1e-3}},
            "generation": {"max_new_tokens": 4},
        },
        "data": {"train": {**source, "size": 60}, "validation": {**source, "size": 3}},
        "env": {"sums": {"type": "math"}},
        "replay": {"redis_url": redis_url},
        "trainer": {"fleet_deadline_s": 60, "num_threads": 1, "device": "cpu"},
        "weight_channel": {"timeout_s": 20},
        "checkpointing": {"save_period": 2, "keep_top_k": None},
    }


@pytest.fixture
async def trainer(settings: dict[str, Any], tmp_path: Path) -> AsyncIterator[Trainer]:
    """A trainer that is not started yet; what it started is gone after the test."""
    trainer = Trainer(settings, tmp_path / "trainer.log")
    yield trainer
    for process in trainer.processes:
        process.kill()
        await ended(process)
