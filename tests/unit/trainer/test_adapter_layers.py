"""Which layers of a policy an adapter is put beside."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, MixtralConfig, PretrainedConfig, Qwen2Config

from headrace.base.errors import ServiceError
from headrace.config.policy import LoRAConfig
from headrace_services.trainer.network.adapter import count_experts, linear_layers, targets

IN_A_LAYER = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
IN_A_LAYER += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
LAYERS = [f"model.layers.{layer}.{name}" for layer in range(2) for name in IN_A_LAYER]


@pytest.mark.parametrize("tied", [True, False])
def test_all_linear_layers_but_the_head(tied: bool) -> None:
    small = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**small, num_hidden_layers=2, vocab_size=11, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert linear_layers(model) == LAYERS
    model.model.layers[1].requires_grad_(False)
    assert linear_layers(model) == LAYERS[:7], "what is not trained gets no adapter"


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        (MixtralConfig, {"num_local_experts": 3}, 3 * 3 * 8 * 16),
        (Lfm2Config, {"layer_types": ["conv"]}, 0),
    ],
    ids=["experts", "a convolution"],
)
def test_experts_that_one_tensor_holds_are_counted(
    kind: type[PretrainedConfig], more: dict[str, Any], expected: int
) -> None:
    small = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind(**small, num_hidden_layers=1, vocab_size=11, **more))
    assert count_experts(model) == expected


def named(**settings: list[str]) -> list[str]:
    return targets(LAYERS, LoRAConfig(enabled=True, **settings))


def test_layers_are_named_by_their_last_part_or_a_whole_pattern() -> None:
    assert named() == LAYERS
    assert named(target_modules=["q_proj"]) == [LAYERS[0], LAYERS[7]]
    assert named(target_modules=["*.layers.0.*.q_proj", "down_proj"]) == [LAYERS[0], LAYERS[6], LAYERS[13]]
    assert named(target_modules=["*_proj"], exclude_modules=["*.mlp.*"]) == [*LAYERS[:4], *LAYERS[7:11]]


def test_a_name_that_no_layer_has_is_an_error_with_those_there_are() -> None:
    there = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ServiceError, match=rf"policy\.lora_cfg\.target_modules: 'c_attn'.*{there}"):
        named(target_modules=["q_proj", "c_attn"])
    with pytest.raises(ServiceError, match=r"target_modules: 'lm_head'.*never"):
        named(target_modules=["lm_head"])
    with pytest.raises(ServiceError, match=r"policy\.lora_cfg\.exclude_modules: 'proj'"):
        named(exclude_modules=["proj"])
    with pytest.raises(ServiceError, match=r"policy\.lora_cfg\.enabled true.*Linear"):
        targets([], LoRAConfig(enabled=True, target_modules=["q_proj"]))
    with pytest.raises(ServiceError, match=rf"no linear layer.*{there}"):
        named(exclude_modules=["*"])
