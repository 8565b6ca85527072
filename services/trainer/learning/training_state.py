"""What a checkpoint holds of the trainer besides weights, in `torch.distributed.checkpoint`: counters, optimizers, schedules."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from headrace.errors import ServiceError
from services.trainer.files import cannot_write_checkpoint
from services.trainer.learning.optimizer import Trained

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Counters:
    """How far a run is: trainer steps taken (the version of the weights), trajectories trained on, and tokens that counted in the
    policy's loss, over all of them."""

    current_step: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0


def save_state(folder: Path, counters: Counters, trained: Mapping[str, Trained], *, moments: bool) -> None:
    """A collective: write `folder`. There is no random state: a step draws no numbers. Raises `ServiceError` on every rank where any
    of them can't write."""
    state = {
        **dataclasses.asdict(counters),
        "trained": {name: one.state(moments=moments) for name, one in trained.items()},
    }
    try:
        with _process_group():
            dcp.save(state, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        raise cannot_write_checkpoint(folder.parent, _cause(error)) from error


def load_state(folder: Path, trained: Mapping[str, Trained]) -> Counters:
    """A collective: give `trained` back what `save_state` wrote; the counters.

    Raises `ServiceError` for what can't be read, and for a checkpoint that lacks one of `trained`.
    """
    reader = dcp.FileSystemReader(folder)
    try:
        saved = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = dataclasses.asdict(Counters())
        state["trained"] = {}
        for name, one in trained.items():
            if f"trained.{name}.scheduled" not in saved:
                raise ServiceError(
                    f"checkpoint {folder.parent} holds no state of a {name} model: another algorithm or an older build wrote it; "
                    "give run.id another name to start anew"
                )
            moments = any(key.startswith(f"trained.{name}.optimizer.") for key in saved)
            state["trained"][name] = one.empty_state(moments=moments)
        with _process_group():
            dcp.load(state, storage_reader=reader)
    except (OSError, EOFError, pickle.UnpicklingError, dcp.CheckpointException) as error:
        raise ServiceError(
            f"checkpoint {folder.parent}: its training state can't be read ({_cause(error)!r}); remove this checkpoint "
            "to go on from an earlier one"
        ) from error
    for name, one in trained.items():
        if "optimizer" not in state["trained"][name] and state["trained"][name]["scheduled"]:
            logger.warning("%s: no optimizer state of the %s model; its moments start from zero", folder, name)
        one.restore(state["trained"][name])
    return Counters(**{field.name: int(state[field.name]) for field in dataclasses.fields(Counters)})


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """The ranks' own; a process alone is one rank for as long as this is open. Where there is none, `torch.distributed.checkpoint` warns
    each time that it takes the process to be alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _cause(error: BaseException) -> BaseException:
    """What went wrong on the first rank where it did."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error
