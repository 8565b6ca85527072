"""The worker extension of `benchmarks.refit`: it can also time vLLM's own reload, of tensors that are there already."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from headrace_services.refit.engine_extension import WeightChannelExtension


class BareReload(WeightChannelExtension):
    def bare_reload(self, folder: str) -> float:
        """Seconds of a reload of the checkpoint's weights."""
        model, model_config = self.get_model(), self.vllm_config.model_config
        weights = _weights(folder, model_config.dtype)
        started = time.perf_counter()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(weights.items())
            finalize_layerwise_reload(model, model_config)
        return time.perf_counter() - started


@functools.cache
def _weights(folder: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in load_file(Path(folder) / "model.safetensors").items()}
