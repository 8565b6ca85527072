"""Files of NeMo RL: which are known for such, what becomes of their keys, and what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.config import Config, load
from headrace.config.load import examine
from headrace.config.nemo import Translation
from headrace.errors import ConfigError

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def recipe(folder: Path, text: str = "") -> Path:
    """A recipe two levels above the base, as theirs are."""
    path = folder / "recipes" / "llm" / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    (folder / "recipes" / "middle.yaml").write_text("defaults: ../base.yaml\nlogger: {log_dir: here}\n")
    path.write_text("defaults: ../middle.yaml\n" + text)
    return path


def read(folder: Path, text: str = "", *overrides: str) -> tuple[Config, Translation]:
    examined = examine(recipe(folder, text), overrides, {})
    assert examined.nemo_rl is not None
    return examined.config, examined.nemo_rl


def refusal(folder: Path, text: str = "", *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(folder, text, *overrides)
    return str(error.value).splitlines()


def test_a_recipe_over_two_levels_loads_as_it_is(folder: Path) -> None:
    config, _ = read(folder, "grpo: {num_prompts_per_step: 16}\n")
    assert config.algorithm.num_prompts_per_step == 16
    assert config.algorithm.val_period == 0
    assert config.algorithm.reward_shaping.max_response_length == 256
    policy = config.policy
    assert (policy.model_name, policy.tokenizer.name, policy.tokenizer.chat_template_kwargs) == ("some/model",) * 2 + (
        {},
    )
    assert (policy.train_global_batch_size, policy.logprob_batch_size) == (32, 4)
    assert policy.activation_checkpointing
    assert policy.sequence_packing.enabled
    assert (policy.optimizer.kwargs.lr, policy.optimizer.kwargs.betas, policy.optimizer.kwargs.eps) == (
        5e-6,
        (0.9, 0.999),
        1e-8,
    )
    assert [item.milestones for item in policy.scheduler] == [None, None, [50]]
    generation = policy.generation
    assert (generation.max_new_tokens, generation.val_temperature, generation.stop_token_ids) == (256, 1.0, [])
    assert not generation.vllm_cfg.enforce_eager
    (source,) = config.data.train
    assert (source.dataset_name, source.split_validation_size, source.env_name) == ("OpenMathInstruct-2", 0.05, "math")
    assert source.prompt_file == "prompts/think.txt"
    assert config.data.validation == []
    assert config.env.keys() == {"math"}  # no data set names the other
    assert (config.logger.log_dir, config.logger.wandb.project) == ("here", "mine")
    assert config.checkpointing.metric_name == "val:accuracy"


def test_such_a_file_means_what_it_does_not_say(folder: Path) -> None:
    config, translation = read(folder)
    assert config.loss_fn.sequence_is_aggregation == "sum"
    assert config.policy.generation.vllm_cfg.kv_cache_memory_bytes is None
    assert not config.data.remove_duplicates
    assert translation.implied.keys() == {
        "loss_fn.sequence_is_aggregation", "policy.generation.vllm_cfg.kv_cache_memory_bytes", "data.remove_duplicates",
        "data.overlong_prompts",
    }  # fmt: skip


def test_keys_of_headrace_may_stand_in_it_and_win(folder: Path) -> None:
    own = "loss_fn: {sequence_is_aggregation: mean}\nrollout: {replicas: 3}\ndata: {remove_duplicates: true}\n"
    config, _ = read(folder, own)
    assert (config.loss_fn.sequence_is_aggregation, config.rollout.replicas, config.data.remove_duplicates) == (
        "mean",
        3,
        True,
    )


def test_overrides_reach_it_in_the_words_of_both(folder: Path) -> None:
    config, _ = read(folder, "", "policy.max_total_sequence_length=64", "cluster.num_nodes=9", "rollout.replicas=2")
    assert (config.policy.generation.max_new_tokens, config.rollout.replicas) == (64, 2)
    environ = {"HEADRACE_GRPO__NUM_PROMPTS_PER_STEP": "24", "HEADRACE_GRPO__VAL_PERIOD": "5"}
    assert load(recipe(folder), [], environ).algorithm.val_period == 5


@pytest.mark.parametrize(
    ("text", "is_theirs"),
    [
        ("cluster: {num_nodes: 1}", True),
        ("policy: {dtensor_cfg: {enabled: true}}", True),
        ("policy: {automodel_cfg: {enabled: true}}", True),
        ("policy: {megatron_cfg: {enabled: false}}", True),
        ("policy: {generation: {backend: vllm}}", True),
        ("policy: {generation: {temperature: 1}}", False),
        ("", False),
    ],
)
def test_it_is_known_by_sections_that_headrace_has_not(tmp_path: Path, text: str, is_theirs: bool) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    examined = examine(path, [], {})
    assert (examined.nemo_rl is not None) == is_theirs
    assert examined.config.loss_fn.sequence_is_aggregation == ("sum" if is_theirs else "mean")


def test_the_command_line_makes_no_file_of_nemo_rl(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"cluster\.num_nodes|cluster: unknown key"):
        load(path, ["cluster.num_nodes=1"], {})


def test_what_takes_the_place_of_what_is_said(folder: Path) -> None:
    _, translation = read(folder)
    said = {key: says for says, keys in translation.replaced.items() for key in keys}
    assert "trainer.num_processes" in said["cluster.num_nodes"]
    assert "rollout.replicas" in said["policy.generation.colocated.enabled"]
    assert "not enabled" in said["policy.megatron_cfg"]
    assert said["env.code"] == "no data set names this environment"
    assert ("policy.dtensor_cfg", "policy.automodel_cfg") in translation.renamed


def test_everything_that_cant_be_honoured_is_said_at_once_a_line_each(folder: Path) -> None:
    said = refusal(
        folder,
        "policy: {dtensor_cfg: {lora_cfg: {enabled: true}}, generation: {backend: sglang}, draft: {enabled: true},\n"
        "  router_replay: {enabled: true}}\n"
        "grpo: {max_rollout_turns: 3, num_prompt_per_step: 3}\n"
        "env: {math: {math_verify_impl: exact}}\n"
        "logger: {swanlab_enabled: true}\n"
        "sft: {max_num_steps: 3, seed: 1}\n",
    )
    starts = {line.split(": ")[0] for line in said}
    assert starts == {
        "policy.automodel_cfg.lora_cfg.enabled", "policy.generation.backend", "policy.draft.enabled",
        "policy.router_replay.enabled", "grpo.max_rollout_turns", "grpo.num_prompt_per_step",
        "env.math.math_verify_impl", "logger.swanlab_enabled", "sft",
    }  # fmt: skip
    assert len(said) == len(starts)
    assert "policy.generation.backend: 'sglang': completions are generated by vLLM; set backend to vllm" in said
    assert any("did you mean grpo.num_prompts_per_step?" in line for line in said)


def test_an_unknown_key_is_an_error_that_names_the_nearest_and_its_file(folder: Path) -> None:
    (folder / "base.yaml").write_text(BASE.replace("ratio_clip_min: 0.2", "ratio_clip_mim: 0.2"))
    (line,) = refusal(folder)
    assert "loss_fn.ratio_clip_mim: unknown key, value 0.2" in line
    assert "base.yaml" in line
    assert "did you mean loss_fn.ratio_clip_min?" in line


def test_an_error_in_a_renamed_key_names_the_key_there(folder: Path) -> None:
    (line,) = refusal(folder, "policy: {dtensor_cfg: {activation_checkpointing: perhaps}}")
    assert line.startswith("policy.activation_checkpointing: 'perhaps' should be a valid boolean")
    assert "(policy.automodel_cfg.activation_checkpointing in NeMo RL)" in line


# -- environments and data ---------------------------------------------------------------------------------------------


def test_an_environment_that_is_not_built_in_has_to_be_served(folder: Path) -> None:
    text = "data: {default: {env_name: code}}\n"
    (line,) = refusal(folder, text)
    assert line.startswith("env.code: not built in; serve it")
    config, _ = read(folder, text + "env: {code: {_override_: true, target: 'localhost:9'}}")
    assert config.env["code"].target == "localhost:9"


def test_a_data_set_that_is_not_read_says_how_to_bring_it(folder: Path) -> None:
    (line,) = refusal(folder, "data: {train: {dataset_name: HelpSteer3}}")
    assert line.startswith("data.train.0.dataset_name: 'HelpSteer3' is not read; bring it as a JSONL file")


def test_a_file_of_ones_own_and_lists_of_sets(folder: Path) -> None:
    text = """
data:
  train: [{dataset_name: ResponseDataset, data_path: a.jsonl, input_key: q}, {dataset_name: DeepScaler}]
  validation: {dataset_name: AIME2024, repeat: 4}
"""
    config, _ = read(folder, text.replace("data:\n", "data:\n  _override_: true\n  default: {env_name: math}\n"))
    first, second = config.data.train
    assert (first.dataset_name, first.data_path, first.input_key) == (None, "a.jsonl", "q")
    assert second.dataset_name == "DeepScaler"
    assert config.data.validation[0].repeat == 4


def test_a_split_that_a_data_set_there_takes_no_notice_of_is_not_made(folder: Path) -> None:
    config, translation = read(folder, "data: {train: {dataset_name: DAPOMath17K}}")
    assert config.data.train[0].split_validation_size == 0
    assert any("is not split in NeMo RL" in says for says in translation.replaced)


# -- parts that another key puts in force ------------------------------------------------------------------------------


def scheduler(config: Config) -> list[dict[str, Any]]:
    return [item.model_dump(exclude_defaults=True) for item in config.policy.scheduler]


CONSTANT = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10_000_000_000}}


def test_megatrons_optimizer_and_schedule_are_in_force_where_megatron_is(folder: Path) -> None:
    text = "policy: {megatron_cfg: {enabled: true, optimizer: {clip_grad: 0.5}}, dtensor_cfg: {enabled: false}}"
    config, translation = read(folder, text)
    kwargs = config.policy.optimizer.kwargs
    assert (kwargs.lr, kwargs.weight_decay, kwargs.betas, kwargs.eps) == (3e-7, 0.1, (0.9, 0.95), 1e-6)
    assert config.policy.max_grad_norm == 0.5
    ramp = {"start_factor": pytest.approx(0.1), "end_factor": 1.0, "total_iters": 10}
    assert scheduler(config) == [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": ramp}, CONSTANT, {"milestones": [10]}
    ]  # fmt: skip
    said = {key: says for says, keys in translation.replaced.items() for key in keys}
    assert "policy.megatron_cfg.optimizer is in force instead" in said["policy.optimizer"]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"lr_warmup_iters": 0}, []),
        (
            {"lr_warmup_iters": 0, "lr_decay_style": "cosine"},
            [("CosineAnnealingLR", {"T_max": 1000, "eta_min": 3e-8})],
        ),
        (
            {"lr_warmup_init": 0, "lr_decay_style": "linear"},
            [
                ("LinearLR", {"start_factor": 1e-8, "end_factor": 1.0, "total_iters": 10}),
                ("LinearLR", {"start_factor": 1.0, "end_factor": pytest.approx(0.1), "total_iters": 990}),
            ],
        ),
    ],
    ids=["constant", "cosine", "linear"],
)
def test_megatrons_schedules_in_torchs_words(folder: Path, schedule: dict[str, Any], expected: list[Any]) -> None:
    given = ", ".join(f"{key}: {value}" for key, value in schedule.items())
    config, _ = read(folder, f"policy: {{megatron_cfg: {{enabled: true, scheduler: {{{given}}}}}}}")
    named = [item for item in scheduler(config) if "name" in item]
    assert [(item["name"].rpartition(".")[2], item["kwargs"]) for item in named] == expected


def test_a_schedule_that_torch_has_not_is_refused(folder: Path) -> None:
    said = refusal(folder, "policy: {megatron_cfg: {enabled: true, scheduler: {lr_decay_style: WSD}}}")
    assert said == [
        "policy.megatron_cfg.scheduler: lr_decay_style 'WSD' is none of constant, linear, cosine; write policy.scheduler instead"
    ]


def test_a_router_that_is_frozen_or_balanced_is_refused_where_there_are_experts(folder: Path) -> None:
    text = "policy: {megatron_cfg: {enabled: true, expert_model_parallel_size: 8, fp8_cfg: {enabled: true}}}"
    assert {line.split(": ")[0] for line in refusal(folder, text)} == {
        "policy.megatron_cfg.freeze_moe_router", "policy.megatron_cfg.fp8_cfg.enabled"
    }  # fmt: skip


SINGLE = """
grpo: {async_grpo: null}
async_rl:
  sampler: {name: NAME, KEY: 3}
  recompute_kv_cache_after_weight_updates: true
  max_inflight_prompts: 8
  rollout_failure: {max_skipped_prompts: 0, native: {env_timeout_s: null}}
data_plane: {enabled: true}
"""


@pytest.mark.parametrize(
    ("name", "key", "policy"),
    [
        ("in_order", "max_lookahead_versions", "ordered"),
        ("weight_fifo", "max_staleness_versions", "drop"),
        ("windowed", "max_staleness_versions", "drop"),
    ],
)
def test_the_samplers_of_the_single_controller(folder: Path, name: str, key: str, policy: str) -> None:
    config, _ = read(folder, SINGLE.replace("NAME", name).replace("KEY", key))
    asynchrony = config.algorithm.asynchrony
    assert (config.algorithm.max_age, asynchrony.staleness_policy) == (3, policy)
    assert asynchrony.in_flight_weight_updates
    assert asynchrony.recompute_kv_cache_after_weight_updates


def test_async_rl_does_nothing_beside_async_grpo(folder: Path) -> None:
    config, translation = read(folder, "async_rl: {sampler: {name: weight_fifo, max_staleness_versions: 5}}")
    assert config.algorithm.max_age == 0
    assert ("async_rl",) in translation.replaced.values()


def test_a_sampler_of_ones_own_is_refused(folder: Path) -> None:
    said = refusal(folder, "grpo: {async_grpo: null}\nasync_rl: {sampler: {name: custom, target: 'mine:Sampler'}}")
    assert {line.split(": ")[0] for line in said} == {"async_rl.sampler.target", "async_rl.sampler.name"}


# -- older releases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "validation", "share"),
    [("OpenMathInstruct-2", [], 0.05), ("DeepScaler", ["AIME2024"], 0), ("DAPOMath17K", ["DAPOMathAIME2024"], 0)],
)
def test_a_flat_data_section_brings_the_validation_it_brought_then(
    folder: Path, name: str, validation: list[str], share: float
) -> None:
    flat = (
        f"data: {{_override_: true, dataset_name: {name}, prompt_file: p.txt, max_input_seq_length: 9, shuffle: false}}"
    )
    config, translation = read(folder, flat)
    (train,) = config.data.train
    assert (train.dataset_name, train.prompt_file, train.env_name) == (name, "p.txt", "math")
    assert train.split_validation_size == share
    assert [source.dataset_name for source in config.data.validation] == validation
    assert not config.data.shuffle
    assert ("data.dataset_name", "data.train.dataset_name") in translation.renamed


def test_a_flat_data_section_with_files(folder: Path) -> None:
    flat = "{_override_: true, dataset_name: ResponseDataset, train_data_path: a.jsonl, val_data_path: b.jsonl, output_key: a}"
    config, _ = read(folder, f"data: {flat}")
    assert (config.data.train[0].data_path, config.data.validation[0].data_path) == ("a.jsonl", "b.jsonl")
    assert config.data.train[0].output_key == config.data.validation[0].output_key == "a"


def test_names_of_older_releases(folder: Path) -> None:
    config, _ = read(
        folder,
        "checkpointing: {metric_name: val_reward}\nloss_fn: {_override_: true, ratio_eps_min: 0.1, ratio_eps_max: 0.3}\n",
    )
    assert config.checkpointing.metric_name == "val:accuracy"
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.1, 0.3)
    (line,) = refusal(folder, "checkpointing: {metric_name: val_speed}")
    assert (
        line == "checkpointing.metric_name: 'val_speed' is neither val:… nor train:…; write val:accuracy, for example"
    )


# -- ppo ---------------------------------------------------------------------------------------------------------------


def test_a_file_of_ppo(folder: Path) -> None:
    text = """
grpo: null
ppo:
  num_prompts_per_step: 8
  num_generations_per_prompt: 4
  max_num_epochs: -1
  ppo_epochs: 2
  critic_ppo_epochs: ${ppo.ppo_epochs}
  warm_start_value_checkpoint: null
  adv_estimator: {name: gae, gae_lambda: 0.9, gae_gamma: 1, length_adaptive_alpha: 0.0}
  async_ppo: {enabled: true, max_trajectory_age_steps: 2, warmup_generation_lead_steps: null}
loss_fn: {reference_policy_kl_penalty: 0.0, use_importance_sampling_correction: true}
value_loss_fn: {scale: 0.4, cliprange: 0.2}
value:
  model_name: ${policy.model_name}
  tokenizer: {name: "${value.model_name}"}
  max_total_sequence_length: ${policy.max_total_sequence_length}
  reward_model_cfg: {enabled: true, reward_model_type: regression}
  automodel_cfg: {enabled: true, activation_checkpointing: false, tensor_parallel_size: 1}
  sequence_packing: {enabled: false}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0e-05}}
  scheduler: [{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}, {milestones: []}]
"""
    config, _ = read(folder, text)
    assert config.ppo is not None
    assert (config.ppo.max_age, config.ppo.critic_ppo_epochs, config.ppo.adv_estimator.gae_lambda) == (2, 2, 0.9)
    assert config.ppo.max_num_epochs > 10**6
    assert (config.value.optimizer.kwargs.lr, config.value_loss_fn.scale) == (1e-5, 0.4)
    assert config.policy.activation_checkpointing  # the policy's, not the value model's


# -- the command line --------------------------------------------------------------------------------------------------


def test_check_says_that_it_was_read_as_a_file_of_nemo_rl(folder: Path) -> None:
    output = CliRunner().invoke(app, ["config", "check", str(recipe(folder))]).output
    assert "valid; strictly on-policy" in output
    assert "read as a file of NeMo RL: " in output
    assert "renamed: policy.dtensor_cfg -> policy.automodel_cfg" in output
    assert "not applicable: cluster.{gpus_per_node, num_nodes} (processes, not nodes" in output
    assert "implied: loss_fn.sequence_is_aggregation sum" in output


def test_show_prints_what_loads_again_as_headraces_own(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["config", "show", str(recipe(folder))]).output
    assert "# read as a file of NeMo RL: " in shown
    again = folder / "again.yaml"
    again.write_text(shown)
    examined = examine(again, [], {})
    assert examined.nemo_rl is None
    assert examined.config == load(recipe(folder), [], {})


# -- keys that mean the same in other words ----------------------------------------------------------------------------


def test_dapos_verifier_is_an_answer_line(folder: Path) -> None:
    config, translation = read(folder, "env: {math: {math_verify_impl: dapo_math_verify}}")
    assert config.env["math"].extract == "answer_line"
    assert ("env.math.math_verify_impl", "env.math.extract") in translation.renamed
    assert read(folder)[0].env["math"].extract == "none"


def test_the_models_own_configuration_is_overridden(folder: Path) -> None:
    config, _ = read(
        folder, "policy: {hf_config_overrides: {max_position_embeddings: 64, rope_parameters: {rope_type: yarn}}}"
    )
    assert config.policy.hf_config_overrides == {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "yarn"},
    }


@pytest.mark.parametrize("value", [3, "text", [1], [{}], True, "{}"], ids=str)
@pytest.mark.parametrize(
    "section",
    ["loss_fn", "data", "data.train", "data.validation", "data.default.env_name", "env", "policy.megatron_cfg", "policy.generation",
     "policy.dtensor_cfg", "async_rl", "async_rl.sampler", "ppo"],
)  # fmt: skip
def test_a_value_that_is_no_section_never_ends_otherwise_than_by_a_refusal(
    folder: Path, section: str, value: Any
) -> None:
    # some of these values ask for nothing there; none of them may end otherwise than by a ConfigError
    with contextlib.suppress(ConfigError):
        read(folder, "", f"{section}={value}")


DISTILLED = """
grpo: {adv_estimator: {name: opd}}
on_policy_distillation:
  enabled: true
  teacher_model_by_agent_name: {one: some/teacher, two: some/teacher}
  default_teacher_alias: one
  strict_agent_name_match: false
  non_colocated_teachers: {enabled: true, default_teacher_cfg: {num_nodes: 1, precision: bf16}}
  full: {enabled: false, teacher_payload: logits}
"""


def test_the_teacher_of_a_distillation_is_headrace_s(folder: Path) -> None:
    config, translation = read(folder, DISTILLED)
    assert config.grpo is not None
    assert config.grpo.adv_estimator.teacher_model_name == "some/teacher"
    assert translation.came_from["grpo", "adv_estimator", "teacher_model_name"][0] == "on_policy_distillation"
    own, _ = read(folder, DISTILLED, "grpo.adv_estimator.teacher_model_name=mine")
    assert own.grpo is not None
    assert own.grpo.adv_estimator.teacher_model_name == "mine"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "on_policy_distillation.teacher_model_by_agent_name.two=another",
            "teacher_model_by_agent_name: another, some/teacher: there is one teacher",
        ),
        ("on_policy_distillation.full.enabled=true", "the tokens that were sampled, not whole distributions"),
        ("on_policy_distillation.enabled=false", "opd without grpo.adv_estimator.teacher_model_name"),
    ],
    ids=["several", "whole-distributions", "off"],
)
def test_a_distillation_that_can_t_be_honoured_says_why(folder: Path, override: str, problem: str) -> None:
    assert any(problem in line for line in refusal(folder, DISTILLED, override))


SEVERAL = """
data:
  use_multiple_dataloader: true
  num_prompts_per_dataloader: 4
  custom_dataloader: examples.custom_dataloader.custom_dataloader.example_custom_dataloader
  train: [{dataset_name: gsm8k}, {dataset_name: DeepScaler}]
"""


def test_several_data_loaders_are_taken_with_their_example_and_a_function_of_one_s_own_is_not(folder: Path) -> None:
    config, _ = read(folder, SEVERAL)
    assert config.data.use_multiple_dataloader
    assert config.prompts_of_each_set == 4
    problem = "a function of the seed alone"
    assert any(problem in line for line in refusal(folder, SEVERAL, "data.custom_dataloader=mine.mix"))
    read(folder, "data: {custom_dataloader: mine.mix}\n")  # not called there either


def test_the_environment_of_several_rewards_is_built_in(folder: Path) -> None:
    text = "env: {math_multi_reward: {num_workers: 8, math_verify_impl: hf_math_verify}}\ndata: {default: {env_name: math_multi_reward}}\n"
    config, _ = read(folder, text)
    assert config.env.keys() == {"math_multi_reward"}
