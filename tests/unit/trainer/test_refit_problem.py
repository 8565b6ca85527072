"""Models whose weights no engine can be given are known from their configuration, before anything is loaded."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace_services.trainer.network.policy_model import NOT_REFITTED, check_refit, refit_problem

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ROUTED = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def model(folder: Path, family: str, **special: Any) -> Config:
    """A configuration with a model that has nothing but its config.json."""
    AutoConfig.for_model(family, **SIZES, **special).save_pretrained(folder)
    return Config.model_validate({"policy": {"model_name": str(folder)}})


@pytest.mark.parametrize(
    ("family", "special", "said"),
    [
        ("phi", {}, "it has a bias of its head (lm_head.bias)"),
        ("gpt_oss", {"num_local_experts": 4}, "it has attention sinks (model.layers.0.self_attn.sinks)"),
        ("glm4_moe", ROUTED, "it has biases of routers (model.layers.1.mlp.gate.e_score_correction_bias)"),
        ("deepseek_v3", ROUTED, "it has biases of routers (model.layers.1.mlp.gate.e_score_correction_bias)"),
    ],
)
def test_a_model_that_no_refit_reaches_is_refused(
    tmp_path: Path, family: str, special: dict[str, Any], said: str
) -> None:
    with pytest.raises(ServiceError) as refused:
        check_refit(model(tmp_path, family, **special))
    assert str(refused.value).startswith(f"policy.model_name '{tmp_path}': {said}")
    assert str(refused.value).endswith("use a model without")


@pytest.mark.parametrize("bias", [True, False])
def test_a_family_that_vllm_computes_otherwise_is_refused_with_why(tmp_path: Path, bias: bool) -> None:
    with pytest.raises(ServiceError) as refused:
        check_refit(model(tmp_path, "phimoe", num_local_experts=4, lm_head_bias=bias))
    assert "(lm_head.bias), which it leaves out of its logits" in str(refused.value)
    assert str(refused.value).endswith("use a model of another family")


@pytest.mark.parametrize(
    ("family", "special"),
    [
        ("qwen2", {}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16}),
        ("mixtral", {"num_local_experts": 4}),
        ("gemma2", {"head_dim": 8}),
        ("gpt2", {}),
        ("gptj", {"rotary_dim": 4}),  # its head has a bias, which vLLM's own class for it reloads
        ("granite", {}),
        ("falcon", {}),
        ("stablelm", {}),
        ("cohere", {}),
    ],
)
def test_other_models_are_not(tmp_path: Path, family: str, special: dict[str, Any]) -> None:
    check_refit(model(tmp_path, family, **special))


@pytest.mark.parametrize(
    ("longest", "beta", "refused"), [(64, 0.1, False), (65, 0.1, False), (66, 0.1, True), (66, 0.0, False)]
)
def test_queries_that_only_the_trainer_scales_are_refused(
    tmp_path: Path, longest: int, beta: float, refused: bool
) -> None:
    rope = {"rope_type": "default", "original_max_position_embeddings": 64, "llama_4_scaling_beta": beta}
    config = model(tmp_path, "ministral3", rope_parameters={**rope, "rope_theta": 1e6})
    config = config.model_copy(
        update={"policy": config.policy.model_copy(update={"max_total_sequence_length": longest})}
    )
    with pytest.raises(ServiceError, match=r"set policy\.max_total_sequence_length") if refused else nullcontext():
        check_refit(config)


def test_a_head_that_can_not_be_computed_apart_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"^policy\.model_name .*head of OPTForCausalLM"):
        check_refit(model(tmp_path, "opt", ffn_dim=16, word_embed_proj_dim=16))


@pytest.mark.parametrize(("end", "what"), NOT_REFITTED.items())
def test_each_such_tensor_is_named_with_what_it_is(end: str, what: str) -> None:
    name = end if end[0] != "." else f"model.layers.3{end}"
    assert f"it has {what} ({name})" in str(refit_problem(["model.norm.weight", name], "phi"))
    assert refit_problem([f"{name}.weight", "model.layers.0.mlp.bias"], "phi") is None


def test_what_is_no_language_model_is_refused_there_too(tmp_path: Path) -> None:
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(ServiceError, match=r"Unrecognized configuration class"):
        check_refit(Config.model_validate({"policy": {"model_name": str(tmp_path)}}))
