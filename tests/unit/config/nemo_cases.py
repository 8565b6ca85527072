"""A recipe as NeMo RL's are written, over a base with its usual keys, and what becomes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace.config.loading import examine
from headrace.config.nemo_rl import Translation

# a base as theirs are written, in our words
BASE = """
grpo:
  num_prompts_per_step: 8
  num_generations_per_prompt: 4
  max_rollout_turns: 1
  max_num_steps: 100
  val_period: -1
  val_batch_size: 256
  max_val_samples: 256
  reward_shaping: {enabled: false, overlong_buffer_length: 64, max_response_length: "${policy.max_total_sequence_length}"}
  async_grpo: {enabled: false, max_trajectory_age_steps: 1, max_generation_failures: 0}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.2, ratio_clip_c: null}
checkpointing: {enabled: true, metric_name: "val:accuracy", save_period: 10, checkpoint_must_save_by: null, model_save_format: safetensors}
policy:
  model_name: some/model
  tokenizer: {name: "${policy.model_name}", chat_template_kwargs: null}
  hf_config_overrides: {}
  train_global_batch_size: 32
  train_micro_batch_size: 4
  logprob_batch_size: ${policy.train_micro_batch_size}
  max_total_sequence_length: 256
  precision: bfloat16
  dtensor_cfg:
    _v2: true
    enabled: true
    tensor_parallel_size: 1
    activation_checkpointing: true
    lora_cfg: {enabled: false, dim: 8}
  megatron_cfg:
    enabled: false
    tensor_model_parallel_size: 2
    expert_model_parallel_size: 1
    freeze_moe_router: true
    moe_router_load_balancing_type: none
    optimizer: {optimizer: adam, lr: 3.0e-7, min_lr: 3.0e-8, weight_decay: 0.1, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1e-6,
                clip_grad: "${policy.max_grad_norm}", bf16: true}
    scheduler: {start_weight_decay: "${policy.megatron_cfg.optimizer.weight_decay}", lr_decay_style: constant, lr_decay_iters: 1000,
                lr_warmup_iters: 10, lr_warmup_init: 3.0e-8}
    fp8_cfg: null
  dynamic_batching: {enabled: false, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"}
  sequence_packing: {enabled: true, algorithm: modified_first_fit_decreasing, sequence_length_round: 64}
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  max_grad_norm: 1.0
  optimizer:
    name: torch.optim.AdamW
    kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1e-8, foreach: false, fused: false}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - milestones: [50]
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    top_k: null
    val_temperature: ${.temperature}
    stop_token_ids: null
    mcore_generation_config: {max_tokens: 16384}
    vllm_cfg:
      {async_engine: false, precision: "${policy.precision}", kv_cache_dtype: auto, tensor_parallel_size: 1, enforce_eager: false,
       max_model_len: "${policy.max_total_sequence_length}", num_first_layers_in_bf16: 0}
    vllm_kwargs: {}
    colocated: {enabled: true, resources: {num_nodes: null}}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  num_workers: 1
  train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05, seed: 42}
  validation: null
  default: {prompt_file: prompts/think.txt, system_prompt_file: null, processor: math_hf_data_processor, env_name: math}
env:
  math: {num_workers: 8, math_verify_impl: hf_math_verify}
  code: {num_workers: 8, terminate_on_evaluation: true}
logger:
  log_dir: logs
  wandb_enabled: false
  swanlab_enabled: false
  wandb: {project: mine, name: first}
  swanlab: {project: mine}
  tensorboard: {}
  gpu_monitoring: {collection_interval: 10, flush_interval: 10}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""


def recipe(folder: Path, text: str = "", base: str = BASE) -> Path:
    """A recipe two levels above the `base`, as theirs are."""
    path = folder / "recipes" / "llm" / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text(base)
    (folder / "recipes" / "middle.yaml").write_text("defaults: ../base.yaml\nlogger: {log_dir: here}\n")
    path.write_text("defaults: ../middle.yaml\n" + text)
    return path


def read(folder: Path, text: str = "", *overrides: str, base: str = BASE) -> tuple[Config, Translation]:
    """What becomes of such a recipe, and what is said about it."""
    examined = examine(recipe(folder, text, base), overrides, {})
    assert examined.nemo_rl is not None
    return examined.config, examined.nemo_rl


def refusal(folder: Path, text: str = "", *overrides: str, base: str = BASE) -> list[str]:
    """The lines of the error that it is refused with, without the place of a value in it."""
    with pytest.raises(ConfigError) as error:
        read(folder, text, *overrides, base=base)
    return re.sub(r" \([^() ]*recipe\.yaml:\d+\)", "", str(error.value)).splitlines()
