"""Faults injected into the worker: after a reload, one thing is as it was before."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from vllm.lora.lora_model import LoRAModel

from headrace_services.refit.engine_extension import WeightChannelExtension, stacked
from headrace_services.refit.receiver import RefitFailure

TENSOR, COPY = "model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"
LAYER = "model.layers.1"


class FaultyLoadExtension(WeightChannelExtension):
    """`_fault`: `tensor`, the bias of TENSOR; `copy`, the packed matrix of COPY; `head`, the packed copy of a tied head; `adapter`, what
    COPY has of an adapter; `load`: nothing is old, but loading fails in the last of the workers. `layer` and `logits` compute another
    model with the right weights: the output of LAYER, or all logits, are larger than they should be."""

    _fault: str | None = None
    _wrong: RemovableHandle | None = None

    def inject(self, fault: str | None) -> None:
        """From now on."""
        self._fault = fault
        model: Any = self.get_model()
        model.logits_processor.scale = 1.5 if fault == "logits" else 1.0
        if self._wrong is not None:
            self._wrong.remove()
            self._wrong = None
        if fault == "layer":
            layer = model.get_submodule(LAYER)
            self._wrong = layer.register_forward_hook(lambda module, arguments, output: (output[0] * 1.5, *output[1:]))

    def receive_weights(self, *given: Any, **named: Any) -> RefitFailure | None:
        layer = self.get_model().get_submodule(COPY)
        self._bias, self._packed = self._parameter.clone(), layer.cpu_linear
        return super().receive_weights(*given, **named)

    @property
    def _parameter(self) -> torch.Tensor:
        return self.get_model().get_submodule(TENSOR).bias.data

    def _finish_reload(self) -> None:
        super()._finish_reload()
        if self._fault == "tensor":
            self._parameter.copy_(self._bias)
        if self._fault == "copy":
            self.get_model().get_submodule(COPY).cpu_linear = self._packed
        parallel = self.vllm_config.parallel_config
        if self._fault == "load" and parallel.rank == parallel.world_size - 1:
            raise RuntimeError("injected")

    def _renew_copies(self) -> None:
        if self._fault != "head":
            super()._renew_copies()

    def _put_adapter(self, adapter: LoRAModel) -> None:
        kept = dict(stacked(self.get_model())).get(f"{COPY}.lora_b_stacked.0")
        before = kept.clone() if self._fault == "adapter" else None
        super()._put_adapter(adapter)
        if before is not None:
            kept.copy_(before)
