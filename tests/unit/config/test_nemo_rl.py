"""Files of NeMo RL: which are known for such, what becomes of their keys, and what is refused."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.cli.app import app
from headrace.config import load
from headrace.config.loading import examine
from tests.unit.config.nemo_cases import BASE, read, recipe, refusal


def test_a_recipe_over_two_levels_loads_as_it_is(tmp_path: Path) -> None:
    config, _ = read(tmp_path, "grpo: {num_prompts_per_step: 16}\n")
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


def test_such_a_file_means_what_it_does_not_say(tmp_path: Path) -> None:
    config, translation = read(tmp_path)
    assert config.loss_fn.sequence_is_aggregation == "sum"
    assert not config.data.remove_duplicates
    assert not config.algorithm.validates_at_start
    assert translation.implied.keys() == {
        "grpo.val_at_start",
        "loss_fn.sequence_is_aggregation",
        "data.remove_duplicates",
        "data.overlong_prompts",
    }


def test_keys_of_headrace_may_stand_in_it_and_win(tmp_path: Path) -> None:
    own = "loss_fn: {sequence_is_aggregation: mean}\nrollout: {replicas: 3}\ndata: {remove_duplicates: true}\n"
    config, _ = read(tmp_path, own)
    assert (config.loss_fn.sequence_is_aggregation, config.rollout.replicas, config.data.remove_duplicates) == (
        "mean",
        3,
        True,
    )


def test_overrides_reach_it_in_the_words_of_both(tmp_path: Path) -> None:
    config, _ = read(tmp_path, "", "policy.max_total_sequence_length=64", "cluster.num_nodes=9", "rollout.replicas=2")
    assert (config.policy.generation.max_new_tokens, config.rollout.replicas) == (64, 2)
    environ = {"HEADRACE_GRPO__NUM_PROMPTS_PER_STEP": "24", "HEADRACE_GRPO__VAL_PERIOD": "5"}
    assert load(recipe(tmp_path), [], environ).algorithm.val_period == 5


@pytest.mark.parametrize(
    ("text", "is_theirs"),
    [
        ("cluster: {num_nodes: 1}", True),
        ("policy: {dtensor_cfg: {enabled: true}}", True),
        ("policy: {automodel_cfg: {enabled: true}}", True),
        ("policy: {megatron_cfg: {enabled: false}}", True),
        ("policy: {generation: {backend: vllm}}", True),
        ("policy: {generation: {temperature: 1}}", False),
        ("{}", False),
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
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"cluster\.num_nodes|cluster: unknown"):
        load(path, ["cluster.num_nodes=1"], {})


def test_what_takes_the_place_of_what_is_said(tmp_path: Path) -> None:
    _, translation = read(tmp_path)
    said = {key: says for says, keys in translation.replaced.items() for key in keys}
    assert "trainer.num_processes" in said["cluster.num_nodes"]
    assert "rollout.replicas" in said["policy.generation.colocated.enabled"]
    assert "not enabled" in said["policy.megatron_cfg"]
    assert "no data set names this environment" in said["env.code"]
    assert ("policy.dtensor_cfg.activation_checkpointing", "policy.activation_checkpointing") in translation.renamed
    assert "vLLM" in said["policy.generation.backend"]


def test_everything_that_cant_be_honoured_is_said_at_once_a_line_each(tmp_path: Path) -> None:
    said = refusal(
        tmp_path,
        "policy: {dtensor_cfg: {lora_cfg: {enabled: true, dropout: 0.1, dropout_position: post}}, draft: {enabled: true},\n"
        "  router_replay: {enabled: true}}\n"
        "grpo: {deduplicate_multimodal_data: true, num_prompt_per_step: 3}\n"
        "env: {math: {math_verify_impl: exact}}\n"
        "logger: {swanlab_enabled: true}\n"
        "sft: {max_num_steps: 3, seed: 1}\n",
    )
    starts = {line.split(": ")[0] for line in said}
    assert starts == {
        "policy.dtensor_cfg.lora_cfg.dropout_position", "policy.draft.enabled",
        "policy.router_replay.enabled", "grpo.deduplicate_multimodal_data", "grpo.num_prompt_per_step",
        "env.math.math_verify_impl", "logger.swanlab_enabled", "sft",
    }  # fmt: skip
    assert len(said) == len(starts)
    assert "policy.draft.enabled: true: draft models are not supported; set it to false" in said
    assert any("did you mean grpo.num_prompts_per_step?" in line for line in said)


LORA = "enabled: true, dim: 16, alpha: 32, dropout: 0.0, dropout_position: post, use_triton: true, exclude_modules: [down_proj]"


def test_an_adapter_has_its_own_section(tmp_path: Path) -> None:
    config, translation = read(
        tmp_path,
        f"policy: {{dtensor_cfg: {{lora_cfg: {{{LORA}, lora_A_init: uniform, match_all_linear: true, target_modules: [q_proj]}}}}}}",
    )
    lora = config.policy.lora_cfg
    assert (lora.enabled, lora.dim, lora.alpha, lora.init) == (True, 16, 32, "uniform")
    assert (lora.target_modules, lora.exclude_modules) == ([], ["down_proj"])
    said = {key: says for says, keys in translation.replaced.items() for key in keys}
    assert said["policy.dtensor_cfg.lora_cfg.target_modules"] == "match_all_linear is in force instead"


def test_megatron_s_adapter_is_the_same_but_for_the_names_of_layers(tmp_path: Path) -> None:
    peft = "enabled: true, dim: 4, lora_A_init_method: xavier, lora_B_init_method: zero, lora_dtype: null, exclude_modules: []"
    config, _ = read(tmp_path, f"policy: {{megatron_cfg: {{enabled: true, peft: {{{peft}}}}}}}")
    assert (config.policy.lora_cfg.enabled, config.policy.lora_cfg.dim) == (True, 4)
    (line,) = refusal(
        tmp_path, "policy: {megatron_cfg: {enabled: true, peft: {enabled: true, target_modules: [linear_qkv]}}}"
    )
    assert "policy.megatron_cfg.peft.target_modules: [linear_qkv]" in line
    assert "give those in policy.lora_cfg" in line


def test_an_unknown_key_is_an_error_with_the_nearest_and_its_file(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, base=BASE.replace("ratio_clip_min: 0.2", "ratio_clip_mim: 0.2"))
    assert "loss_fn.ratio_clip_mim: unknown key, value 0.2" in line
    assert "base.yaml" in line
    assert "did you mean loss_fn.ratio_clip_min?" in line


@pytest.mark.parametrize("value", ["null", "false", "''", "{}", "[]"])
def test_unknown_keys_that_ask_for_nothing_are_listed(tmp_path: Path, value: str) -> None:
    keys = ["grpo.new", "policy.tokenizer.new", "policy.dtensor_cfg.new", "policy.generation.vllm_cfg.new", "new.below"]
    config, translation = read(tmp_path, "", *(f"{key}={value}" for key in keys))
    assert set(keys) <= set(translation.nothing)
    assert config == read(tmp_path)[0]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("grpo.new_thing", "3", "grpo.new_thing: unknown key, value 3 (command line)"),
        ("policy.dtensor_cfg.tensor_paralel_size", "2", "did you mean policy.dtensor_cfg.tensor_parallel_size?"),
        ("policy.dtensor_cfg.context_parallell_size", "2", "did you mean policy.dtensor_cfg.context_parallel_size?"),
        ("policy.megatron_cfg.tensor_model_paralel_size", "2", "did you mean policy.megatron_cfg.tensor_model_parallel_size?"),
        ("policy.megatron_cfg.tensor_modl_parallel_size", "2", "did you mean policy.megatron_cfg.tensor_model_parallel_size?"),
        ("policy.megatron_cfg.moe_token_dispatcher_typ", "flex", "did you mean policy.megatron_cfg.moe_token_dispatcher_type?"),
        ("policy.megatron_cfg.optimizer.learning_rate", "1.0e-6", "value 1.0e-06 (command line); policy.megatron_cfg.optimizer has"),
        ("policy.megatron_cfg.optimizer.weigth_decay", "0.1", "did you mean policy.megatron_cfg.optimizer.weight_decay?"),
        ("policy.megatron_cfg.recompute_granularit", "full", "did you mean policy.megatron_cfg.recompute_granularity?"),
        ("policy.megatron_cfg.tensor_parallel_size", "2", "did you mean policy.megatron_cfg.tensor_model_parallel_size?"),
        ("policy.dtensor_cfg.tensor_model_parallel_size", "2", "did you mean policy.dtensor_cfg.tensor_parallel_size?"),
        ("policy.megatron_cfg.optimizer.use_preciision", "true", "policy.megatron_cfg.optimizer.use_precision_aware_optimizer?"),
        ("policy.megatron_cfg.attention_dropout", "0.1", "policy.megatron_cfg.attention_dropout: unknown key, value 0.1"),
        ("policy.megatron_cfg.freeze_moe_routr", "true", "did you mean policy.megatron_cfg.freeze_moe_router?"),
        ("policy.generation.vllm_cfg.enforce_eagr", "[a, 1]", "value [a, 1] (command line); did you mean policy.generation.vllm_cfg.enf"),
        ("loss_fn.ratio_clip_mx", "on", "did you mean loss_fn.ratio_clip_max?"),
    ],
)  # fmt: skip
def test_an_unknown_key_that_asks_for_something_is_refused(tmp_path: Path, key: str, value: str, said: str) -> None:
    megatron = str("megatron_cfg" in key).lower()
    (line,) = refusal(tmp_path, f"policy: {{megatron_cfg: {{enabled: {megatron}}}}}", f"{key}={value}")
    assert line.startswith(f"{key}: unknown key, value ")
    assert said in line


CASES = {
    "section": (["polcy.a=1", "polcy.b=2"], "polcy: unknown section (command line); did you mean policy?"),
    "section-below": (
        ["policy.dtensor_cfg.env_var.a=1"],
        "policy.dtensor_cfg.env_var: unknown section (command line); did you mean policy.dtensor_cfg.env_vars?",
    ),
    "unlike-any": (["new.below=1"], "new.below: unknown key, value 1 (command line); leave it out"),
    "scalar-for-a-section": (["cluster=4"], "cluster: 4 is not a section of keys (command line); give a mapping"),
    "list-for-a-section": (
        ["policy.dtensor_cfg.lora_cfg=[1]"],
        "policy.dtensor_cfg.lora_cfg: [1] is not a section of keys (command line); give a mapping",
    ),
    "no-section": (
        ["policy.dtensor_cfg.sequence_parallel.below=1"],
        "policy.dtensor_cfg.sequence_parallel: is not a section of keys (command line); give it one value",
    ),
    "said-already": (
        ["grpo.async_grpo=null", "async_rl.sampler=in_order"],
        "async_rl.sampler.name: 'in_order' is not a section; give name and its bound (command line)",
    ),
}


@pytest.mark.parametrize(("overrides", "said"), CASES.values(), ids=CASES)
def test_what_is_no_section_is_said_in_one_line(tmp_path: Path, overrides: list[str], said: str) -> None:
    assert refusal(tmp_path, "", *overrides) == [said]


@pytest.mark.parametrize("backend", ["megatron", "trtllm", "sglang", "dynamo", "vllm"])
def test_sections_of_other_engines_are_replaced(tmp_path: Path, backend: str) -> None:
    text = f"""
policy:
  megatron_cfg:
    {{enabled: true, moe_hybridep_num_sms: 32, moe_token_dispatcher_type: flex, cuda_graph_impl: local, cuda_graph_modules: [attn],
      recompute_granularity: full, env_vars: {{A: B}}, dynamic_context_parallel: {{enabled: true}}, checkpoint: {{async_save: true}}}}
  generation:
    backend: {backend}
    port_range_low: 3000
    real_quant_export_cpu_offload: true
    refit_transport: nixl
    refit_cfg: {{nixl: {{device: cuda}}}}
    mcore_generation_config: {{max_tokens: 3}}
    sglang_cfg: {{dtype: bfloat16}}
    trtllm_cfg: {{max_batch_size: 3}}
    dynamo_cfg: {{engine: vllm}}
    vllm_cfg: {{use_tqdm: true, http_refit_server_port: 9}}
logger: {{wandb: {{log_nemo_gym_full_result_tables: true}}}}
data_plane: {{enabled: true, backend: simple}}
"""
    config, translation = read(tmp_path, text)
    assert config == read(tmp_path, "policy: {megatron_cfg: {enabled: true}}")[0]
    listed = {key for keys in translation.replaced.values() for key in keys}
    assert {
        "policy.generation.backend",
        "policy.generation.refit_cfg.nixl.device",
        "policy.generation.trtllm_cfg.max_batch_size",
    } <= listed


@pytest.mark.parametrize("section", ["sft", "dpo", "rm", "distillation", "critic_pretraining", "eval"])
def test_a_file_that_trains_by_something_else_says_that_alone(tmp_path: Path, section: str) -> None:
    text = f"grpo: null\n{section}: {{max_num_steps: 3}}\nloss_fn: {{unheard: 3}}\n"
    (line,) = refusal(tmp_path, text)
    assert line.startswith(f"{section}: ")


def test_the_most_important_reason_comes_first_in_ten_lines(tmp_path: Path) -> None:
    unknown = ", ".join(f"unheard_{n}: {n}" for n in range(20))
    text = (
        f"grpo: {{{unknown}, seed: many}}\nenv: {{math: {{verifier_type: x}}}}\npolicy: {{draft: {{enabled: true}}}}\n"
    )
    said = refusal(tmp_path, text)
    assert [line.split(": ")[0] for line in said[:3]] == [
        "policy.draft.enabled",
        "env.math.verifier_type",
        "grpo.unheard_0",
    ]
    assert said[9:] == ["and 14 more, shown once these are fixed"]


def test_the_translator_is_imported_for_a_file_of_nemo_rl_alone(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("grpo: {seed: 3}")
    code = (
        "import sys; from headrace.config import load; import headrace.cli.app\n"
        "load(sys.argv[1], [], {}); assert 'headrace.config.nemo_rl' not in sys.modules, 'too early'\n"
        "load(sys.argv[2], [], {}); assert 'headrace.config.nemo_rl' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, own, recipe(tmp_path)], check=True)


def test_an_error_in_a_renamed_key_names_the_key_there(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, "policy: {dtensor_cfg: {activation_checkpointing: perhaps}}")
    assert line.startswith("policy.activation_checkpointing: 'perhaps'")
    assert "(policy.dtensor_cfg.activation_checkpointing in NeMo RL)" in line


def test_names_of_older_releases(tmp_path: Path) -> None:
    config, _ = read(
        tmp_path,
        "checkpointing: {metric_name: val_reward}\nloss_fn: {_override_: true, ratio_eps_min: 0.1, ratio_eps_max: 0.3}\n",
    )
    assert config.checkpointing.metric_name == "val:accuracy"
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.1, 0.3)
    (line,) = refusal(tmp_path, "checkpointing: {metric_name: val_speed}")
    assert line.startswith("checkpointing.metric_name: 'val_speed'")


def test_the_models_own_configuration_is_overridden(tmp_path: Path) -> None:
    config, _ = read(
        tmp_path, "policy: {hf_config_overrides: {max_position_embeddings: 64, rope_parameters: {rope_type: yarn}}}"
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
def test_a_value_that_is_no_section_ends_by_a_refusal(tmp_path: Path, section: str, value: Any) -> None:
    # some of these values ask for nothing there; none of them may end otherwise than by a ConfigError
    with contextlib.suppress(ConfigError):
        read(tmp_path, "", f"{section}={value}")


def test_check_says_that_it_was_read_as_a_file_of_nemo_rl(tmp_path: Path) -> None:
    path = recipe(tmp_path, "policy: {tokenizer: {new: null}}")
    refused = CliRunner().invoke(app, ["config", "check", str(path)])
    assert "prompt_file prompts/think.txt" in str(refused.exception)
    assert "NeMo RL file: " in refused.output
    (tmp_path / "prompts").mkdir()  # beside the file that names it
    (tmp_path / "prompts" / "think.txt").write_text("Think: {}")
    output = CliRunner().invoke(app, ["config", "check", str(path)]).stdout
    assert "valid; strictly on-policy" in output
    assert "NeMo RL file: " in output
    told: dict[str, list[str]] = {}
    found: list[str] = []
    for line in output.partition("used by another name:")[2].replace("\n      ", " ").splitlines():
        if line.endswith(":"):
            told[line] = found = []
        elif line.startswith("  "):
            found.append(line.strip())
    assert "policy.dtensor_cfg.activation_checkpointing -> policy.activation_checkpointing" in output
    for key in ("cluster.{gpus_per_node, num_nodes}: ", "policy.tokenizer.new: "):
        assert any(line.startswith(key) for line in told["not applicable:"])
    assert "loss_fn.sequence_is_aggregation: sum" in told["implied:"]
    assert max(map(len, output.splitlines()[1:])) <= 120


def test_show_prints_what_loads_again_as_headraces_own(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["config", "show", str(recipe(tmp_path))]).output
    assert "NeMo RL file: " in shown
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    examined = examine(again, [], {})
    assert examined.nemo_rl is None
    assert examined.config == load(recipe(tmp_path), [], {})
