"""What the tests of packing and the processes they start share: model sizes, ways of packing and trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.config import Config
from headrace.records.trajectory import Trajectory
from tests.integration.trainer.learner_cases import SMALL, config
from tests.support.trainer import trajectory

SIZES: dict[str, Any] = {**SMALL, "max_position_embeddings": 128}
MODES: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 100, "sequence_length_round": 8}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "sequence_length_round": 16}},
    "packed-first-fit": {
        "sequence_packing": {"enabled": True, "train_mb_tokens": 100, "algorithm": "first_fit_decreasing"}
    },
    "shared": {"share_prompts": True},
    "shared-dynamic": {"share_prompts": True, "dynamic_batching": {"enabled": True, "train_mb_tokens": 130}},
    "shared-packed": {"share_prompts": True, "sequence_packing": {"enabled": True, "train_mb_tokens": 90}},
    "chunked": {"logprob_chunk_size": 7},
    "recomputed": {"activation_checkpointing": True},
    "all": {
        "share_prompts": True,
        "sequence_packing": {"enabled": True, "train_mb_tokens": 128},
        "logprob_chunk_size": 5,
        "activation_checkpointing": True,
    },
}


def groups(seed: int = 0) -> list[Trajectory]:
    """Groups of unequal completions, a lone trajectory, one-token prompts and completions, tokens of an environment."""
    rng = np.random.default_rng(seed)
    found = []
    for size, prompt_length in ((5, 11), (1, 3), (3, 1), (4, 7)):
        prompt = rng.integers(0, 20, prompt_length).astype(np.int32)
        for i in range(size):
            length = 1 if i == 0 else int(rng.integers(1, 17))
            own = (rng.random(length) < 0.8).astype(np.uint8)
            own[0 if i < 2 else -1] = 1
            found.append(trajectory(prompt, rng.integers(0, 20, length), own=own))
    return [found[i] for i in rng.permutation(len(found))]


def settings(model: Path, mode: dict[str, Any]) -> Config:
    return config(model, policy={"train_micro_batch_size": 4, **mode})


def own_tokens(trajectory: Trajectory) -> int:
    """How many tokens the policy wrote."""
    return int(np.count_nonzero(trajectory.loss_mask))


def weights_of(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """A random weight of each policy token of each trajectory."""
    rng = np.random.default_rng(1)
    return [rng.normal(size=own_tokens(one)) for one in trajectories]


def factors(weights: Sequence[np.ndarray], order: Sequence[int]) -> torch.Tensor:
    """[N] float64: the weights of a micro-batch's tokens, whose trajectories come in `order`."""
    return torch.from_numpy(np.concatenate([np.empty(0), *(weights[i] for i in order)]))
