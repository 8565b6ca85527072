"""The groups a run asks for: training prompts by their place in the order, held-out prompts by the version they evaluate."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.trajectory import Group
from services.trainer.data import EvenOrder, Problem, Prompter, PromptOrder, load_problems

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
        self._order = _order_of(self._train, config)
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


def _order_of(train: Sequence[Problem], config: Config) -> PromptOrder | EvenOrder:
    """One line through all problems, or one that takes its prompts from each data set in turn."""
    data, how = config.data, (config.algorithm.seed, config.data.shuffle, config.algorithm.max_num_epochs)
    if not data.use_multiple_dataloader:
        return PromptOrder(len(train), *how)
    counts = [sum(problem.source == number for problem in train) for number in range(len(data.train))]
    if not all(counts):
        raise ConfigError(
            f"data.train[{counts.index(0)}] has no problem left to draw from (those of validation and of the sets before it are "
            "taken out): leave the set out, or set data.use_multiple_dataloader to false"
        )
    return EvenOrder(counts, config.prompts_of_each_set, *how)
