"""What a trainer holds, for tests that only send weights: a model that changes, and what its log-probabilities truly are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.records.trajectory import Float32, Int32
from headrace_services.refit.probe import choose_token_ids

Weights = Mapping[str, torch.Tensor]


class SourceModel:
    """The source of a refit. `during`: called before the tensor of that index is given."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.probe_ids = choose_token_ids(self.model.config.vocab_size)
        self.during: dict[int, Callable[[], None]] = {}
        self._generator = torch.Generator().manual_seed(3)

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.detach()) for name, tensor in self.model.named_parameters()]

    def metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, "float32", tuple(tensor.shape)) for name, tensor in self._named()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(self._named()):
            if action := self.during.pop(index, None):
                action()
            yield item

    def train(self, size: float = 0.02) -> Weights:
        """A step of that size away from here; returns the weights after it."""
        for _, tensor in self._named():
            tensor.add_(torch.randn(tensor.shape, generator=self._generator) * size)
        return self.weights()

    def weights(self) -> Weights:
        return {name: tensor.clone() for name, tensor in self._named()}

    def logprobs(self, ids: Int32 | Sequence[int], weights: Weights | None = None) -> Float32:
        """[len - 1] log-probabilities of tokens 1.. by transformers, under `weights`, by default the present ones."""
        tokens = torch.as_tensor(np.asarray(ids), dtype=torch.long)[None]
        with torch.no_grad():
            logits = torch.func.functional_call(self.model, dict(weights or self._named()), (tokens,)).logits[0]
        return logits[:-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].numpy()
