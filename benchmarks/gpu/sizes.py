"""The sizes at which the parts run, and their models: the shapes of known ones with random weights, since no hub is in reach."""

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
from headrace.config import Config
from headrace.records.score import Score
from headrace.records.trajectory import Trajectory
from headrace_services.trainer.demo_models import already_made, publish
from headrace_services.trainer.demo_models.tiny import make_tokenizer
from headrace_services.trainer.learning.batch import Batch
from headrace_services.trainer.memory import KNOWN

_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 32: vLLM has no kernel for less on a CPU
    "num_key_value_heads": 1,
    "layer_types": ["full_attention"] * 2,
}


@dataclasses.dataclass(frozen=True)
class Size:
    """`policy` is the model that is trained and generates, `refit` the one whose tensors are sent, each a name in `KNOWN` with `changes`.
    A batch is `groups` of `generations`, with `prompt` tokens and at most `completion`; a micro-batch `micro_batch` of them. The engine
    answers `requests` of `decode` tokens, and takes a refit during completions of `in_flight` tokens."""

    policy: str
    refit: str
    changes: Mapping[str, Any]
    groups: int
    generations: int
    prompt: int
    completion: int
    micro_batch: int
    requests: int
    decode: int
    in_flight: int
    bandwidth_bytes: int
    deadline_s: float

    @property
    def policy_config(self) -> Any:
        return self._config(self.policy)

    @property
    def refit_config(self) -> Any:
        return self._config(self.refit)

    def _config(self, name: str) -> Any:
        config = copy.deepcopy(KNOWN[name])
        config.update(dict(self.changes))
        return config

    @property
    def trajectories(self) -> list[Trajectory]:
        return trajectories_of(
            self.groups, self.generations, self.prompt, self.completion, self.policy_config.vocab_size
        )

    def batch(self) -> Batch:
        """The trajectories with random rewards."""
        found = self.trajectories
        rewards = np.random.default_rng(2).normal(size=len(found))
        return Batch.of(
            found,
            [Score("SCORED", float(reward), environment="benchmark") for reward in rewards],
            places=range(len(found)),
            groups=[place // self.generations for place in range(len(found))],
            multipliers=[1.0] * len(found),
            step=0,
            max_age=0,
        )

    def config(self, model: Path, device: str, precision: str, **policy: Any) -> Config:
        """A run's configuration; `policy` are more keys of that section."""
        return Config.model_validate(
            {
                "grpo": {"num_prompts_per_step": self.groups, "num_generations_per_prompt": self.generations},
                # the ratios of log-probabilities that nobody sampled say nothing
                "loss_fn": {"reference_policy_kl_penalty": 0, "force_on_policy_ratio": True},
                "policy": {
                    "model_name": str(model),
                    "precision": precision,
                    "max_total_sequence_length": self.prompt + self.completion,
                    "train_micro_batch_size": self.micro_batch,
                    "generation": {"max_new_tokens": self.completion},
                    "max_grad_norm": 1e9,  # gradients are compared as they are
                    **policy,
                },
                "trainer": {"device": device},
            }
        )

    def model(self, folder: Path, device: str) -> Path:
        """The folder with the policy, made on first use."""
        place, recipe = folder / "policy", {"name": self.policy, "changes": dict(self.changes)}
        if not already_made(place, recipe):
            torch.manual_seed(0)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(self.policy_config, dtype=torch.float32)
            with publish(place, recipe) as unfinished:
                model.save_pretrained(unfinished)
                make_tokenizer().save_pretrained(unfinished)
            del model
            if device == "cuda":
                torch.cuda.empty_cache()
        return place


SIZES = {
    "full": Size(
        policy="Qwen/Qwen2.5-1.5B",
        refit="meta-llama/Llama-3.1-8B",
        changes={},
        groups=4,
        generations=8,
        prompt=512,
        completion=1024,
        micro_batch=4,
        requests=256,
        decode=512,
        in_flight=512,
        bandwidth_bytes=2**30,
        deadline_s=20.0,
    ),
    "tiny": Size(
        policy="Qwen/Qwen2.5-1.5B",
        refit="Qwen/Qwen2.5-1.5B",
        changes=_TINY,
        groups=2,
        generations=4,
        prompt=24,
        completion=24,
        micro_batch=4,
        requests=8,
        decode=16,
        in_flight=1500,
        bandwidth_bytes=2**20,
        deadline_s=2.0,
    ),
}
