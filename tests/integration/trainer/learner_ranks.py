"""Processes of the tests: the steps of several ranks."""

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace_services.trainer.control.rank import TrainerRank
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.learning.batch import Batch, gather
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.trainer.learner_cases import config, random_batch
from tests.support.episodes import random_episodes
from tests.support.trainer import batch

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
# the rank of the adapter's matrices is odd, so that ranks hold unequal parts of them
SETTINGS["lora"] = {**SETTINGS["grpo"], "policy": {**POLICY, "lora_cfg": {"enabled": True, "dim": 3}}}
SETTINGS["episodes"] = {**SETTINGS["grpo"], "loss_fn": {**SETTINGS["grpo"]["loss_fn"], "token_level_loss": False}}
STEPS, SAVED, COUNT = 2, 1, 8  # a checkpoint after so many of the steps
TOKEN_COLUMNS = (
    "mask_reasons",
    "policy_logprobs",
    "ratios",
    "clipped",
    "importance_weights",
    "entropies",
    "token_losses",
    "token_loss_gradients",
    "token_value_losses",
)


def settings(kind: str, model: Path | str, teacher: Path | str) -> Config:
    sections = copy.deepcopy(SETTINGS[kind])
    if kind == "opd":
        sections["grpo"]["adv_estimator"]["teacher_model_name"] = str(teacher)
    return config(model, **sections)


def whole_batch(step: int, kind: str) -> Batch:
    if kind == "episodes":
        return batch(*random_episodes(COUNT, step), environment="math")
    return random_batch(COUNT, step, prompts=2)


def share(whole: Batch, step: int) -> Batch:
    """Unequal shares that divide groups, so that one rank has more micro-batches; in the last step the second has none at all."""
    cut = COUNT if step == STEPS - 1 else 5
    return whole.take(range(cut) if dist.get_rank() == 0 else range(cut, COUNT))


def train(model: Path, teacher: Path, folder: Path, kind: str) -> None:
    chosen = settings(kind, model, teacher)
    learner = Learner(chosen)
    ids = np.arange(20, dtype=np.int32)

    def steps(learner: Learner, chosen: range) -> list[dict[str, float]]:
        batches = [share(whole_batch(step, kind), step) for step in chosen]
        found = [train_step(learner, each) for each in batches]
        for step, each in zip(chosen, batches, strict=True):
            whole = gather(each, learner.ranks)
            if dist.get_rank() == 0:
                columns = {name: getattr(whole, name) for name in TOKEN_COLUMNS}
                present = {name: values for name, values in columns.items() if values is not None}
                np.savez(folder / f"{kind}{step}.npz", **present)  # type: ignore[arg-type]
        return found

    metrics = steps(learner, range(SAVED))
    if dist.get_rank() == 0:
        (folder / kind).mkdir()
    dist.barrier()
    learner.snapshot()(folder / kind)
    dist.barrier()  # all ranks read what each has written
    metrics += steps(learner, range(SAVED, STEPS))
    again = steps(Learner(chosen, folder / kind), range(SAVED, STEPS))
    weights = {name: tensor.cpu() for name, tensor in learner.policy.weights()}
    out = {"metrics": metrics, "again": again, "probe": learner.probe(ids).tolist(), "version": learner.version}
    (folder / f"{kind}{dist.get_rank()}.json").write_text(json.dumps(out))
    if dist.get_rank() == 0:
        torch.save(weights, folder / f"{kind}.pt")


def refuse(model: Path, folder: Path) -> None:
    refused = []
    for reward, logprobs in ((float("nan"), None), (-1.0, -1e30)):
        learner = Learner(config(model, loss_fn={"prev_logprobs_source": "generation"}))
        whole = random_batch(6, 5)
        whole.rewards[4] = reward
        if logprobs is not None:
            whole.rollout_logprobs[whole.tokens_of([4])] = logprobs
        try:
            train_step(learner, whole.take(range(3) if dist.get_rank() == 0 else range(3, 6)))
        except ServiceError as error:
            refused.append(str(error))
    (folder / f"refused{dist.get_rank()}.json").write_text(json.dumps(refused))


def save_to_a_full_disk(model: Path, folder: Path) -> None:
    """What each rank says of a checkpoint of which the second can't write its part."""
    rank = TrainerRank(config(model), Ranks(), lambda keys: [])
    rank.load(None)
    place = folder / f"disk{dist.get_rank()}"
    if dist.get_rank() == 0:
        place.mkdir()
    rank.save(str(place))
    said = ""
    try:
        while not rank.is_saved():
            time.sleep(0.01)
    except ServiceError as error:
        said = str(error)
    (folder / f"unwritten{dist.get_rank()}.json").write_text(json.dumps(said))


def run_rank(model: Path, teacher: Path, folder: Path, kinds: Sequence[str]) -> None:
    """What came out of steps of these kinds is in `folder`."""
    dist.init_process_group("gloo")
    for kind in kinds:
        train(model, teacher, folder, kind)
    refuse(model, folder)
    save_to_a_full_disk(model, folder)
    dist.destroy_process_group()
