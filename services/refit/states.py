"""Where trainer and engine begin to compute differently: the states between a model's layers, compared once a replica has failed the probe.

States are compared by sketches: at a few tokens of the probe, their products with a few fixed random directions. An error of a state
changes its sketch by as much, relative to its size, and the sketches of a model are small enough for a message.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

PLACES = 8
DIRECTIONS = 8
# How much sketches may differ, relative to their size: where both compute in float32, the order of sums changes them by up to 1e-5. The
# last is for a model in which the effect of rounding to bfloat16 is not known.
EXACT = 1e-4
NOT_KNOWN = 0.25

# by point, then by how the output can be read, then by place and direction: [points][readings][places * DIRECTIONS]
Sketches = list[list[list[float]]]


class StateReference(msgspec.Struct, frozen=True):
    """The trainer's states on the probe: `sketches` [points * places * DIRECTIONS] and how much those of a replica may differ, `bounds`
    [points]. The points are before the first layer, after each layer, and after the norm that follows the last."""

    sketches: NDArray[np.float32]
    bounds: NDArray[np.float32]

    @property
    def layers(self) -> int:
        return self.bounds.size - 2


def choose_places(length: int) -> list[int]:
    """Return the tokens whose states are compared, of a probe of `length` tokens. The trainer needs no state of the last one."""
    return sorted({int(place) for place in np.linspace(0, max(0, length - 2), PLACES).round()})


def sketch(states: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the products [L, DIRECTIONS] of `states` [L, H] with the directions, which are the same for the same H."""
    directions = np.random.default_rng(0).standard_normal((states.shape[1], DIRECTIONS), dtype=np.float32)
    return states @ directions


def apart(one: Sequence[float] | NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return by how much two sketches of one point differ: at the place where that is most, relative to the size of `other`."""
    ours, theirs = (np.asarray(it, dtype=np.float64).reshape(-1, DIRECTIONS) for it in (one, other))
    return float((np.linalg.norm(ours - theirs, axis=1) / np.maximum(np.linalg.norm(theirs, axis=1), 1e-30)).max())


def first_difference(reference: StateReference, found: Sketches, layers: str) -> str:
    """Describe where the states that a replica `found` first differ from the trainer's. `layers` is the engine's name of its list of
    layers."""
    points = reference.sketches.reshape(reference.bounds.size, -1)
    for point, (theirs, bound) in enumerate(zip(points, reference.bounds, strict=True)):
        difference = min(apart(ours, theirs) for ours in found[point])
        if difference <= bound:
            continue
        by = f"by {difference:.3g} of its size, where {bound:.3g} is allowed"
        if point == 0:
            return f"the states differ before the first layer, {layers}.0 ({by}): in the embedding, or in its scale"
        if point > reference.layers:
            return f"the states differ first after the last layer ({by}): in the norm that follows it"
        return f"the first layer whose output differs is {layers}.{point - 1} ({by})"
    return "the states agree up to and after the last norm: the difference is in the head (lm_head, or a scale or cap of its logits)"
