"""Model FLOPs against the matrices that a model of the architecture really has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from headrace_services.trainer.telemetry.flops import DATA_SHEETS, Architecture, peak_of

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 112}


def dense(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(**settings)


@pytest.mark.parametrize(
    "config",
    [
        dense("Qwen2Config", **GROUPED),
        dense("Qwen3Config", **GROUPED, head_dim=32),
        dense("LlamaConfig", **GROUPED),
        dense("MistralConfig", **GROUPED),
        dense("Gemma2Config", **GROUPED, head_dim=24),
        dense("Phi3Config", **GROUPED, pad_token_id=0),
        dense("GPTNeoXConfig", **SMALL, intermediate_size=112),
    ],
    ids=lambda config: config.model_type,
)
def test_every_matrix_of_the_model_is_counted_once(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    found = Architecture.of(config)
    assert found is not None
    assert found.layer_weights + found.vocabulary_weights == matrices


def test_a_mixture_counts_the_experts_that_a_token_goes_through() -> None:
    config = transformers.Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0]
    )
    found = Architecture.of(config)
    assert found is not None
    attention = 2 * 64 * 64 + 2 * 64 * 32
    assert found.layer_weights == 3 * attention + 3 * 64 * 112 + 2 * (3 * 64 * 24 * 2 + 8 * 64)


def test_attention_grows_with_the_square_of_the_length() -> None:
    found = Architecture.of(transformers.LlamaConfig(**GROUPED))
    assert found is not None
    per_token = 6 * (found.layer_weights + found.vocabulary_weights)
    assert found.training_flops([10, 20]) == per_token * 30 + 6 * 3 * 64 * (100 + 400)


def test_frozen_weights_take_no_gradients() -> None:
    trained, frozen = (Architecture.of(transformers.LlamaConfig(**GROUPED), frozen=frozen) for frozen in (False, True))
    assert trained is not None
    assert frozen is not None
    weights = trained.layer_weights + trained.vocabulary_weights
    assert trained.training_flops([30]) - frozen.training_flops([30]) == 2 * weights * 30


def test_the_formula_is_the_one_that_nemo_rl_has_for_llama() -> None:
    hidden, layers, groups, heads, width, vocabulary, length = 64, 3, 2, 4, 112, 97, 50
    theirs = (
        length * layers * hidden**2
        * (12 + 12 * groups / heads + 18 * width / hidden + 6 * length / hidden + 6 * vocabulary / (layers * hidden))
    )  # fmt: skip
    found = Architecture.of(transformers.LlamaConfig(**GROUPED))
    assert found is not None
    assert found.training_flops([length]) == pytest.approx(theirs, rel=1e-12)


def test_an_unknown_architecture_has_no_formula() -> None:
    assert Architecture.of(transformers.MambaConfig()) is None


def test_a_cpu_is_measured_and_says_so() -> None:
    peak = peak_of(torch.device("cpu"), "float32")
    assert peak.tflops > 0
    assert "measured" in peak.source


def test_a_gpu_is_the_one_with_the_longest_name_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert peak_of(torch.device("cuda"), "bfloat16").tflops == DATA_SHEETS["NVIDIA H100 PCIe"]["bfloat16"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_of(torch.device("cuda"), "bfloat16").tflops == 989.4
