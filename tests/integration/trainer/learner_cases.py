"""What the learner's tests and the processes they start share: configuration and batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config import Config
from headrace.records.trajectory import Trajectory
from headrace_services.trainer.learning.batch import Batch, MicroBatch
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.network.packing import PackedRows, Packing, pack
from tests.support.trainer import batch, trajectory

# dimensions of the smallest models
SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
# every trajectory's advantage is its reward, so that a test can give whichever it wants
REWARD_IS_ADVANTAGE = {
    "num_generations_per_prompt": 1,
    "ppo_epochs": 1,
    "adv_estimator": {"name": "raw_reward", "normalize_advantages": False},
}


def config(model: Path | str, **sections: dict[str, Any]) -> Config:
    """A float32 learner of `model` on a CPU thread; `sections` replace keys of `policy`, `loss_fn`, …

    Without `grpo` or `ppo`, a trajectory's advantage is its reward and a batch is one optimizer step.
    """
    policy = {
        "model_name": str(model),
        "precision": "float32",
        "train_micro_batch_size": 64,
        "max_total_sequence_length": 64,
        "generation": {"max_new_tokens": 16},
        "optimizer": {"kwargs": {"lr": 1e-3}},
    }
    algorithm = {} if {"grpo", "ppo"} & sections.keys() else {"ppo": REWARD_IS_ADVANTAGE}
    return Config.model_validate(
        {
            **algorithm,
            **sections,
            "policy": {**policy, **sections.get("policy", {})},
            "loss_fn": {"reference_policy_kl_penalty": 0, **sections.get("loss_fn", {})},
            "trainer": {"device": "cpu", "num_threads": 1, **sections.get("trainer", {})},
        }
    )


def sampled(
    count: int, seed: int = 0, vocabulary: int = 20, prompts: int | None = None
) -> tuple[list[Trajectory], list[float]]:
    """Trajectories `'g'[0]`, `'g'[1]`, … and their rewards: random prompts (of `prompts` groups in turn, or all different) and
    completions of unequal lengths, some tokens not the policy's."""
    rng = np.random.default_rng(seed)
    found: list[Trajectory] = []
    rewards = []
    for place in range(count):
        length = int(rng.integers(1, 17))
        own = (rng.random(length) < 0.9).astype(np.uint8)
        logprobs = np.zeros(length, np.float32)
        logprobs[own > 0] = -rng.uniform(0.5, 4, int(own.sum()))
        prompt = rng.integers(0, vocabulary, rng.integers(1, 12))
        if prompts is not None and place % (count // prompts):
            prompt = found[-1].prompt_token_ids
        completion = rng.integers(0, vocabulary, length)
        rewards.append(float(rng.normal()))
        found.append(trajectory(prompt, completion, logprobs, own, index=place))
    return found, rewards


def random_batch(count: int, seed: int = 0, prompts: int | None = None) -> Batch:
    """A batch of what `sampled` gives, scored by the environment `math`."""
    return batch(*sampled(count, seed, prompts=prompts), environment="math")


def unpacked(trajectories: Sequence[Trajectory]) -> PackedRows:
    """One padded micro-batch of all `trajectories` in their order, a row each."""
    rows = tuple(((i,),) for i in range(len(trajectories)))
    return pack(trajectories, rows, Packing(mode="padded", paths=len(trajectories), tokens=None))


def by_hand(whole: Batch, old_logprobs: torch.Tensor) -> MicroBatch:
    """The columns of a micro-batch that is the whole batch, where every token counts and each one's advantage is its reward."""
    trajectory, rewards = torch.from_numpy(whole.trajectory), torch.from_numpy(whole.rewards).float()
    ones = torch.ones(trajectory.numel())
    return MicroBatch(
        trajectory=trajectory,
        mask=ones,
        ages=0 * ones,
        multipliers=torch.ones(len(whole)),
        rewards=rewards,
        advantages=rewards[trajectory],
        rollout_logprobs=torch.from_numpy(whole.rollout_logprobs),
        old_logprobs=old_logprobs,
    )


def token_ids(one: Trajectory) -> np.ndarray:
    """Prompt and completion [L] int64."""
    return np.concatenate([one.prompt_token_ids, one.completion_token_ids]).astype(np.int64)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    """A copy of the policy's."""
    return {name: tensor.clone() for name, tensor in learner.policy.weights()}


def shaken(model: Path, folder: Path) -> Path:
    """A model of the family of `model`, with its tokenizer, that writes otherwise: in `folder`."""
    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    other.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder
