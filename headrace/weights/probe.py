"""The probe: a fixed prompt on which a replica's log-probabilities must equal the trainer's before it may lease.

The replicas' workers prove exactly that they hold the trainer's weights (docs/architecture.md). The probe shows that they compute the same
model with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from headrace.config import Config
from headrace.replay.calls import BATCH
from headrace.trajectory import Int32

# Few, because a replica is HEALTHY only when it has computed them; enough to distinguish another model from the trainer's.
PROBE_TOKENS = 32
# The most that a report of the probe holds, and one more, because the first token has no log-probability.
LONGEST_PROBE = 4 * BATCH + 1


class Tolerance(NamedTuple):
    """The allowed differences of the probe's log-probabilities in nats: the largest, and the mean."""

    largest: float
    mean: float


def is_exact(config: Config) -> bool:
    """Whether trainer and replicas both compute in float32, where only the order of sums makes a difference."""
    kv_cache_dtype = config.policy.generation.vllm_cfg.kv_cache_dtype
    return {config.policy.precision, rollout_dtype(config)} == {"float32"} and kv_cache_dtype == "auto"


def rollout_dtype(config: Config) -> str:
    """Return the dtype of the replicas' weights, by torch's name without `torch.`."""
    return config.policy.generation.vllm_cfg.precision or config.policy.precision


def tolerance(config: Config) -> Tolerance:
    """Return the tolerances with which a refit is verified. Two implementations of one model in bfloat16 differ by a few tenths of a nat
    here and there, and by 0.07 in the mean (measured with 135 M parameters): more than a step of training changes. The tolerances leave
    room for larger models, and refuse another model, or one that is computed wrongly."""
    channel = config.weight_channel
    largest = channel.verify_tolerance or (1e-3 if is_exact(config) else 2.0)
    return Tolerance(largest, channel.verify_mean_tolerance or (largest if is_exact(config) else min(0.2, largest)))


def probe_length(max_total_sequence_length: int, window: int | None = None) -> int:
    """Return the number of tokens of a probe for an engine of this length.

    Given the `window` of the model's attention, the probe is longer than that if it may be, because a wrong window shows only beyond it.
    That takes a longer forward, so a trainer gives it only until a replica is verified.
    """
    length = PROBE_TOKENS if window is None else min(window + PROBE_TOKENS, LONGEST_PROBE)
    return max(2, min(length, max_total_sequence_length - 1))


def choose_token_ids(
    vocab_size: int, length: int = PROBE_TOKENS, seed: int = 0, exclude: tuple[int, ...] = ()
) -> Int32:
    """Return [length] int32 ids drawn from [0, vocab_size) without `exclude`, the same for the same arguments.

    Random ids reach rows of the embedding and of the head that ordinary text seldom does. On such text a model is uncertain everywhere, and
    small errors make large differences. Where errors are not small, `repeat_text` is the better probe.
    """
    ids = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), np.asarray(exclude, dtype=np.int32))
    if ids.size == 0 or length < 2:
        raise ValueError(
            f"a probe of {length} tokens from a vocabulary of {ids.size}; needs at least 2 tokens and 1 id"
        )
    return np.random.default_rng(seed).choice(ids, size=length).astype(np.int32)


def repeat_text(prompts: Iterable[Iterable[int]], length: int) -> Int32:
    """Return [length] int32 ids: those of the first prompts one after the other, repeated from the beginning if they are too few."""
    ids = list(itertools.islice(itertools.chain.from_iterable(prompts), length))
    if not ids:
        raise ValueError("a probe without prompts; give at least one")
    return np.resize(np.array(ids, dtype=np.int32), length)
