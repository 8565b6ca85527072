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
from headrace.records.trajectory import Float32, Int32
from headrace.replay.base_client import BATCH

# Few, because a replica is HEALTHY only when it has computed them; enough to distinguish another model from the trainer's.
PROBE_TOKENS = 32
# The most that a report of the probe holds, and one more, because the first token has no log-probability.
LONGEST_PROBE = 32 * BATCH + 1
# The most logits of a probe. The engine computes those of all its tokens at once, in memory that it has not set aside: 1 GiB, and again as
# much for their log-probabilities.
MOST_LOGITS = 2**28


# Two honest implementations in bfloat16 differ by at most this many times what rounding alone changes in one of them
# (`Learner.probe_rounded`). Measured were up to 2.6 times for the largest difference and 1.8 for the mean, in ten dense families of tiny
# models, and 0.9 in a model of 135 M parameters. In tiny models a wrong rotary table, window or cap changes 20 to 100 times as much.
ROUNDING_MULTIPLE = 4.0


class Differences(NamedTuple):
    """Differences of log-probabilities of the probe in nats, measured or allowed: the largest, and the mean."""

    largest: float
    mean: float


def differences(one: Float32, other: Float32) -> Differences:
    apart = np.abs(one.astype(np.float64) - other)
    return Differences(float(apart.max()), float(apart.mean()))


def is_exact(config: Config) -> bool:
    """Whether trainer and replicas both compute in float32, where only the order of sums makes a difference."""
    kv_cache_dtype = config.policy.generation.vllm_cfg.kv_cache_dtype
    return {config.policy.precision, rollout_dtype(config)} == {"float32"} and kv_cache_dtype == "auto"


def rollout_dtype(config: Config) -> str:
    """Return the dtype of the replicas' weights, by torch's name without `torch.`."""
    return config.policy.rollout_precision[1]


def only_rounds(config: Config) -> bool:
    """Whether what makes trainer and replicas differ is rounding to bfloat16, and nothing else."""
    return not is_exact(config) and config.policy.generation.vllm_cfg.kv_cache_dtype != "fp8"


def is_bounded_by_rounding(config: Config) -> bool:
    """Whether `tolerance` can use what rounding changes: nothing else makes a difference, and no key sets both bounds."""
    channel = config.weight_channel
    return only_rounds(config) and None in (channel.verify_tolerance, channel.verify_mean_tolerance)


def tolerance(config: Config, rounding: Differences | None = None) -> Differences:
    """Return the differences with which a refit is verified; `rounding` is what rounding alone changes under the same weights, where it is
    known. Two implementations of one model in bfloat16 differ by a few tenths of a nat here and there, and by 0.07 in the mean (measured
    with 135 M parameters): more than a step of training changes. Small models differ by much less."""
    channel = config.weight_channel
    if is_exact(config):
        usual = Differences(1e-3, channel.verify_tolerance or 1e-3)
    else:
        usual = Differences(2.0, 0.2)
        if rounding is not None:
            usual = Differences(
                *(min(most, max(1e-3, ROUNDING_MULTIPLE * own)) for most, own in zip(usual, rounding, strict=True))
            )
    largest = channel.verify_tolerance or usual.largest
    return Differences(largest, channel.verify_mean_tolerance or min(usual.mean, largest))


def probe_length(max_total_sequence_length: int, vocab_size: int, window: int | None = None) -> int:
    """Return the number of tokens of a probe for an engine of this length and a model of this vocabulary.

    Given the `window` of the model's attention, the probe is longer than that if it may be, because a wrong window shows only beyond it.
    That takes a longer forward, so a trainer gives it only until a replica is verified.
    """
    length = PROBE_TOKENS
    if window is not None:
        length = min(window + PROBE_TOKENS, LONGEST_PROBE, max(PROBE_TOKENS, MOST_LOGITS // vocab_size))
    return max(2, min(length, max_total_sequence_length - 1))


def unseen_window(max_total_sequence_length: int, length: int, window: int | None) -> str | None:
    """Return why a probe of this `length` can't tell whether a replica has the model's `window`, although trajectories may be longer than
    that; None if it can. The last token that has a log-probability sees `length` - 1 tokens."""
    if window is None or length - 1 > window or max_total_sequence_length - 1 <= window:
        return None
    return (
        f"the model's layers attend to a window of {window} tokens, and the probe has {length}, because the engine would need too much "
        "memory for the logits of more: that replicas compute the window as the trainer does is not verified. Watch "
        "token_mult_prob_error, or set policy.max_total_sequence_length to at most the window"
    )


def choose_token_ids(vocab_size: int, length: int = PROBE_TOKENS) -> Int32:
    """Return [length] int32 ids drawn from [0, vocab_size), the same for the same arguments.

    Random ids reach rows of the embedding and of the head that ordinary text seldom does. On such text a model is uncertain everywhere, and
    small errors make large differences. Where errors are not small, `repeat_text` is the better probe.
    """
    return np.random.default_rng(0).choice(vocab_size, size=length).astype(np.int32)


def repeat_text(prompts: Iterable[Iterable[int]], length: int) -> Int32:
    """Return [length] int32 ids: those of the first prompts one after the other, repeated from the beginning if they are too few."""
    ids = list(itertools.islice(itertools.chain.from_iterable(prompts), length))
    if not ids:
        raise ValueError("a probe without prompts; give at least one")
    return np.resize(np.array(ids, dtype=np.int32), length)
