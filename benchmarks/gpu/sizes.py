"""The sizes at which the parts run, and the model: its own weights where they are, else random ones of its shape."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.train_step import trajectories_of
from headrace.base.errors import ServiceError
from headrace.base.model_name import MODEL
from headrace.config import Config, load
from headrace.records.score import Score
from headrace.records.trajectory import Trajectory
from headrace_services.trainer.demo_models import already_made, publish
from headrace_services.trainer.learning.batch import Batch
from headrace_services.trainer.memory.models import KNOWN
from tests.support.tool_model import make_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "gpu_1_5b_1gpu.yaml"


@dataclasses.dataclass(frozen=True)
class Size:
    """`shape` changes the example's model, `overrides` its configuration. A batch is `groups` of `generations`, with `prompt` tokens and at
    most `completion`. Engines answer `requests` at once, of `decode` tokens, and take a refit during completions of `in_flight`."""

    shape: Mapping[str, Any]
    overrides: tuple[str, ...]
    groups: int
    generations: int
    prompt: int
    completion: int
    requests: tuple[int, ...]
    decode: int
    in_flight: int
    nbytes: int  # of a plain copy or broadcast
    deadline_s: float

    def config(self, model: str, device: str, *overrides: str) -> Config:
        """The example's configuration with this model."""
        own = (f"policy.model_name={model}", f"trainer.device={device}", f"rollout.device={device}")
        return load(EXAMPLE, [*own, *self.overrides, *overrides], {})

    def trajectories(self, vocabulary: int) -> list[Trajectory]:
        return trajectories_of(self.groups, self.generations, self.prompt, self.completion, vocabulary)

    def batch(self, vocabulary: int, rank: int, ranks: int) -> Batch:
        """The rank's share of the trajectories, with random rewards."""
        found = self.trajectories(vocabulary)
        rewards = np.random.default_rng(2).normal(size=len(found))
        places = range(rank, len(found), ranks)
        return Batch.of(
            [found[place] for place in places],
            [Score("SCORED", float(rewards[place]), environment="benchmark") for place in places],
            places=places,
            groups=[place // self.generations for place in places],
            multipliers=[1.0] * len(places),
            step=0,
            max_age=0,
            size=len(found),
        )


def find_model(size: Size, folder: Path, device: str, wanted: str | None) -> tuple[str, str]:
    """The model that the parts use, and what its weights are. Raises `ServiceError` if one is `wanted` that is not here."""
    name = wanted or load(EXAMPLE, [], {}).policy.model_name
    if wanted is not None or not size.shape:
        if MODEL.is_here("--model", name):
            return name, f"{name}'s own"
        if wanted is not None:
            raise ServiceError(
                f"--model {name}: neither a directory nor in the Hub's cache (HF_HOME); download it first"
            )
    recipe = {"name": name, "shape": dict(size.shape)}
    if not already_made(folder, recipe):
        config = copy.deepcopy(KNOWN[name])
        config.update(dict(size.shape))
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with publish(folder, recipe) as unfinished:
            model.save_pretrained(unfinished)
            make_tokenizer().save_pretrained(unfinished)
    return str(
        folder.resolve()
    ), f"RANDOM, of the {'toy ' if size.shape else ''}shape of {name}: rewards and speeds of text mean nothing"


SIZES = {
    "full": Size(
        shape={},
        overrides=(),
        groups=4,
        generations=8,
        prompt=512,
        completion=1024,
        requests=(256, 1024),
        decode=256,
        in_flight=1024,
        nbytes=2**30,
        deadline_s=20.0,
    ),
    "tiny": Size(
        shape={
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,  # of 32: vLLM has no kernel for less on a CPU
            "num_key_value_heads": 1,
            "layer_types": ["full_attention"] * 2,
        },
        overrides=(
            "grpo.num_prompts_per_step=2",
            "grpo.num_generations_per_prompt=4",
            "policy.generation.max_new_tokens=16",
            f"policy.generation.vllm_cfg.kv_cache_memory_bytes={2**26}",
        ),
        groups=2,
        generations=4,
        prompt=24,
        completion=24,
        requests=(8, 32),
        decode=16,
        in_flight=1500,
        nbytes=2**20,
        deadline_s=2.0,
    ),
}
