"""`prompts.json` in a run's folder: how many prompts the run has, and a digest that identifies them.

The trainer writes it each time it starts. `headrace up` shows it, and the next start compares it. The prompts that a checkpoint was trained
on may not change. Before the first checkpoint, a buffer that was filled under another configuration is emptied.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec

from headrace.base.errors import ConfigError, ServiceError
from headrace.base.files import UNREADABLE, atomic_write, cannot_write
from headrace.config import Config
from headrace.config.compare import select_fixed

FILE = "prompts.json"


class PromptCounts(msgspec.Struct, frozen=True):
    """The numbers of a run's prompts. `train` and `validation` count the distinct prompts that it uses, `orders` the training prompts of
    all epochs. Left out of training are `duplicates`, those that are `held_out` for validation, and those that are `too_long`; left out of
    validation are `duplicates_validation` and `too_long_validation`. `unvalidated` are the tasks whose held-out prompts come after the
    first `max_val_samples`. `digest` is the same for the same prompts in the same order."""

    train: int
    validation: int
    orders: int
    digest: str
    duplicates: int = 0
    held_out: int = 0
    too_long: int = 0
    duplicates_validation: int = 0
    too_long_validation: int = 0
    unvalidated: tuple[str, ...] = ()

    def lines(self, config: Config) -> list[str]:
        """Return for people how many prompts the run has, and what ends it first; for an evaluation, how many it asks."""
        validation = _left_out(duplicates=self.duplicates_validation, too_long=self.too_long_validation)
        if config.data.evaluate is not None:
            return [f"prompts: {self.validation} to evaluate on{validation}"]
        train = _left_out(duplicates=self.duplicates, held_out_for_validation=self.held_out, too_long=self.too_long)
        most, shown = config.algorithm.max_val_samples, ""
        if self.validation > most:
            none = f", none of {', '.join(self.unvalidated)}" if self.unvalidated else ""
            shown = f", the first {most} each time ({config.algorithm.name}.max_val_samples){none}"
        return [
            f"prompts: {self.train} to train on{train}, {self.validation} to validate on{validation}{shown}",
            f"steps: {self._steps(config)}",
        ]

    def check(self, config: Config) -> None:
        """Raise `ConfigError` if there are too few prompts for a single step."""
        algorithm = config.algorithm
        needed = algorithm.num_prompts_per_step
        if config.data.evaluate is None and self.orders < needed and algorithm.max_num_steps > 0:
            section = algorithm.name
            kept = (
                f", or set data.remove_duplicates false to keep {self.duplicates} duplicates" if self.duplicates else ""
            )
            raise ConfigError(
                f"data.train has {self.train} prompts, {self.orders} over {section}.max_num_epochs {algorithm.max_num_epochs}, and a step "
                f"takes {section}.num_prompts_per_step {needed}: nothing would be trained; give more prompts or epochs, or at most "
                f"{self.orders} a step{kept}"
            )

    def _steps(self, config: Config) -> str:
        algorithm = config.algorithm
        steps, name = self.orders // algorithm.num_prompts_per_step, algorithm.name
        passes = f"{name}.max_num_epochs {algorithm.max_num_epochs}"
        if steps >= algorithm.max_num_steps:
            return f"{algorithm.max_num_steps} ({name}.max_num_steps), before the prompts are used up ({passes})"
        return f"at most {steps}, when the prompts are used up ({passes}), of {name}.max_num_steps {algorithm.max_num_steps}"


def _left_out(**counts: int) -> str:
    found = [f"{count} {what.replace('_', ' ')}" for what, count in counts.items() if count]
    return f" (left out: {', '.join(found)})" if found else ""


class PromptRecord(msgspec.Struct, frozen=True):
    """The trainer's counts at its start. `fixed` identifies the values of the keys that may not change once there is a checkpoint."""

    counts: PromptCounts
    fixed: str

    @classmethod
    def of(cls, config: Config, counts: PromptCounts) -> PromptRecord:
        keys = json.dumps(select_fixed(config), sort_keys=True)
        return cls(counts, hashlib.sha256(keys.encode()).hexdigest())

    def differs(self, other: PromptRecord | None) -> bool:
        """Whether groups that were made under `other` don't belong to this run; None made no groups."""
        return other is not None and (other.fixed, other.counts.digest) != (self.fixed, self.counts.digest)


def read(run_folder: Path) -> PromptRecord | None:
    """Read the counts; None if no trainer of the run has written any. Raises `ServiceError` for a file that `write` did not write."""
    path = run_folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=PromptRecord)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise ServiceError(f"{path} can't be read ({error}); remove it, and the next start writes it again") from error


def write(run_folder: Path, record: PromptRecord) -> None:
    """Write the counts. Raises `ServiceError` if the folder can't be written."""
    try:
        with atomic_write(run_folder / FILE) as path:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    except OSError as error:
        raise cannot_write(run_folder / FILE, error) from error
