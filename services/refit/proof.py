"""Proves that the model holds exactly the weights that were received, whatever the dtype, and computes with them.

Trainer and vLLM name and split weights differently (fused, sharded and padded parameters), and only vLLM's weight loaders know how. So
this module watches the loaders: which part of which parameter they copy into, and the checksum of what they copy. After the load, the
model's own parameters must have these checksums in these parts, and no other parts. vLLM runs each loader twice, the first time only to
count what it would copy. The first run is the one that is watched, because every watched operation goes through Python.

An adapter (`policy.lora_cfg.refit`) is watched in the same way, as it is copied into the tensors that the engine keeps of it.

Some platforms compute with a copy of a parameter, about which the parameter's checksum says nothing. So the copy is read back: on a CPU,
the packed matrix of a linear layer or a head.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.base.errors import WeightChannelError

from .checksum import checksum
from .transfer import ReceivedTensor

# Columns of a packed matrix to read back, different ones in each update. They are adjacent, because reading one from memory reads the next
# as well. A matrix is packed as a whole, so an old copy is old in all its columns.
COLUMNS = 8
# the instructions that multiply bfloat16 treat smaller numbers as 0
_SMALLEST = 2.0**-126


@dataclass(frozen=True)
class _Part:
    """A part of a parameter, by its place in the parameter's memory."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.size).numel()

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.as_strided(self.size, self.stride, parameter.storage_offset() + self.offset)


@dataclass
class _Parameter:
    """One of the model's parameters, and what the loaders wrote into it.

    `checksums` are those of each part. If the parameter has a packed copy, `columns` are some columns of what was received
    ([columns, rows]), by their first row. `zeros` are padding. `storage` is kept, so that no other storage takes its identity.
    """

    name: str
    layer: torch.nn.Module
    attribute: str
    shape: torch.Size
    dtype: torch.dtype
    storage: torch.UntypedStorage
    checksums: dict[_Part, torch.Tensor] = field(default_factory=dict)
    columns: dict[int, torch.Tensor] = field(default_factory=dict)
    zeros: set[_Part] = field(default_factory=set)

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter's current tensor."""
        tensor: torch.Tensor = getattr(self.layer, self.attribute).data
        return tensor

    @property
    def packed(self) -> bool:
        """Whether the layer multiplies by a packed copy of the parameter."""
        return self.attribute == "weight" and len(self.shape) == 2 and hasattr(self.layer, "cpu_linear")

    @property
    def complete(self) -> bool:
        return sum(part.numel for part in (*self.checksums, *self.zeros)) >= self.shape.numel()


class WeightProof(TorchDispatchMode):
    """The proof of one update of `model`. Create it once the model's layerwise reload has begun."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._parameters: dict[int, _Parameter] = {}
        for prefix, layer in model.named_modules():
            for attribute, tensor in layer._parameters.items():
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    name = f"{prefix}.{attribute}"
                    self._parameters[storage._cdata] = _Parameter(
                        name, layer, attribute, tensor.shape, tensor.dtype, storage
                    )
        self._known: Mapping[int, tuple[int, torch.Tensor]] = {}
        self._columns: dict[int, slice] = {}
        self._copied = 0

    def load(self, bucket: Sequence[ReceivedTensor]) -> None:
        """Load these tensors into the model, with each loader under `watch`. Their checksums are read later."""
        self._known = {one.tensor.data_ptr(): (one.tensor.numel(), one.checksum) for one in bucket}
        self._model.load_weights((one.name, one.tensor) for one in bucket)  # type: ignore[operator]

    def watch(self, loader: Callable[..., Any], arguments: inspect.BoundArguments) -> tuple[int, Any]:
        """Return the number of elements that the loader copies, and the loader's own result, as vLLM's `get_numel_loaded` does.

        A layerwise reload calls it with each loader on the parameter itself, on the meta device, before it loads the replacement.
        """
        self._copied = 0
        with self:
            returned = loader(*arguments.args, **arguments.kwargs)
        return self._copied, returned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar):
            if func is torch.ops.aten.copy_.default:
                self._copied += args[0].numel()
            parameter = self._parameters.get(args[0].untyped_storage()._cdata)
            if parameter is not None:
                self._note(parameter, *args[:2])
        return func(*args, **(kwargs or {}))

    def _note(self, parameter: _Parameter, target: torch.Tensor, source: torch.Tensor | float) -> None:
        part = _Part(int(target.storage_offset()), tuple(target.shape), target.stride())
        if not isinstance(source, torch.Tensor):
            parameter.zeros.add(part)
            return
        if source.data_ptr() == target.data_ptr():
            return  # a bias takes its own place
        numel, known = self._known.get(source.data_ptr(), (0, None))
        if known is None or numel != source.numel() or not source.is_contiguous() or source.dtype != parameter.dtype:
            known = checksum(source.to(parameter.dtype))
        parameter.checksums[part] = known
        if parameter.packed and part.size[1:] == parameter.shape[1:]:
            columns = source[:, self._draw_columns(parameter)].T
            columns = columns.to(parameter.dtype, copy=True, memory_format=torch.contiguous_format)
            parameter.columns[part.offset // parameter.shape[1]] = columns

    def check_parameters(self) -> None:
        """Raise `WeightChannelError` unless every parameter holds what was loaded into it, and nothing else."""
        complete = {p.tensor.data_ptr() for p in self._parameters.values() if p.complete and p.tensor.numel()}
        names, held, sent = [], [], []
        for parameter in self._parameters.values():
            tensor = parameter.tensor
            # a tied parameter got its weights under its other name
            if not parameter.complete and tensor.data_ptr() not in complete:
                raise WeightChannelError(f"the trainer sends too little, or nothing, for the engine's {parameter.name}")
            if tensor.numel() == 0 and parameter.packed:
                continue  # only the packed copy is left
            if tensor.shape != parameter.shape or not tensor.is_contiguous():
                raise WeightChannelError(
                    f"the engine keeps {parameter.name} in a form that can't be compared (shape {tuple(tensor.shape)}, "
                    f"not {tuple(parameter.shape)}); this model can't be refitted here"
                )
            for part, known in parameter.checksums.items():
                names.append(parameter.name)
                held.append(checksum(part.of(tensor).to(parameter.dtype)))
                sent.append(known)
        same = torch.stack(held) == torch.stack(sent).to(held[0].device)
        if wrong := list(dict.fromkeys(name for name, right in zip(names, same.tolist(), strict=True) if not right)):
            raise WeightChannelError(
                f"{len(wrong)} parameters of the engine differ from what was received, the first is {wrong[0]}"
            )

    def check_copies(self) -> None:
        """Raise `WeightChannelError` unless the packed copies match the current parameters."""
        for parameter in self._parameters.values():
            if not parameter.packed:
                continue
            tensor, drawn = parameter.tensor, self._draw_columns(parameter)
            columns = [tensor[:, drawn].T] if tensor.numel() else [row for _, row in sorted(parameter.columns.items())]
            right, packed = torch.cat(columns, 1), _read_back(parameter, drawn)
            if right.shape != packed.shape or not bool((packed - right).abs().max() <= _SMALLEST):
                raise WeightChannelError(
                    f"the engine computes with a packed copy of {parameter.name} that differs from what was received"
                )

    def _draw_columns(self, parameter: _Parameter) -> slice:
        """Return the columns to read back of a matrix of this width."""
        width = parameter.shape[1]
        if width not in self._columns:
            first = random.Random().randrange(max(1, width - COLUMNS + 1))
            self._columns[width] = slice(first, min(first + COLUMNS, width))
        return self._columns[width]


class AdapterProof(TorchDispatchMode):
    """The proof of one adapter. It watches what is copied into `stacked`, the tensors that the engine keeps of the adapter, by name.
    `arrived` are the adapter's tensors by name, each with its checksum."""

    def __init__(
        self, stacked: Mapping[str, torch.Tensor], arrived: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        super().__init__()
        self._stacked = {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in stacked.items()}
        self._sources = {tensor.data_ptr(): name for name, (tensor, _) in arrived.items()}
        self._sent = {name: known for name, (_, known) in arrived.items()}
        self._parts: dict[str, tuple[int, _Part]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            storage, source = args[0].untyped_storage()._cdata, args[1]
            name = self._sources.get(source.data_ptr())
            if storage in self._stacked and name is not None and source.shape == args[0].shape:
                self._parts[name] = storage, _Part(int(args[0].storage_offset()), tuple(source.shape), args[0].stride())
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Raise `WeightChannelError` unless the engine keeps every tensor that arrived, and zeros everywhere else."""
        if lost := [name for name in self._sent if name not in self._parts]:
            raise WeightChannelError(
                f"the engine has no place for {len(lost)} tensors of the adapter, the first is {lost[0]}; set policy.lora_cfg.refit to "
                "merged, or leave these layers out of a new run (policy.lora_cfg.exclude_modules)"
            )
        numbers = dict.fromkeys(self._stacked, 0)
        for name, (storage, part) in self._parts.items():
            held = part.of(self._stacked[storage][1])
            if not bool(checksum(held) == self._sent[name]):
                raise WeightChannelError(
                    f"the engine's adapter differs from what was received, the first difference is in {name}"
                )
            numbers[storage] += int(held.count_nonzero())
        for storage, (name, tensor) in self._stacked.items():
            if int(tensor.count_nonzero()) != numbers[storage]:
                raise WeightChannelError(f"the engine's adapter has nonzero numbers in {name} that were not received")


def _read_back(parameter: _Parameter, columns: slice) -> torch.Tensor:
    """Return [columns, rows] of the matrix that the layer multiplies by. A product with a single 1 among zeros is exact."""
    ones = torch.zeros(columns.stop - columns.start, parameter.shape[1], dtype=parameter.dtype)
    ones[:, columns].fill_diagonal_(1)
    layer: Any = parameter.layer
    product: torch.Tensor = layer.cpu_linear(ones, layer.weight, None)
    return product
