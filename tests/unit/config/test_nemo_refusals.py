"""NeMo RL files: settings that matter are never ignored, settings without effect are never refused, and errors name the file's own keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.loading import examine
from tests.support import configurations
from tests.unit.config.nemo_cases import BASE, read, recipe, refusal

MEGATRON = "policy: {megatron_cfg: {enabled: true, expert_model_parallel_size: 8}}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_hybridep_prepad_packed_inputs", "true"),
        ("moe_hybridep_pad_uneven_dispatch_inputs", "true"),
        ("moe_mlp_glu_interleave_size", "32"),
        ("use_transformer_engine_op_fuser", "true"),
        ("inference_cuda_graph_scope", "block"),
        ("freeze_vision_model", "true"),
        ("freeze_vision_projection", "true"),
        ("freeze_sound_encoder", "true"),
        ("freeze_audio_tower", "true"),
        ("freeze_config.freeze_vision_model", "true"),
        ("freeze_config.freeze_vision_projection", "true"),
        ("radio_force_cpe_eval_mode", "true"),
        ("train_iters", "1000"),
        ("scheduler.override_opt_param_scheduler", "true"),
        ("scheduler.use_checkpoint_opt_param_scheduler", "false"),
        ("fp8_cfg", "{enabled: false, fp8: e4m3, fp8_recipe: blockwise, fp8_param: true, force_clear_fp8_caches: true}"),
        ("fp4_cfg", "{enabled: false, fp4: e2m1, fp4_recipe: nvfp4, fp4_param: false}"),
        ("num_layers_at_end_in_bf16", "8"),
        ("peft", "{enabled: false, dim: 128, target_modules: [linear_qkv], exclude_modules: ['*out_proj*'], dropout: 0.1,"
                 " dropout_position: post, lora_B_init_method: xavier}"),
    ],
)  # fmt: skip
def test_what_changes_no_number_is_replaced(tmp_path: Path, key: str, value: str) -> None:
    config, translation = read(tmp_path, MEGATRON, f"policy.megatron_cfg.{key}={value}")
    if key != "peft":  # the dimension of an adapter that is not in force
        assert config == read(tmp_path, MEGATRON)[0]
    listed = {at for keys in translation.replaced.values() for at in keys}
    assert any(at.startswith(f"policy.megatron_cfg.{key}") for at in listed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy.sequence_packing.algorithm", "modified_ffd"),
        ("policy.sequence_packing.algorithm", "CONCATENATIVE"),
        ("policy.generation.vllm_kwargs.mamba_cache_mode", "align"),
        ("telemetry", "{exporter: otlp, span_groups: all}"),
        ("data_plane", "{enabled: true, impl: transfer_queue, backend: simple}"),
        ("token_capture", "{enabled: true, staging_partition: staging}"),
        ("rollout_recovery", "{default_granularity: sibling, task_granularity_overrides: {math: prompt_group}}"),
    ],
)
def test_what_the_engine_and_the_services_do_themselves(tmp_path: Path, key: str, value: str) -> None:
    assert read(tmp_path, "", f"{key}={value}")[0] == read(tmp_path)[0]


def test_traces_are_switched_on_as_there(tmp_path: Path) -> None:
    config, _ = read(tmp_path, "telemetry: {enabled: true, service_name: adder, span_groups: default}")
    assert (config.telemetry.enabled, config.telemetry.service_name) == (True, "adder")


def test_bad_words_are_ours(tmp_path: Path) -> None:
    config, _ = read(tmp_path, "policy: {generation: {bad_words: ['<image>']}}")
    assert config.policy.generation.bad_words == ["<image>"]
    assert read(tmp_path, "policy: {generation: {bad_words: null}}")[0] == read(tmp_path)[0]


def test_the_memory_of_the_kv_cache_is_passed_on(tmp_path: Path) -> None:
    config, translation = read(tmp_path, "", "policy.generation.vllm_kwargs.kv_cache_memory_bytes=4294967296")
    assert config.policy.generation.vllm_cfg.kv_cache_memory_bytes == 2**32
    named = dict(translation.renamed)["policy.generation.vllm_kwargs.kv_cache_memory_bytes"]
    assert named == "policy.generation.vllm_cfg.kv_cache_memory_bytes"


AUTOMODEL = "policy.dtensor_cfg.automodel_kwargs"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (f"{AUTOMODEL}.freeze_config.freeze_language_model", "true", "the language model can't be frozen"),
        (f"{AUTOMODEL}.freeze_config.freeze_modules", "[lm_head]", "only the router can be frozen"),
        (f"{AUTOMODEL}.backend.fake_balanced_gate", "true", "a fake router is only for benchmarks"),
        (f"{AUTOMODEL}.backend.te_fp8", "{recipe: block}", None),
        (f"{AUTOMODEL}.torch_dtype", "float16", "policy.precision sets the type"),
        (f"{AUTOMODEL}.use_lora", "true", "unknown key, value true"),
        ("policy.dtensor_cfg.moe_parallelizer.lm_head_precision", "float32", "the output layer has the precision of the model"),
        ("policy.dtensor_cfg.fp8_cfg.enabled", "true", "fp8 or fp4"),
        ("policy.dtensor_cfg.fp8_cfg.enabeld", "true", "did you mean policy.dtensor_cfg.fp8_cfg.enabled?"),
        ("policy.draft.enabeld", "true", "did you mean policy.draft.enabled?"),
        ("policy.router_replay.enable", "true", "did you mean policy.router_replay.enabled?"),
        ("policy.megatron_cfg.enabeld", "true", "did you mean policy.megatron_cfg.enabled?"),
        ("policy.megatron_cfg.Enable", "true", "did you mean policy.megatron_cfg.enabled?"),
        ("policy.dtensor_cfg.lora_cfg.enalbed", "true", "did you mean policy.dtensor_cfg.lora_cfg.enabled?"),
        ("policy.megatron_cfg.enabled", "'true'", "'true' is neither true nor false"),
        ("policy.megatron_cfg.enabled", "1", "1 is neither true nor false"),
        ("policy.dtensor_cfg.enabled", "'false'", "'false' is neither true nor false"),
        ("value.megatron_cfg.enabled", "'true'", "'true' is neither true nor false"),
    ],
)  # fmt: skip
def test_what_matters_is_not_swallowed(tmp_path: Path, key: str, value: str, said: str | None) -> None:
    (line,) = refusal(tmp_path, "", f"{key}={value}")
    assert line.startswith(f"{key}")
    assert (said or "") in line


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("fp8_cfg.enabled", "true", "fp8 or fp4"),
        ("fp8_cfg.enabeld", "true", "did you mean policy.megatron_cfg.fp8_cfg.enabled?"),
        ("fp4_cfg.enabled", "true", "fp8 or fp4"),
        ("te_precision_config_file", "recipe.yaml", "precision for each layer"),
        ("fp32_lm_head", "true", "the output layer has the precision of the model"),
        ("freeze_config.freeze_language_model", "true", "the language model can't be frozen"),
        ("flextron_sampling_rates", "[1.0]", "elastic models"),
        ("layernorm_epsilon", "1e-6", "write rms_norm_eps in policy.hf_config_overrides"),
        ("peft.enabled", "'yes'", "'yes' is neither true nor false"),
    ],
)
def test_what_matters_to_megatron_is_not_swallowed(tmp_path: Path, key: str, value: str, said: str) -> None:
    (line,) = refusal(tmp_path, MEGATRON, f"policy.megatron_cfg.{key}={value}")
    assert line.startswith(f"policy.megatron_cfg.{key}: ")
    assert said in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("automodel_kwargs.backend", "{_target_: x.BackendConfig, attn: te, experts: gmm, fake_balanced_gate: false}"),
        ("automodel_kwargs.freeze_config", "{freeze_vision_tower: true, freeze_language_model: false, freeze_modules: []}"),
        ("automodel_kwargs", "{torch_dtype: bfloat16, use_liger_kernel: true, force_hf: true}"),
        ("moe_parallelizer", "{ignore_router_for_ac: true, reshard_after_forward: true, lm_head_precision: bfloat16}"),
        ("fp8_cfg", "{enabled: false, recipe_name: tensorwise}"),
    ],
)  # fmt: skip
def test_kernels_and_sharding_of_automodel_are_replaced(tmp_path: Path, key: str, value: str) -> None:
    assert read(tmp_path, "", f"policy.dtensor_cfg.{key}={value}")[0] == read(tmp_path)[0]


def test_a_section_that_is_off_is_not_looked_at_but_for_its_switch(tmp_path: Path) -> None:
    text = "policy: {megatron_cfg: {enabeld: true, optimizer: {lr: 1e-3}, unheard_of: 3, enable: false}}"
    (line,) = refusal(tmp_path, text)
    assert line == "policy.megatron_cfg.enabeld: unknown key, value true; did you mean policy.megatron_cfg.enabled?"


def test_a_lone_bound_of_importance_weights_truncates_as_it_did(tmp_path: Path) -> None:
    bound = "use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 2.0"
    config, translation = read(tmp_path, f"loss_fn: {{{bound}}}")
    assert config.loss_fn.truncated_importance_sampling_type == "tis"
    assert translation.implied["loss_fn.truncated_importance_sampling_type"] == "tis"
    (line,) = refusal(tmp_path, f"loss_fn: {{{bound}, truncated_importance_sampling_type: null}}")
    assert "truncated_importance_sampling_ratio 2.0 without truncated_importance_sampling_type" in line
    assert "loss_fn.truncated_importance_sampling_type" not in read(tmp_path)[1].implied


FLAT = """
cluster: {}
data:
  dataset_name: nope
  env_name: math
env: {math: {num_workers: 1}}
"""


def test_an_error_names_the_key_that_is_in_the_file_and_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("cluster: {}\ndata:\n  train:\n    dataset_name: nope\n    prompt_fil: x\n")
    named, unknown, *_ = configurations.refusal(path, read=examine).splitlines()
    assert named.startswith("data.train.dataset_name: 'nope' is not supported; ")
    assert named.endswith(f"({path}:4)")
    assert unknown == (
        f"data.train.prompt_fil: unknown key, value 'x' ({path}:5); did you mean data.train.prompt_file?"
    )
    path.write_text("data:\n  train:\n    dataset_name: nope\n    siz: 3\n")
    first, second = configurations.refusal(path, read=examine).splitlines()
    assert first.startswith("data.train.dataset_name: unknown data set 'nope'; ")
    assert first.endswith(f"({path}:3)")
    assert second == f"data.train.siz: unknown key, value 3 ({path}:4); did you mean data.train.size?"


def test_an_error_in_the_flat_form_names_the_flat_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FLAT)
    (line,) = configurations.refusal(path, read=examine).splitlines()
    assert line.startswith("data.dataset_name: 'nope' is not supported; ")
    assert line.endswith(f"({path}:4)")
    path.write_text(FLAT.replace("nope", "gsm8k").replace("env_name: math", "processor: [1]"))
    (line,) = configurations.refusal(path, read=examine).splitlines()
    assert line.startswith("data.processor: [1] is not one of ")
    assert line.endswith(f"({path}:5)")


def test_what_a_data_set_takes_from_the_default_has_its_place(tmp_path: Path) -> None:
    examined = examine(recipe(tmp_path), [], {})
    assert "base.yaml:" in examined.origin(("data", "train", "0", "prompt_file"))
    assert "base.yaml:" in examined.origin(("data", "train", "0", "dataset_name"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("policy: {megatron_cfg: {enabled: true, scheduler: {lr_decay_style: cosine, lr_decay_iters: null}}}", "lr_decay_iters null with"),
        ("policy: {megatron_cfg: {enabled: true, scheduler: {start_weight_decay: null, end_weight_decay: 0.3}}}",
         "start_weight_decay null with end_weight_decay 0.3"),
        ("policy: {megatron_cfg: {enabled: true, scheduler: {lr_decay_style: true}}}", "lr_decay_style true is not constant"),
        ("data: {train: {dataset_name: true}}", "data.train.dataset_name: true is not supported"),
        ("data: {default: {processor: true}}", "data.default.processor: true is not one of"),
        ("env: {math: {math_verify_impl: false}}", "env.math.math_verify_impl: false is not one of"),
        ("data: {default: {env_name: null}}", "env_name: null is not one of the environments"),
    ],
)  # fmt: skip
def test_values_are_said_as_yaml_writes_them(tmp_path: Path, text: str, said: str) -> None:
    assert any(said in line for line in refusal(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("env: {math: {math_verify_impl: [x]}}", "env.math.math_verify_impl"),
        ("env: {math: {math_verify_impl: {}}}", "env.math.math_verify_impl"),
        ("grpo: {async_grpo: null}\nasync_rl: {sampler: {name: [x]}}", "async_rl.sampler.name"),
        ("data: {_override_: true, dataset_name: [x]}", "data.dataset_name"),
    ],
)
def test_a_list_in_the_place_of_a_name_is_named(tmp_path: Path, text: str, key: str) -> None:
    assert any(line.startswith(f"{key}: ") for line in refusal(tmp_path, text))


def test_data_of_images_are_the_reason(tmp_path: Path) -> None:
    text = (
        "data: {_override_: true, dataset_name: clevr-cogent, split: trainA}\nenv: {_override_: true, clevr-cogent: {}}"
    )
    (line,) = refusal(tmp_path, text)
    assert "data.dataset_name: 'clevr-cogent' holds images" in line
    (line,) = refusal(tmp_path, "", "data.train=[{dataset_name: gsm8k}, {dataset_name: refcoco}]")
    assert line.startswith("data.train.1.dataset_name: 'refcoco' (command line)".replace(" (command line)", " holds"))


def test_one_reason_is_one_line(tmp_path: Path) -> None:
    keys = "penalize_invalid_tool_call: true, invalid_tool_call_advantage: -5.0, malformed_thinking_advantage: -5.0"
    (line,) = refusal(tmp_path, f"grpo: {{{keys}}}")
    assert line.startswith(
        "grpo.penalize_invalid_tool_call: true, and grpo.{invalid_tool_call_advantage, malformed_thinking_advantage}"
    )


def test_one_value_that_cant_be_is_one_line(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, "", "data.train.dataset_name=Unheard", "data.validation={dataset_name: Unheard}")
    assert line.startswith("data.train.dataset_name: 'Unheard' is not supported")
    assert line.endswith(" (command line), and data.validation.dataset_name")


def test_a_suggestion_is_like_the_name(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, "", "policy.generation.vllm_cfg.max_completion_length=3")
    assert line.endswith("did you mean policy.generation.max_new_tokens?")
    (line,) = refusal(tmp_path, MEGATRON, "policy.megatron_cfg.moe_reuter_fusions=true")
    assert line.endswith("did you mean policy.megatron_cfg.moe_router_fusion?")


@pytest.mark.parametrize("text", ["grpo: null\nppo: null\n", "ppo:\ngrpo:\n"])
def test_two_algorithms_that_are_null_leave_none(tmp_path: Path, text: str) -> None:
    (line,) = refusal(tmp_path, text)
    assert "recipe.yaml: grpo and ppo are both null" in line
    (line,) = refusal(tmp_path, "", "grpo=null", "ppo=null", base=BASE)
    assert "grpo and ppo are both null" in line
