"""How far log-probabilities in bfloat16 are from those in float32, beside what one step of training changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.rows import line
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.step import CHECKPOINTED, CHUNKED, PACKED, SHARED
from headrace.records.trajectory import Float32, Trajectory
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.network.packing import Packing, pack, plan
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel

FRUGAL = CHUNKED | CHECKPOINTED
LAYOUTS: dict[str, dict[str, Any]] = {"padded": {}, "packed": PACKED, "shared prompts, packed": SHARED | PACKED}
A_STEP = "float32, before and after a step at 1e-6"
BETWEEN = "bfloat16, padded against packed"


def drift(stage: Stage) -> None:
    trajectories = stage.size.trajectories
    keys = FRUGAL | {"optimizer": {"kwargs": {"lr": 1e-6}}}
    learner = Learner(stage.size.config(stage.model, stage.device, "float32", **keys))
    packing = Packing.of(learner.config.policy, training=False)
    exact = logprobs_of(learner.policy, packing, trajectories)
    train_step(learner, stage.size.batch())
    stage.rows.add(A_STEP, _apart(logprobs_of(learner.policy, packing, trajectories), exact))
    del learner
    stage.forget()
    rounded: dict[str, Float32] = {}
    for name, layout in LAYOUTS.items():
        try:
            policy = PolicyModel(stage.size.config(stage.model, stage.device, "bfloat16", **FRUGAL, **layout))
            packing = Packing.of(
                stage.size.config(stage.model, stage.device, "bfloat16", **layout).policy, training=False
            )
            rounded[name] = logprobs_of(policy, packing, trajectories)
        except Exception as error:  # noqa: BLE001 - the other layouts go on
            stage.rows.add(f"bfloat16, {name}", f"failed: {line(error)}")
        else:
            stage.rows.add(f"bfloat16, {name}", _apart(rounded[name], exact))
    if {"padded", "packed"} <= rounded.keys():
        stage.rows.add(BETWEEN, _apart(rounded["packed"], rounded["padded"]))


def logprobs_of(policy: PolicyModel, packing: Packing, trajectories: Sequence[Trajectory]) -> Float32:
    """[N] of the policy's tokens, one trajectory after the other."""
    found: dict[int, Float32] = {}
    for rows in plan(trajectories, packing):
        packed = pack(trajectories, rows, packing).to(policy.device)
        with torch.no_grad():
            values = policy.forward(packed, LogitsWarper()).logprobs.float().cpu().numpy()
        ends = np.cumsum([trajectories[i].length for i in packed.indices])
        found |= dict(zip(packed.indices, np.split(values, ends[:-1]), strict=True))
    return np.concatenate([found[i] for i in range(len(trajectories))])


def _apart(ours: Float32, theirs: Float32) -> str:
    difference = np.abs(ours - theirs)
    return f"{difference.mean():.2g} nats in the mean, {difference.max():.2g} at most"
