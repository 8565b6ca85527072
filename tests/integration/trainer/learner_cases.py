"""What the learner's tests and the processes they start share: configuration and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import Config
from services.trainer.batch import Sample


def config(model: Path | str, **sections: dict[str, Any]) -> Config:
    """A float32 learner of `model` on a CPU thread; `sections` replace keys of `policy`, `loss_fn`, …"""
    policy = {
        "model_name": str(model),
        "precision": "float32",
        "train_micro_batch_size": 64,
        "max_total_sequence_length": 64,
        "generation": {"max_new_tokens": 16},
        "optimizer": {"kwargs": {"lr": 1e-3}},
    }
    return Config.model_validate(
        {
            **sections,
            "policy": {**policy, **sections.get("policy", {})},
            "loss_fn": {"reference_policy_kl_penalty": 0, **sections.get("loss_fn", {})},
            "trainer": {"device": "cpu", "num_threads": 1, **sections.get("trainer", {})},
        }
    )


def samples(count: int, seed: int = 0, vocabulary: int = 20) -> list[Sample]:
    """Random prompts and completions of unequal lengths, some tokens not the policy's own."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(rng.integers(1, 17))
        mask = (rng.random(length) < 0.9).astype(np.uint8)
        found.append(
            Sample(
                prompt_token_ids=rng.integers(0, vocabulary, rng.integers(1, 12)).astype(np.int32),
                completion_token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
                behaviour_logprobs=-rng.uniform(0.5, 4, length).astype(np.float32),
                loss_mask=mask,
                advantage=float(rng.normal()),
                loss_multiplier=1.0,
            )
        )
    return found
