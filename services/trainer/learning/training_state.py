"""The training state in a checkpoint: the run's counters, and of each trained model its schedule and its optimizer's moments.

    training/state.json               counters, schedules, the number of ranks
    training/rank_0_of_2.safetensors  the rows of the moments that rank 0 held, by `<model>/<parameter>/<moment>`

FSDP2 shards the first dimension, so the rows of all files one after the other are the whole tensor, and any number of ranks can go on
from it: each reads its own rows alone. Where hosts hold copies (`trainer.shard_within_host`), the ranks of one write, and are counted.
Nothing is pickled. There is no random state, because a step draws no random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.errors import ServiceError
from headrace.files import fsync
from headrace_services.trainer.distributed import host_copies
from headrace_services.trainer.learning.optimizer import ModelOptimizer
from headrace_services.trainer.network.backbone import Write

_STATE, _OLD = "state.json", ".metadata"


class ModelState(msgspec.Struct, frozen=True):
    """One model: how often its schedule advanced, and whether its moments are there."""

    scheduled: int
    moments: bool


class TrainingState(msgspec.Struct, frozen=True):
    """The contents of `state.json`. `counters` are those of `Counters`, `trained` the models by name."""

    ranks: int
    counters: dict[str, int]
    trained: dict[str, ModelState]


def snapshot(counters: Mapping[str, int], optimizers: Mapping[str, ModelOptimizer], *, moments: bool) -> Write:
    """Copy this rank's part to host memory. What it returns writes it to a folder; that raises `OSError` and `SafetensorError`."""
    place = next(iter(optimizers.values())).place  # that of all of them
    held = {name: optimizer.moments() if moments else {} for name, optimizer in optimizers.items()}
    own = host_copies(
        ((f"{name}/{key}", tensor) for name, tensors in held.items() for key, tensor in tensors.items()),
        keep=place.writes,
    )
    trained = {name: ModelState(optimizer.scheduled, bool(held[name])) for name, optimizer in optimizers.items()}
    state = TrainingState(place.count, dict(counters), trained)

    def write(folder: Path) -> None:
        if not place.writes:
            return
        folder.mkdir(exist_ok=True)
        path = folder / _file(place.index, place.count)
        save_file(own, path)
        fsync(path)  # the rank that publishes can't flush what another machine holds
        if place.index == 0:
            (folder / _STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))

    return write


def load(folder: Path, optimizers: Mapping[str, ModelOptimizer]) -> TrainingState:
    """Load what a `snapshot` wrote into `optimizers`. Raises `ServiceError` if it can't be read, or lacks one of the models."""
    if (folder / _OLD).exists():
        raise ServiceError(
            f"checkpoint {folder.parent}: an older build wrote its training state, pickled, which this one doesn't read; finish the run "
            "with that build, or give run.id another name and start anew from its policy/ (policy.model_name)"
        )
    try:
        state = msgspec.json.decode((folder / _STATE).read_bytes(), type=TrainingState)
        for name, optimizer in optimizers.items():
            if name not in state.trained:
                raise ServiceError(
                    f"checkpoint {folder.parent} holds no state of a {name} model: another algorithm wrote it; give run.id another "
                    "name to start anew"
                )
            with _opened(folder, state.ranks) as saved:
                moments = _moments(saved, name, optimizer.shards()) if state.trained[name].moments else {}
            optimizer.restore(state.trained[name].scheduled, moments)
    except (OSError, msgspec.MsgspecError, SafetensorError, ValueError) as error:
        raise ServiceError(
            f"checkpoint {folder.parent}: its training state can't be read ({error!r}); remove this checkpoint to go on from an earlier one"
        ) from error
    return state


def _file(rank: int, ranks: int) -> str:
    return f"rank_{rank}_of_{ranks}.safetensors"


@contextlib.contextmanager
def _opened(folder: Path, ranks: int) -> Iterator[list[safe_open]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(safe_open(folder / _file(rank, ranks), "pt")) for rank in range(ranks)]


def _moments(
    saved: list[safe_open], model: str, shards: Mapping[str, tuple[int, int, tuple[int, ...]]]
) -> dict[str, dict[str, Tensor]]:
    """This rank's rows of each moment, by parameter. Raises `ValueError` for those of another model."""
    found: dict[str, dict[str, Tensor]] = {}
    for key in saved[0].keys():  # noqa: SIM118  # it is no mapping
        of, parameter, moment = key.split("/")
        if of != model:
            continue
        if parameter not in shards:
            raise ValueError(f"it has a parameter {parameter!r}, which this model has not")
        first, last, shape = shards[parameter]
        found.setdefault(parameter, {})[moment] = _rows(saved, key, first, last, shape)
    return found


def _rows(saved: list[safe_open], key: str, first: int, last: int, shape: tuple[int, ...]) -> Tensor:
    """Rows `[first, last)` of a tensor of `shape` that is spread over the files; a number is the same in all of them."""
    parts = [file.get_slice(key) for file in saved]
    sizes = [tuple(part.get_shape()) for part in parts]
    if sizes[0] == ():
        return saved[0].get_tensor(key)
    if (sum(size[0] for size in sizes), *sizes[0][1:]) != shape:
        raise ValueError(f"{key} has shapes {sizes}, together not {shape}")
    rows, begin = [], 0
    for part, size in zip(parts, sizes, strict=True):
        low, high = max(first - begin, 0), min(last - begin, size[0])
        if low < high:
            rows.append(part[low:high])
        begin += size[0]
    return torch.cat(rows) if rows else torch.empty(0, *shape[1:])
