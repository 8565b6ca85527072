"""The policy's adapter (LoRA, by the library PEFT): two small matrices A and B that are trained in place of a linear layer's weight W.

    y = W x + alpha / dim · B A x          merged: W + alpha / dim · B A

PEFT wraps each linear layer before the model is sharded, and renames parameters. What leaves this module has the names of a model without
an adapter. A and B are drawn from the run's seed, whole and equal on every rank, so the numbers don't depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.config.policy import LoRAConfig

from ...refit.manifest import ADAPTER
from ..distributed.host_copies import host_copies, saved_tensors
from ..distributed.ranks import is_first_rank
from ..distributed.sharding import full_tensor

log = logging.getLogger(__name__)

# The folder in a checkpoint's policy, with adapter_config.json and this file: PEFT's own format.
FOLDER, _WEIGHTS = "adapter", "adapter_model.safetensors"
# PEFT's name of the only adapter
_NAME = "default"


class Adapter:
    """The adapter of one model. With several ranks its iterators, and `snapshot`, are collectives."""

    def __init__(self, model: Any, config: Config, folder: Path | None = None) -> None:
        """Freeze `model`, and add an adapter to the linear layers that `policy.lora_cfg` names: a new one, which changes nothing yet, or
        the one that `snapshot` wrote to `folder`.

        Raises `ServiceError` for a name without such a layer, and for an adapter that can't be read.
        """
        # importing PEFT takes a second, which runs without an adapter save
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear

        settings = config.policy.lora_cfg
        self._model = model
        self._scale = settings.alpha / settings.dim
        self._config = LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=config.policy.model_name,
            r=settings.dim,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=targets(linear_layers(model), settings),
        )
        # Of some families PEFT takes linear layers for experts, and wraps those instead. It knows these families by the configuration of
        # what it is given, and this list has none.
        inject_adapter_in_model(self._config, nn.ModuleList([model]), _NAME)
        model.eval()
        if (experts := count_experts(model)) and is_first_rank():
            log.warning(
                "policy.lora_cfg.enabled true: %d of the policy's %d million parameters are those of experts, which have no adapter and "
                "are not trained: the model keeps them in one tensor, not in linear layers",
                experts // 10**6, sum(parameter.numel() for parameter in model.parameters()) // 10**6,
            )  # fmt: skip
        self._layers: dict[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, Linear)
        }
        for layer in self._layers.values():  # on the meta device if the model is
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
        if folder is None:
            self._draw(settings.init, config.algorithm.seed)
        else:
            self._load(folder / _WEIGHTS)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield A and B of each layer, unsharded, with their names in PEFT's format."""
        for name, layer in self._layers.items():
            for part in ("lora_A", "lora_B"):
                yield f"{ADAPTER}{name}.{part}.weight", _whole(getattr(layer, part))

    def scale(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `tensors` with B multiplied by alpha / dim, so that the adapter's scale is 1."""
        for name, tensor in self.tensors():
            yield name, tensor * self._scale if ".lora_B." in name else tensor

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and full shapes in the order of `tensors`. Gathers nothing."""
        for name, layer in self._layers.items():
            for part in ("lora_A", "lora_B"):
                yield f"{ADAPTER}{name}.{part}.weight", tuple(getattr(layer, part)[_NAME].weight.shape)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's own parameters and saved buffers, with the names and in the order that they have without the adapter."""
        for name, tensor in saved_tensors(self._model):
            if not tensor.requires_grad:
                yield name.replace(".base_layer.", "."), tensor

    def weights(self, *, merged: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield `parameters`, unsharded. `merged` are those of the model that computes the same without an adapter."""
        layers = {id(layer.base_layer.weight): layer for layer in self._layers.values()}
        for name, parameter in self.parameters():
            weight = full_tensor(parameter.detach())
            if merged and (layer := layers.get(id(parameter))):
                weight = torch.addmm(weight, _whole(layer.lora_B), _whole(layer.lora_A), alpha=self._scale)
            yield name, weight

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """In the context, the model computes without the adapter."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    @contextlib.contextmanager
    def taken_off(self) -> Iterator[None]:
        """In the context, the model has its modules without the adapter."""
        self._put(lambda layer: layer.base_layer)
        try:
            yield
        finally:
            self._put(lambda layer: layer)

    def set_dropout(self, on: bool) -> None:
        for layer in self._layers.values():
            layer.lora_dropout.train(on)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the adapter to rank 0's host memory. The result writes the copy in the format of `PeftModel.from_pretrained`."""
        whole = host_copies(self.tensors(), keep=is_first_rank())

        def write(folder: Path) -> None:
            if whole:
                self._config.save_pretrained(str(folder))
                save_file(whole, folder / _WEIGHTS, metadata={"format": "pt"})

        return write

    def _draw(self, init: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in self._layers.values():
            a, b = _whole(layer.lora_A), _whole(layer.lora_B)
            if init == "xavier":
                nn.init.xavier_normal_(a, generator=generator)
            else:
                nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            nn.init.zeros_(b)

    def _load(self, path: Path) -> None:
        try:
            saved = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ServiceError(
                f"{path} can't be read ({error}); remove this checkpoint to continue from an earlier one"
            ) from error
        here = dict(self.tensors())
        if {name: tensor.shape for name, tensor in saved.items()} != {
            name: tensor.shape for name, tensor in here.items()
        }:
            raise ServiceError(
                f"{path}: this adapter is not the one that policy.lora_cfg describes; restore the dim and the layers that it had"
            )
        for name, tensor in here.items():
            tensor.copy_(saved[name])

    def _put(self, chosen: Callable[[Any], nn.Module]) -> None:
        for name, layer in self._layers.items():
            parent, _, child = name.rpartition(".")
            setattr(self._model.get_submodule(parent), child, chosen(layer))


def linear_layers(model: Any) -> list[str]:
    """Return the names of the layers that can have an adapter: linear ones that are trained, except for the head. Where the head is tied, a
    change to it would change the embedding."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and module.weight.requires_grad
    ]


def count_experts(model: Any) -> int:
    """Return the number of parameters of experts that one tensor holds, so that they are no linear layers."""
    modules = (module for module in model.modules() if not isinstance(module, nn.Conv1d))
    return sum(one.numel() for module in modules for one in module.parameters(recurse=False) if one.dim() == 3)


def targets(layers: Sequence[str], settings: LoRAConfig) -> list[str]:
    """Return the linear `layers` that the settings name. Raises `ServiceError` for a name that no layer has, and if no layer is left."""
    if not layers:
        raise ServiceError(
            "policy.lora_cfg.enabled true: the policy has no layers of torch's Linear for an adapter (GPT-2 has none); set it to "
            "false, or choose another model"
        )
    names = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
    for key, patterns in (
        ("target_modules", settings.target_modules),
        ("exclude_modules", settings.exclude_modules),
    ):
        for pattern in patterns:
            if not any(_matches(layer, pattern) for layer in layers):
                raise ServiceError(
                    f"policy.lora_cfg.{key}: {pattern!r} is not a linear layer of the policy; it has {names}, with full names such as "
                    f"{layers[0]} (in which * may stand for anything). The head is never adapted"
                )
    found = [
        layer
        for layer in layers
        if (not settings.target_modules or any(_matches(layer, pattern) for pattern in settings.target_modules))
        and not any(_matches(layer, pattern) for pattern in settings.exclude_modules)
    ]
    if not found:
        raise ServiceError(
            f"policy.lora_cfg.exclude_modules {settings.exclude_modules}: no linear layer is left for an adapter; the policy has "
            f"{names}"
        )
    return found


def _matches(layer: str, pattern: str) -> bool:
    return pattern == layer.rpartition(".")[2] or fnmatchcase(layer, pattern)


def _whole(part: Any) -> Tensor:
    """Return A or B of a layer, unsharded."""
    return full_tensor(part[_NAME].weight.detach())
