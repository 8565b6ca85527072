"""The groups a run asks for: training prompts by their place in the order, held-out prompts by the version they evaluate."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from headrace.config import Config
from headrace.trajectory import Group
from services.trainer.data import Prompter, PromptOrder, load_problems


class Prompts:
    """Loads the data sets; blocking. Safe to use from several threads, one at a time gets in: tokenizers are not made for more."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._train, held_out = load_problems(config.data)
        self._held_out = held_out[: config.algorithm.max_val_samples]
        algorithm = config.algorithm
        self._order = PromptOrder(len(self._train), algorithm.seed, config.data.shuffle, algorithm.max_num_epochs)
        self._prompter = Prompter(config, tokenizer)
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Training prompts in all epochs."""
        return len(self._order)

    @property
    def can_validate(self) -> bool:
        return bool(self._held_out)

    def train(self, orders: Iterable[int]) -> list[Group]:
        with self._lock:
            places = ((order, *self._order[order]) for order in orders)
            return [self._prompter.train_group(self._train[index], order, epoch) for order, epoch, index in places]

    def validation(self, version: int) -> list[Group]:
        with self._lock:
            return [
                self._prompter.validation_group(problem, version, position)
                for position, problem in enumerate(self._held_out)
            ]
