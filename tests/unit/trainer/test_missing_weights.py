"""A model whose files lack a weight: transformers would draw it at random, and only warn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace_services.trainer.network.backbone import load_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen2Config(vocab_size=16, max_position_embeddings=16, num_key_value_heads=1, **sizes)
    assert not config.tie_word_embeddings
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def load(model: Path, auto: Any) -> Any:
    config = Config.model_validate({"policy": {"max_total_sequence_length": 16}})
    return load_model(auto, config, "policy.model_name", str(model), "a model")


def without(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {each: weight for each, weight in weights.items() if each != name}


def rewrite(model: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    weights = load_file(model / WEIGHTS)
    save_file(change(weights), model / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel])
def test_a_model_with_all_its_weights_is_loaded(model: Path, auto: Any) -> None:
    assert load(model, auto).training is False


@pytest.mark.parametrize(
    ("auto", "change", "missing"),
    [
        (AutoModelForCausalLM, lambda weights: without(weights, "lm_head.weight"), "lm_head.weight"),
        (AutoModelForCausalLM, lambda weights: {f"module.{name}": w for name, w in weights.items()}, "embed_tokens"),
        (AutoModel, lambda weights: without(weights, "model.norm.weight"), "norm.weight"),
    ],
    ids=["head", "other names", "of a value model"],
)
def test_a_weight_that_the_files_lack_is_never_drawn(model: Path, auto: Any, change: Any, missing: str) -> None:
    rewrite(model, change)
    with pytest.raises(ServiceError, match=missing):
        load(model, auto)
