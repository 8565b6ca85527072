"""What the tests of rows and the processes they start share: model sizes, layouts and sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from learner_cases import config

from services.trainer.network.rows import TokenSequence

SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
}
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


def groups(seed: int = 0) -> list[TokenSequence]:
    """Groups of unequal completions, a lone sequence, one-token prompts and completions, tokens of an environment."""
    rng = np.random.default_rng(seed)
    found = []
    for size, prompt_length in ((5, 11), (1, 3), (3, 1), (4, 7)):
        prompt = rng.integers(0, 20, prompt_length).astype(np.int32)
        for i in range(size):
            length = 1 if i == 0 else int(rng.integers(1, 17))
            policy = (rng.random(length) < 0.8).astype(np.uint8)
            policy[0 if i < 2 else -1] = 1
            found.append(TokenSequence(prompt, rng.integers(0, 20, length).astype(np.int32), policy))
    return [found[i] for i in rng.permutation(len(found))]


def settings(model: Path, mode: dict[str, Any]) -> Any:
    return config(model, policy={"train_micro_batch_size": 4, **mode})


def weights_of(sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=s.policy_tokens) for s in sequences]
