"""What the algorithms work on: the tokens that the policy wrote, one after the other, whatever rows they were computed in.

A sequence is one trajectory; its tokens are those of its completion that the policy wrote. Tokens of the environment are
nowhere here, so nothing depends on padding, packing or the split into micro-batches. A sequence is never divided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities [N] float32 of the same tokens, all but `curr` without a gradient.

    `curr` is the trainer's, of logits with temperature and top-k/top-p applied as in sampling; `unfiltered` the same before
    top-k/top-p (None: they are the same), which the KL terms use. `prev` is the ratio's denominator, `gen` the behaviour
    policy's, `start` the trainer's at the start of the step, which the metrics and importance weights compare with `gen`.
    `ref` is the reference policy's, unfiltered; None without one.
    """

    curr: Tensor
    prev: Tensor
    gen: Tensor
    start: Tensor
    ref: Tensor | None = None
    unfiltered: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of one micro-batch: N tokens of B sequences.

    Per token [N]: `sequence` int64, ascending, the place of its sequence; `advantages` float32; `mask` float32, 1 where it counts
    and 0 where it is over age (it stays in what is computed over a whole sequence); `behind` float32, how many versions the
    weights that sampled it are behind those at the start of the step. Per sequence [B] float32: `multiplier`, its weight in the
    loss; `reward`, its total reward after scaling and shaping.
    """

    sequence: Tensor
    advantages: Tensor
    mask: Tensor
    behind: Tensor
    multiplier: Tensor
    reward: Tensor


@dataclasses.dataclass(frozen=True)
class GlobalCounts:
    """What losses and metrics are divided by, over all micro-batches and ranks of one optimizer step.

    `tokens` is T, the sum of mask times multiplier; `sequences` is N, the sum of the multipliers of sequences with at least one
    token; `positive_tokens` is T over the sequences whose reward is above 0.
    """

    tokens: float
    sequences: float
    positive_tokens: float


@dataclasses.dataclass(frozen=True)
class LossParts:
    """A micro-batch's share of an optimizer step.

    `loss` is a scalar with its gradient. `sums`, scalars float64 by metric name, add up over micro-batches and ranks to the
    metrics of the whole; `minima` and `maxima` are combined by min and max, and hold inf and -inf where no token counts.
    Which names there are is decided by the configuration alone.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    minima: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Episode:
    """One trajectory as the advantage estimators see it.

    `name` is what errors call it, `group` its group's place in the batch, `index` its own place in the batch (groups one after
    the other). `reward` is the total after scaling and shaping, `components` the scaled `reward/<name>` by name. Per policy
    token [T] float64, None where the configuration does not ask for it: `start`, `ref` log-probabilities and `values` (before
    each token). `mask` [T] is False on tokens over age, `multiplier` the weight of the sequence in the loss.
    """

    name: str
    group: int
    index: int
    length: int
    reward: float
    components: Mapping[str, float]
    mask: Bool
    multiplier: float
    start: Float64 | None = None
    ref: Float64 | None = None
    values: Float64 | None = None


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Of each episode, in the order given: `advantages` and, for a value model, `returns`, each [T] float64. `metrics` are
    global."""

    advantages: tuple[Float64, ...]
    returns: tuple[Float64, ...] | None
    metrics: Mapping[str, float]
