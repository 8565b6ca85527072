"""The optimizers of the trained models, with learning rate schedules and gradient clipping, and the training state in a checkpoint.

The learning rate is a function of the number of trainer steps (or epochs) that trained the model. So that count is all the state a schedule
has. A run that resumes steps the configured schedule, which may have changed, up to that count.

A checkpoint's training state is the run's counters, and each trained model's schedule and optimizer moments:

    training/state.json               counters, schedules, the number of ranks
    training/rank_0_of_2.safetensors  the rows of the moments that rank 0 held, by `<model>/<parameter>/<moment>`

FSDP2 shards the first dimension, so the rows of all files in order are the whole tensor. Any number of ranks can resume from it: each reads
only its own rows. If hosts hold copies (`trainer.shard_within_host`), the ranks of one host write, and only they are counted. Nothing is
pickled. There is no random state, because a step draws no random numbers.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from headrace.base.errors import ServiceError
from headrace.base.files import fsync
from headrace.config.policy import NAMESPACE, OptimizerConfig, SchedulerConfig

from ..distributed.host_copies import host_copies
from ..distributed.sharding import (
    ModelShard,
    find_shard,
    full_tensor,
    local_part,
    local_rows,
    with_local_part,
)
from ..network.backbone import Write

log = logging.getLogger(__name__)

_STATE = "state.json"

CLASSES: dict[str, type[optim.AdamW] | type[optim.Adam]] = {
    "torch.optim.AdamW": optim.AdamW,
    "torch.optim.Adam": optim.Adam,
}


class LearningRate:
    """The learning rate by number of steps. torch's own schedulers compute it from `base`."""

    def __init__(self, base: float, schedule: Sequence[SchedulerConfig], section: str) -> None:
        """Raises `ServiceError` naming `section` for arguments that torch refuses."""
        self.steps = 0
        self._carrier = optim.SGD([torch.zeros(1)], base)  # torch's schedulers need an optimizer
        self._scheduler: lr_scheduler.LRScheduler | None = None
        named = [item for item in schedule if item.name is not None]
        try:
            parts = [_scheduler(self._carrier, item) for item in named]
            if len(parts) > 1:
                with _quiet():
                    milestones = schedule[-1].milestones or []
                    self._scheduler = lr_scheduler.SequentialLR(self._carrier, parts, milestones)
            elif parts:
                self._scheduler = parts[0]
        except (TypeError, ValueError, ZeroDivisionError) as error:
            names = ", ".join(str(item.name) for item in named)
            raise ServiceError(f"{section}.scheduler: torch refuses {names} ({error}); correct its kwargs") from error

    @property
    def value(self) -> float:
        return float(self._carrier.param_groups[0]["lr"])

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.steps += 1
            if self._scheduler is not None:
                with _quiet():
                    self._carrier.step()
                    self._scheduler.step()


class ModelOptimizer:
    """The optimizer of one model. With several ranks every method is a collective. The learning rate advances by one after a trainer step
    (or an epoch) that trained the model."""

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerConfig,
        schedule: Sequence[SchedulerConfig],
        max_grad_norm: float,
        section: str,
    ) -> None:
        """`section` is its name in errors: `policy` or `value`. Raises `ServiceError` for a schedule that torch refuses."""
        self._model = model
        self._settings = settings
        self._schedule = schedule
        self.section = section
        self._max_grad_norm = max_grad_norm
        self.rate = LearningRate(settings.kwargs.lr, schedule, section)
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._optimizer = CLASSES[settings.name](self._trained.values(), **self._arguments())

    def grad_norm(self) -> float:
        """2-norm of all gradients together, before they are clipped."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._trained.values() if p.grad is not None])
        return float(full_tensor(norm))

    def step(self, grad_norm: float) -> None:
        """Clip the gradients, whose 2-norm is `grad_norm`, to `max_grad_norm`. Take one optimizer step. Drop the gradients."""
        torch.nn.utils.clip_grads_with_norm_(self._trained.values(), self._max_grad_norm, torch.tensor(grad_norm))
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate.value
        self._optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad()

    def moments(self) -> dict[str, Tensor]:
        """Return this rank's part of the optimizer's state, by `<parameter>/<moment>`. It is empty before the first optimizer step."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._trained.items()}
        return {
            f"{names[parameter]}/{moment}": local_part(tensor)
            for parameter, state in self._optimizer.state.items()
            for moment, tensor in state.items()
        }

    @property
    def shard(self) -> ModelShard:
        """What this rank holds of the model."""
        return find_shard(next(self._model.parameters()))

    def shards(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Return the rows `[first, last)` of each parameter that this rank holds, and the shape of the whole parameter."""
        return {name: (*local_rows(tensor), tuple(tensor.shape)) for name, tensor in self._model.named_parameters()}

    def restore(self, scheduled: int, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from a schedule that advanced `scheduled` times and from `moments`, this rank's part by parameter. Without moments they
        start from zero. Learning rate, betas and so on come from the configuration, which may have changed since."""
        if scheduled and not moments:
            log.warning(
                "the checkpoint has no optimizer state for the %s model; its moments start from zero", self.section
            )
        state = {
            place: {key: with_local_part(parameter, tensor) for key, tensor in moments[name].items()}
            for place, (name, parameter) in enumerate(self._trained.items())
            if name in moments
        }
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        for group in self._optimizer.param_groups:
            group.update(self._arguments())
        self.rate = LearningRate(self._settings.kwargs.lr, self._schedule, self.section)
        self.rate.advance(scheduled)

    def _arguments(self) -> dict[str, Any]:
        arguments = self._settings.kwargs.model_dump()
        if arguments["fused"] is None:
            arguments["fused"] = not arguments["foreach"]
        return arguments


def _scheduler(carrier: optim.Optimizer, item: SchedulerConfig) -> lr_scheduler.LRScheduler:
    assert item.name is not None
    made: lr_scheduler.LRScheduler = getattr(lr_scheduler, item.name.removeprefix(NAMESPACE))(carrier, **item.kwargs)
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning about its own SequentialLR, which calls its parts in a deprecated way at each milestone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The epoch parameter in", category=UserWarning)
        yield


# -- the state in a checkpoint ------------------------------------------------------------------------------------------


class ModelState(msgspec.Struct, frozen=True):
    """The state of one model: how many times its schedule advanced, and whether the checkpoint has its moments."""

    scheduled: int
    moments: bool


class TrainingState(msgspec.Struct, frozen=True):
    """The content of `state.json`. `counters` are those of `Counters`. `trained` has the models by name."""

    ranks: int
    counters: dict[str, int]
    trained: dict[str, ModelState]


def snapshot_training(counters: Mapping[str, int], optimizers: Mapping[str, ModelOptimizer], *, moments: bool) -> Write:
    """Copy this rank's part of the training state to host memory. The result writes it to a folder; it raises `OSError` and
    `SafetensorError`."""
    shard = next(iter(optimizers.values())).shard  # the same for all of them
    held = {name: optimizer.moments() if moments else {} for name, optimizer in optimizers.items()}
    own = host_copies(
        ((f"{name}/{key}", tensor) for name, tensors in held.items() for key, tensor in tensors.items()),
        keep=shard.writes,
    )
    trained = {name: ModelState(optimizer.rate.steps, bool(held[name])) for name, optimizer in optimizers.items()}
    state = TrainingState(shard.count, dict(counters), trained)

    def write(folder: Path) -> None:
        if not shard.writes:
            return
        folder.mkdir(exist_ok=True)
        path = folder / _file(shard.index, shard.count)
        save_file(own, path)
        fsync(path)  # the rank that publishes can't flush another machine's writes
        if shard.index == 0:
            (folder / _STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))

    return write


def load_training(folder: Path, optimizers: Mapping[str, ModelOptimizer]) -> TrainingState:
    """Load what `snapshot_training` wrote into `optimizers`. Raises `ServiceError` if it can't be read or lacks one of the models."""
    try:
        state = msgspec.json.decode((folder / _STATE).read_bytes(), type=TrainingState)
        for name, optimizer in optimizers.items():
            if name not in state.trained:
                raise ServiceError(
                    f"checkpoint {folder.parent} has no state of a {name} model, because another algorithm wrote it; give run.id another "
                    "name to start over"
                )
            with _opened(folder, state.ranks) as saved:
                moments = _moments(saved, name, optimizer.shards()) if state.trained[name].moments else {}
            optimizer.restore(state.trained[name].scheduled, moments)
    except (OSError, msgspec.MsgspecError, SafetensorError, ValueError) as error:
        raise ServiceError(
            f"checkpoint {folder.parent}: its training state can't be read ({error!r}); remove it to continue from an earlier checkpoint"
        ) from error
    return state


def missing_parts(folder: Path, files: Collection[str]) -> list[str]:
    """Return which of the ranks' files are not among `files`, the names of all that there are. `folder` has the `state.json` that
    `snapshot_training` wrote."""
    ranks = msgspec.json.decode((folder / _STATE).read_bytes(), type=TrainingState).ranks
    return sorted({_file(rank, ranks) for rank in range(ranks)} - {*files})


def _file(rank: int, ranks: int) -> str:
    return f"rank_{rank}_of_{ranks}.safetensors"


@contextlib.contextmanager
def _opened(folder: Path, ranks: int) -> Iterator[list[safe_open]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(safe_open(folder / _file(rank, ranks), "pt")) for rank in range(ranks)]


def _moments(
    saved: list[safe_open], model: str, shards: Mapping[str, tuple[int, int, tuple[int, ...]]]
) -> dict[str, dict[str, Tensor]]:
    """Read this rank's rows of each moment, by parameter. Raises `ValueError` for those of another model."""
    found: dict[str, dict[str, Tensor]] = {}
    for key in saved[0].keys():  # noqa: SIM118  # not a mapping
        of, parameter, moment = key.split("/")
        if of != model:
            continue
        if parameter not in shards:
            raise ValueError(f"it has a parameter {parameter!r}, which this model lacks")
        first, last, shape = shards[parameter]
        found.setdefault(parameter, {})[moment] = _rows(saved, key, first, last, shape)
    return found


def _rows(saved: list[safe_open], key: str, first: int, last: int, shape: tuple[int, ...]) -> Tensor:
    """Read rows `[first, last)` of a tensor of `shape` that is spread over the files. A number is the same in all of them."""
    parts = [file.get_slice(key) for file in saved]
    sizes = [tuple(part.get_shape()) for part in parts]
    if sizes[0] == ():
        return saved[0].get_tensor(key)
    if (sum(size[0] for size in sizes), *sizes[0][1:]) != shape:
        raise ValueError(f"{key} has shapes {sizes}, which don't add up to {shape}")
    rows, begin = [], 0
    for part, size in zip(parts, sizes, strict=True):
        low, high = max(first - begin, 0), min(last - begin, size[0])
        if low < high:
            rows.append(part[low:high])
        begin += size[0]
    return torch.cat(rows) if rows else torch.empty(0, *shape[1:])
