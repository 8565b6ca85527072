"""A learner's weights as the sender takes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headrace_services.trainer.learning.learner import Learner


class LearnerSource:
    """The source of a refit: the model's weights, or with `adapter_alone` those of its adapter."""

    def __init__(self, learner: Learner, *, adapter_alone: bool = False) -> None:
        self._learner, self._adapter_alone = learner, adapter_alone

    def metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        shapes = self._learner.policy.weight_shapes(adapter_alone=self._adapter_alone)
        return [(name, "float32", shape) for name, shape in shapes]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._learner.policy.weights(adapter_alone=self._adapter_alone)
