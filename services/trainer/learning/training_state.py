"""The trainer's state in a checkpoint besides the weights, written by `torch.distributed.checkpoint`: counters, optimizers, schedules."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from headrace.errors import ServiceError
from headrace_services.trainer.distributed import process_group
from headrace_services.trainer.files import cannot_write_checkpoint
from headrace_services.trainer.learning.optimizer import ModelOptimizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Counters:
    """The run's counters: trainer steps taken (the weight version), trajectories trained on, and tokens that counted in the policy's
    loss, each since the initial model."""

    current_step: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0


def save_state(folder: Path, counters: Counters, optimizers: Mapping[str, ModelOptimizer], *, moments: bool) -> None:
    """A collective: write `folder`. There is no random state, because a step draws no random numbers. Raises `ServiceError` on every rank
    if any of them can't write."""
    state = {
        **dataclasses.asdict(counters),
        "trained": {name: optimizer.state(moments=moments) for name, optimizer in optimizers.items()},
    }
    try:
        with process_group():
            dcp.save(state, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        raise cannot_write_checkpoint(folder.parent, _cause(error)) from error


def load_state(folder: Path, optimizers: Mapping[str, ModelOptimizer]) -> Counters:
    """A collective: load what `save_state` wrote into `optimizers`; returns the counters.

    Raises `ServiceError` if the state can't be read, and if the checkpoint lacks one of the models.
    """
    reader = dcp.FileSystemReader(folder)
    try:
        saved = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = dataclasses.asdict(Counters())
        state["trained"] = {}
        for name, optimizer in optimizers.items():
            if f"trained.{name}.scheduled" not in saved:
                raise ServiceError(
                    f"checkpoint {folder.parent} holds no state of a {name} model: another algorithm or an older build wrote it; "
                    "give run.id another name to start anew"
                )
            moments = any(key.startswith(f"trained.{name}.optimizer.") for key in saved)
            state["trained"][name] = optimizer.empty_state(moments=moments)
        with process_group():
            dcp.load(state, storage_reader=reader)
    except (OSError, EOFError, pickle.UnpicklingError, dcp.CheckpointException) as error:
        raise ServiceError(
            f"checkpoint {folder.parent}: its training state can't be read ({_cause(error)!r}); remove this checkpoint "
            "to go on from an earlier one"
        ) from error
    for name, optimizer in optimizers.items():
        if "optimizer" not in state["trained"][name] and state["trained"][name]["scheduled"]:
            logger.warning("%s: no optimizer state of the %s model; its moments start from zero", folder, name)
        optimizer.restore(state["trained"][name])
    return Counters(**{field.name: int(state[field.name]) for field in dataclasses.fields(Counters)})


def _cause(error: BaseException) -> BaseException:
    """The error of the first rank that failed."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error
