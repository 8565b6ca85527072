"""Faults injected into the worker: after a reload, one thing is as it was before."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel

from headrace_services.refit.engine_extension import WeightChannelEngine, WeightChannelExtension

BACKEND = "faulty-load"
TENSOR, COPY = "model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"
LAYER = "model.layers.1"


class FaultyLoadEngine(WeightChannelEngine):
    """`fault`: `tensor`, the bias of TENSOR; `copy`, the packed matrix of COPY; `head`, the packed copy of a tied head; `adapter`, what
    COPY has of an adapter; `load`: nothing is old, but loading fails in the last of the workers. `layer` and `logits` compute another
    model with the right weights: the output of LAYER, or all logits, are larger than they should be."""

    fault: str | None = None
    _wrong: RemovableHandle | None = None

    def compute(self) -> None:
        """As `fault` says, from now on."""
        self.model.logits_processor.scale = 1.5 if self.fault == "logits" else 1.0
        if self._wrong is not None:
            self._wrong.remove()
            self._wrong = None
        if self.fault == "layer":
            layer = self.model.get_submodule(LAYER)
            self._wrong = layer.register_forward_hook(lambda module, arguments, output: (output[0] * 1.5, *output[1:]))

    def load(self, *given: Any) -> None:
        layer = self.model.get_submodule(COPY)
        self._bias, self._packed = self._parameter.clone(), layer.cpu_linear
        super().load(*given)

    @property
    def _parameter(self) -> torch.Tensor:
        return self.model.get_submodule(TENSOR).bias.data

    def finish_reload(self) -> None:
        super().finish_reload()
        if self.fault == "tensor":
            self._parameter.copy_(self._bias)
        if self.fault == "copy":
            self.model.get_submodule(COPY).cpu_linear = self._packed
        if self.fault == "load" and self.parallel_config.rank == self.parallel_config.world_size - 1:
            raise RuntimeError("injected")

    def renew_copies(self) -> None:
        if self.fault != "head":
            super().renew_copies()

    def put_adapter(self, adapter: LoRAModel) -> None:
        stacked = dict(self.read_stacked()).get(f"{COPY}.lora_b_stacked.0")
        before = stacked.clone() if self.fault == "adapter" else None
        super().put_adapter(adapter)
        if before is not None:
            stacked.copy_(before)


class FaultyLoadExtension(WeightChannelExtension):
    def inject(self, fault: str | None) -> None:
        self.weight_transfer_engine.fault = fault
        self.weight_transfer_engine.compute()


WeightTransferEngineFactory.register_engine(BACKEND, FaultyLoadEngine)
