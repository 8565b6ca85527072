"""The groups a run asks for: training prompts by their place in the order, held-out prompts by the version they evaluate."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.trajectory import Group
from services.trainer.data import Problem, Prompter, PromptOrder, load_problems

log = logging.getLogger(__name__)


class Prompts:
    """Loads the data sets; blocking. Safe to use from several threads, one at a time gets in: tokenizers are not made for more."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._prompter = Prompter(config, tokenizer)
        train, held_out = load_problems(config.data)
        if config.data.overlong_prompts == "leave_out":
            train, held_out = self._fitting(train, "data.train"), self._fitting(held_out, "data.validation")
        self._train = train
        self._held_out = held_out[: config.algorithm.max_val_samples]
        algorithm = config.algorithm
        self._order = PromptOrder(len(self._train), algorithm.seed, config.data.shuffle, algorithm.max_num_epochs)
        self._lock = threading.Lock()

    def _fitting(self, problems: list[Problem], key: str) -> list[Problem]:
        fitting = [problem for problem in problems if self._prompter.fits(problem)]
        if problems and not fitting:
            raise ConfigError(
                f"{key}: none of its {len(problems)} prompts fits; raise data.max_input_seq_length or "
                "policy.max_total_sequence_length"
            )
        if len(fitting) < len(problems):
            log.warning(
                "%s: %d of %d problems are left out: their prompts are too long",
                key,
                len(problems) - len(fitting),
                len(problems),
            )
        return fitting

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
