"""Memory and time of a pass in bfloat16: by autocast, and by FSDP2's MixedPrecisionPolicy, as ranks on GPUs compute."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from benchmarks.gpu.rows import line
from benchmarks.gpu.stage import Stage, seconds
from benchmarks.gpu.step import CHUNKED
from benchmarks.train_step import Memory
from headrace_services.trainer.distributed.sharding import shard_over
from headrace_services.trainer.network import backbone
from headrace_services.trainer.network.packing import PackedRows
from headrace_services.trainer.network.policy_model import CausalRoot, LogitsWarper

MIB = 2**20
WAYS = {"autocast": False, "MixedPrecisionPolicy": True}


def precision(stage: Stage) -> None:
    # a group of one rank: FSDP2 gathers and casts as with several, and nothing travels
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if stage.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    for recompute in (False, True):
        for way, mixed in WAYS.items():
            name = f"{way}{', checkpointed' if recompute else ''}"
            try:
                measured = _pass(stage, mixed=mixed, recompute=recompute)
            except Exception as error:  # noqa: BLE001 - out of memory: the other ways go on
                measured = f"failed: {line(error)}"
            stage.rows.add(name, measured)
            stage.forget()


def _pass(stage: Stage, *, mixed: bool, recompute: bool) -> str:
    keys = CHUNKED | {"activation_checkpointing": recompute}
    config = stage.size.config(stage.model, stage.device, "bfloat16", **keys)
    model = backbone.load_model(
        AutoModelForCausalLM, config, "policy.model_name", config.policy.model_name, "a causal language model"
    )
    root = CausalRoot(model, config.policy.chunk_size(stage.device))
    placed = backbone.PlacedModel(root, model, config, stage.torch_device, "float32")
    if mixed:
        layers = [module for module in model.modules() if type(module).__name__ in set(model._no_split_modules)]
        shard_over(init_device_mesh(stage.device, (1,)), root, layers, bfloat16=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    length = stage.size.micro_batch * (stage.size.prompt + stage.size.completion)
    longest = min(length, model.config.max_position_embeddings)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, longest).astype(np.int32)
    rows = PackedRows.of_tokens(ids).to(stage.torch_device)

    def both() -> None:
        with torch.autocast(stage.device, torch.bfloat16, enabled=not mixed):
            output = placed(rows, LogitsWarper(), False)
        output[0].sum().backward()

    memory = Memory(stage.torch_device)
    took = seconds(stage.torch_device, both)
    return f"{memory.peak() / MIB:,.0f} MiB beyond weights and gradients, {took:.2f} s for {longest:,} tokens"
