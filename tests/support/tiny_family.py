"""A tiny model with random weights of any family that transformers knows, by the defaults of its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# the keys for the number of layers, and for the kind of each
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
# by the names that families give them
SIZES: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "word_embed_proj_dim"], 128),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "intermediate_size_mlp"], 128),
    **dict.fromkeys(DEPTH, 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads"], 2),
    **dict.fromkeys(
        ["head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"], 32
    ),
    "qk_head_dim": 64,
    "rotary_dim": 16,
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len", "model_max_length"], 1024),
    "original_max_position_embeddings": 1024,
    **dict.fromkeys(["sliding_window", "sliding_window_size"], 64),
    "attention_chunk_size": 64,
    # experts
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(
        [
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "expert_ffn_hidden_size",
        ],
        32,
    ),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"], 1),
    **dict.fromkeys(["first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "num_expert_group"], 1),
    "moe_layer_end_index": 1,
    "num_nextn_predict_layers": 0,
    "zero_expert_num": 0,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 32,
    # states
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"], 2),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 32),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"], 4),
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim", "mamba_headdim"], 32),
    **dict.fromkeys(["mamba_d_state", "state_size", "ssm_state_size"], 16),
    **dict.fromkeys(["mamba_n_groups", "n_groups", "mamba_ngroups"], 1),
    "mamba_d_ssm": 128,
    **dict.fromkeys(["mamba_dt_rank", "time_step_rank"], 4),
    "initializer_range": 0.1,
}
# of Gemma 2, with an effect on numbers as small as these
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 1}


def shrunk(family: str, **special: Any) -> Any:
    """The configuration of the family with these sizes where it has such a key; `special` are keys that it gets as they are.

    Of each kind of layer that it has by default there is one, and at least two layers.
    """
    default = AutoConfig.for_model(family)
    known = {**default.to_dict(), **{name: None for name in default.attribute_map}}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]  # latent attention has no groups
    kinds = {key: list(dict.fromkeys(known.get(key) or ())) for key in KINDS}
    depth = max(2, *(len(found) for found in kinds.values()))
    sizes |= {key: (found * depth)[:depth] for key, found in kinds.items() if found}
    sizes |= dict.fromkeys(sizes.keys() & set(DEPTH), depth)
    return AutoConfig.for_model(family, **{**sizes, **special})


def made(config: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model with random weights, among them those that are initialized to 0 or 1."""
    torch.manual_seed(0)
    config.vocab_size = len(tokenizer)
    config.eos_token_id, config.bos_token_id, config.pad_token_id = tokenizer.eos_token_id, None, 0
    model = AutoModelForCausalLM.from_config(config).float()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
