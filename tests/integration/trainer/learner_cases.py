"""What the learner's tests and the processes they start share: configuration and trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config import Config
from services.trainer.learning.experience import Experience
from services.trainer.network.rows import TokenSequence

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


def experience(
    prompt: Sequence[int] | np.ndarray,
    completion: Sequence[int] | np.ndarray,
    gen: Sequence[float] | np.ndarray,
    reward: float = 1.0,
    own: Sequence[int] | np.ndarray | None = None,
    place: int = 0,
) -> Experience:
    """A trajectory; `gen` are the log-probabilities of those completion tokens that are the policy's own."""
    policy = np.array(own if own is not None else [1] * len(completion), np.uint8)
    count = int(policy.sum())
    return Experience(
        name=f"trajectory 'g'[{place}]",
        group=place,
        place=place,
        tokens=TokenSequence(np.array(prompt, np.int32), np.array(completion, np.int32), policy),
        gen=np.array(gen, np.float32),
        mask=np.ones(count, np.bool_),
        behind=np.zeros(count, np.float32),
        reward=reward,
        components={},
        environment="math",
        multiplier=1.0,
        truncated=False,
    )


def experiences(count: int, seed: int = 0, vocabulary: int = 20, prompts: int | None = None) -> list[Experience]:
    """Random prompts (of `prompts` groups in turn, or all different) and completions of unequal lengths, some tokens not the policy's."""
    rng = np.random.default_rng(seed)
    found: list[Experience] = []
    for place in range(count):
        length = int(rng.integers(1, 17))
        own = (rng.random(length) < 0.9).astype(np.uint8)
        gen = -rng.uniform(0.5, 4, int(own.sum())).astype(np.float32)
        prompt = rng.integers(0, vocabulary, rng.integers(1, 12))
        if prompts is not None and place % (count // prompts):
            prompt = found[-1].tokens.prompt
        found.append(experience(prompt, rng.integers(0, vocabulary, length), gen, float(rng.normal()), own, place))
    return found


def shaken(model: Path, folder: Path) -> Path:
    """A model of the family of `model`, with its tokenizer, that writes otherwise: in `folder`."""
    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    other.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def placed(batch: Sequence[Experience]) -> list[Experience]:
    """One batch of these, in this order."""
    return [dataclasses.replace(e, place=i, group=i, name=f"trajectory 'g'[{i}]") for i, e in enumerate(batch)]
