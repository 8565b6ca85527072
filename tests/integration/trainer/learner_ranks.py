"""Process of the tests, under torchrun: the steps of several ranks. Arguments: model, teacher, folder for what came out."""

import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from learner_cases import config, experiences
from services.trainer.learning.experience import Experience

from headrace.config import Config
from headrace.errors import ServiceError
from services.trainer.learning.learner import Learner

POLICY = {
    "train_micro_batch_size": 2,
    "train_global_batch_size": 4,
    # an eps above the rounding errors of the smallest gradients, which AdamW otherwise blows up to lr
    "optimizer": {"kwargs": {"lr": 1e-3, "eps": 1e-4}},
}
BATCH = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {
        "grpo": {**BATCH, "seq_logprob_error_threshold": 30.0},
        "policy": POLICY,
        "loss_fn": {"reference_policy_kl_penalty": 0.1, "use_importance_sampling_correction": True},
    },
    "ppo": {
        "ppo": {**BATCH, "ppo_epochs": 2, "adv_estimator": {"gae_lambda_value": 1.0}},
        "policy": POLICY,
        "value": {"optimizer": POLICY["optimizer"], "train_global_batch_size": 8},
        "loss_fn": {"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True},
    },
    "opd": {
        "grpo": {**BATCH, "adv_estimator": {"name": "opd"}},
        "policy": POLICY,
        "loss_fn": {"reference_policy_kl_penalty": 0.1},
    },
}
STEPS, COUNT = 4, 8


def settings(kind: str, model: Path | str, teacher: Path | str) -> Config:
    sections = copy.deepcopy(SETTINGS[kind])
    if kind == "opd":
        sections["grpo"]["adv_estimator"]["teacher_model_name"] = str(teacher)
    return config(model, **sections)


def share(batch: list[Experience], step: int) -> list[Experience]:
    """Unequal shares that divide groups, so that one rank has more micro-batches; in the last step the second has none at all."""
    cut = COUNT if step == STEPS - 1 else 5
    return batch[:cut] if dist.get_rank() == 0 else batch[cut:]


def batches() -> list[list[Experience]]:
    return [experiences(COUNT, seed, prompts=2) for seed in range(STEPS)]


def train(model: str, teacher: str, folder: Path, kind: str) -> None:
    chosen = settings(kind, model, teacher)
    learner = Learner(chosen)
    ids = np.arange(20, dtype=np.int32)
    shares = [share(batch, step) for step, batch in enumerate(batches())]
    metrics = [learner.step(batch) for batch in shares[:2]]
    if dist.get_rank() == 0:
        (folder / kind).mkdir()
    dist.barrier()
    learner.save(folder / kind)
    metrics += [learner.step(batch) for batch in shares[2:]]
    resumed = Learner(chosen, folder / kind)
    again = [resumed.step(batch) for batch in shares[2:]]
    weights = {name: tensor.cpu() for name, tensor in learner.iter_weights()}
    out = {"metrics": metrics, "again": again, "probe": learner.probe(ids).tolist(), "version": learner.version}
    (folder / f"{kind}{dist.get_rank()}.json").write_text(json.dumps(out))
    if dist.get_rank() == 0:
        torch.save(weights, folder / f"{kind}.pt")


def refuse(model: str, folder: Path) -> None:
    refused = []
    for bad in ({"reward": float("nan")}, {"gen": -1e30}):
        learner = Learner(config(model, loss_fn={"prev_logprobs_source": "generation"}))
        own = experiences(6, 5)[:3] if dist.get_rank() == 0 else experiences(6, 5)[3:]
        if dist.get_rank() == 1:
            change = {"reward": -1.0, **bad}
            if "gen" in change:
                change["gen"] = np.full_like(own[1].gen, change["gen"])
            own[1] = dataclasses.replace(own[1], **change)
        try:
            learner.step(own)
        except ServiceError as error:
            refused.append(str(error))
    (folder / f"refused{dist.get_rank()}.json").write_text(json.dumps(refused))


def main(model: str, teacher: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    for kind in SETTINGS:
        train(model, teacher, folder, kind)
    refuse(model, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
