"""The worker extension of `benchmarks.refit`: it can also time vLLM's own reload, of tensors that are there already."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from headrace_services.rollout.weight_engine import WeightChannelExtension


class BareReload(WeightChannelExtension):
    def bare_reload(self, folder: str, rounds: int) -> list[float]:
        """Median and least seconds of a reload of the checkpoint's weights, in the engine's dtype, after one that does not count."""
        engine = self.weight_transfer_engine
        dtype = engine.model_config.dtype
        weights = {name: tensor.to(dtype) for name, tensor in load_file(Path(folder) / "model.safetensors").items()}
        seconds = []
        with set_current_vllm_config(self.vllm_config):
            for _ in range(rounds + 1):
                started = time.perf_counter()
                initialize_layerwise_reload(engine.model)
                engine.model.load_weights(weights.items())
                finalize_layerwise_reload(engine.model, engine.model_config)
                seconds.append(time.perf_counter() - started)
        return [statistics.median(seconds[1:]), min(seconds[1:])]
