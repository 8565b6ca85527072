"""The engine's arguments and errors, as far as they need no engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config
from headrace.errors import ServiceError
from headrace_services.rollout import child, engine
from headrace_services.rollout.engine import device_problem, engine_arguments, explain, prepare_environment


def config(**vllm_cfg: Any) -> Config:
    return Config.model_validate({"policy": {"generation": {"vllm_cfg": vllm_cfg}}})


def test_log_probabilities_are_those_tokens_are_drawn_with() -> None:
    assert engine_arguments(config(), on_cpu=True)["logprobs_mode"] == "processed_logprobs"


def test_replicas_draw_different_numbers() -> None:
    assert engine_arguments(config(), on_cpu=True)["seed"] != engine_arguments(config(), on_cpu=True)["seed"]


def test_only_one_cpu_worker_lives_in_the_engine_process() -> None:
    assert "distributed_executor_backend" in engine_arguments(config(), on_cpu=True)
    assert "distributed_executor_backend" not in engine_arguments(config(tensor_parallel_size=2), on_cpu=True)
    assert "distributed_executor_backend" not in engine_arguments(config(), on_cpu=False)


def test_a_cpu_engine_computes_each_prompt_in_one_step() -> None:
    assert engine_arguments(config(), on_cpu=True)["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in engine_arguments(config(), on_cpu=False)


def test_precision_follows_the_policy_unless_set() -> None:
    assert engine_arguments(config(), on_cpu=True)["dtype"] == "bfloat16"
    assert engine_arguments(config(precision="float32"), on_cpu=True)["dtype"] == "float32"


def test_the_models_configuration_is_overridden_where_it_is_asked_for() -> None:
    overridden = Config.model_validate({"policy": {"hf_config_overrides": {"max_position_embeddings": 9}}})
    assert engine_arguments(overridden, on_cpu=True)["hf_overrides"] == {"max_position_embeddings": 9}
    assert "hf_overrides" not in engine_arguments(config(), on_cpu=True)


GPU = {
    "gpu_memory_utilization": 0.9,
    "kv_cache_memory_bytes": None,
    "enforce_eager": False,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}


def test_the_engines_defaults_follow_the_device() -> None:
    def taken(on_cpu: bool, **vllm_cfg: Any) -> dict[str, Any]:
        arguments = engine_arguments(config(**vllm_cfg), on_cpu=on_cpu)
        return {key: arguments.get(key) for key in GPU}

    cpu = {**dict.fromkeys(GPU), "kv_cache_memory_bytes": 2**28, "enforce_eager": True, "max_num_seqs": 256}
    assert taken(False) == GPU
    assert taken(True) == cpu
    assert taken(False, max_num_seqs=9000) == {**GPU, "max_num_seqs": 9000, "max_num_batched_tokens": 9000}
    # what is configured stays, and the cache is sized from a share that is given
    assert taken(True, gpu_memory_utilization=0.3) == {
        **cpu,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": None,
    }
    given = {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 2**24, "enforce_eager": True, "max_num_seqs": 2}
    assert taken(False, **given, max_num_batched_tokens=64) == {**given, "max_num_batched_tokens": 64}


def test_the_engines_sizes_are_said_in_one_line() -> None:
    said = config().policy.generation.vllm_cfg.resolved(on_cpu=False).sizes
    assert said == (
        "tensor_parallel_size 1, gpu_memory_utilization 0.9, enforce_eager False, max_num_seqs 256, max_num_batched_tokens 8192"
    )


def test_memory_that_lacks_on_a_gpu_is_a_matter_of_the_share() -> None:
    said = "ValueError: Free memory on device (30/80 GiB) on startup is less than desired GPU memory utilization"
    assert "gpu_memory_utilization 0.9; lower it" in explain(config(), said, on_cpu=False)


def test_a_device_that_vllm_was_not_built_for_is_refused() -> None:
    assert "rollout.device: cuda" in str(device_problem("cuda", on_cpu=True))
    assert "rollout.device: cpu" in str(device_problem("cpu", on_cpu=False))
    assert device_problem("auto", on_cpu=True) is None
    assert device_problem("cuda", on_cpu=False) is None


@pytest.mark.parametrize(
    ("said", "keys"),
    [
        (
            "ValueError: To serve at least one request with the models's max seq len (2048), (0.06 GiB KV cache is needed, "
            "which is larger than the available KV cache memory (0.0 GiB).",
            ["kv_cache_memory_bytes", "max_total_sequence_length"],
        ),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", ["kv_cache_memory_bytes", "lower it"]),
        (
            "ValueError: User-specified max_model_len (4096) is greater than the derived max_model_len (512)",
            ["max_total_sequence_length", "lower it"],
        ),
        (
            "AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'",
            ["apt-get install libnuma1"],
        ),
        (
            "ValueError: Embedding models do not support `--runner generate`",
            ["policy.model_name", "causal language model"],
        ),
    ],
)
def test_an_error_of_vllm_is_one_line_with_the_key_to_change(said: str, keys: list[str]) -> None:
    message = explain(config(), said.replace(" ", "\n", 1), on_cpu=True)
    assert "\n" not in message
    assert all(key in message for key in keys)
    assert said[:40] in message


@pytest.mark.parametrize(
    ("before", "after"), [(None, None), ("", ",headrace_rollout"), ("mine", "mine,headrace_rollout")]
)
def test_a_choice_of_plugins_keeps_the_one_that_watches_the_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str | None, after: str | None
) -> None:
    environment = {} if before is None else {"VLLM_PLUGINS": before}
    monkeypatch.setattr(os, "environ", environment)
    prepare_environment(config(), tmp_path / "report")
    assert environment.get("VLLM_PLUGINS") == after
    assert environment[child.REPORT] == str(tmp_path / "report")


def test_an_installation_whose_engines_would_outlive_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(engine, "entry_points", lambda **_: ())
    with pytest.raises(ServiceError, match="install it again"):
        prepare_environment(config(), tmp_path / "report")
