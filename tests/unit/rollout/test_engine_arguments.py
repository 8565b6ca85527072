"""The engine's arguments and errors, as far as they need no engine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace_services.refit.receiver import refit_problem
from headrace_services.rollout import child, engine
from headrace_services.rollout.engine import device_problem, engine_arguments, explain, prepare_environment


def config(**vllm_cfg: Any) -> Config:
    return Config.model_validate({"policy": {"generation": {"vllm_cfg": vllm_cfg}}})


def test_log_probabilities_are_those_tokens_are_drawn_with() -> None:
    assert engine_arguments(config(), on_cpu=True)["logprobs_mode"] == "processed_logprobs"


@pytest.mark.parametrize(("there", "taken"), [(2, None), (4, 4), (5, 4), (0, 0)])
def test_a_replica_with_too_few_gpus_starts_no_engine(
    monkeypatch: pytest.MonkeyPatch, there: int, taken: int | None
) -> None:
    found = SimpleNamespace(devices=tuple(range(there)))
    monkeypatch.setattr(engine.devices, "visible", lambda environ: found)
    if taken is None:
        with pytest.raises(ServiceError, match=r"tensor_parallel_size 4 .* 2 GPUs .* nodes"):
            engine.find_own_gpus(config(tensor_parallel_size=4))
        return
    assert len(engine.find_own_gpus(config(tensor_parallel_size=4))) == taken


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


def test_the_engine_makes_room_for_an_adapter_that_comes_alone() -> None:
    def arguments(**lora: Any) -> dict[str, Any]:
        given = Config.model_validate({"policy": {"lora_cfg": {"enabled": True, "dim": 17, **lora}}})
        return engine_arguments(given, on_cpu=True)

    alone = arguments(refit="adapter")
    assert (alone["enable_lora"], alone["max_lora_rank"]) == (True, 32)
    assert arguments(refit="adapter", dim=512)["max_lora_rank"] == 512
    assert "enable_lora" not in arguments()
    assert "enable_lora" not in arguments(refit="adapter", enabled=False)
    with pytest.raises(ValidationError, match=r"dim 513 .*merged"):
        arguments(refit="adapter", dim=513)


GPU = {
    "gpu_memory_utilization": 0.9,
    "kv_cache_memory_bytes": None,
    "enforce_eager": False,
    "max_num_seqs": 257,  # with the probe's
    "max_num_batched_tokens": 8192,
}


def test_the_engines_defaults_follow_the_device() -> None:
    def taken(on_cpu: bool, **vllm_cfg: Any) -> dict[str, Any]:
        arguments = engine_arguments(config(**vllm_cfg), on_cpu=on_cpu)
        return {key: arguments.get(key) for key in GPU}

    cpu = {**dict.fromkeys(GPU), "kv_cache_memory_bytes": 2**28, "enforce_eager": True, "max_num_seqs": 257}
    assert taken(False) == GPU
    assert taken(True) == cpu
    assert taken(False, max_num_seqs=9000) == {**GPU, "max_num_seqs": 9001, "max_num_batched_tokens": 9001}
    # what is configured stays, and the cache is sized from a share that is given
    assert taken(True, gpu_memory_utilization=0.3) == {
        **cpu,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": None,
    }
    given = {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 2**24, "enforce_eager": True, "max_num_seqs": 2}
    assert taken(False, **given, max_num_batched_tokens=64) == {
        **given,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
    }


def test_a_large_gpu_computes_more_sequences_at_once() -> None:
    def sequences(gib: int, **vllm_cfg: Any) -> int:
        arguments = engine_arguments(config(**vllm_cfg), on_cpu=False, device_memory=gib * 2**30)
        return int(arguments["max_num_seqs"]) - 1

    assert [sequences(gib) for gib in (0, 40, 69, 79, 141)] == [256, 256, 256, 1024, 1024]
    assert sequences(79, max_num_seqs=300) == 300
    assert sequences(79, max_num_batched_tokens=512) == 511


def test_a_batch_has_a_token_of_each_sequence_and_of_the_probe() -> None:
    with pytest.raises(ValidationError, match=r"max_num_batched_tokens 64 .*max_num_seqs 64"):
        config(max_num_seqs=64, max_num_batched_tokens=64)


@pytest.mark.parametrize("sequences", [1, 2, 4, 8, 30, 64, 136, 255, 256, 1024])
def test_the_slot_of_the_probe_costs_no_cuda_graph(sequences: int) -> None:
    """By vLLM's own rule for what it captures on an H100."""
    from vllm.config import VllmConfig

    def captured(max_num_seqs: int, largest: int | None) -> list[int]:
        compilation = SimpleNamespace(
            max_cudagraph_capture_size=largest,
            cudagraph_capture_sizes=None,
            cudagraph_mode="full and piecewise",
            compile_sizes=None,
            pass_config=SimpleNamespace(enable_sp=False),
            post_init_cudagraph_sizes=lambda: None,
        )
        rule = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
            compilation_config=compilation,
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            uniform_decode_query_len=1,
            performance_mode="balanced",
            speculative_config=None,
        )
        VllmConfig._set_cudagraph_sizes(rule)  # type: ignore[arg-type]
        return compilation.cudagraph_capture_sizes or []

    arguments = engine_arguments(config(max_num_seqs=sequences), on_cpu=False)
    ours = captured(arguments["max_num_seqs"], arguments["max_cudagraph_capture_size"])
    assert len(ours) <= len(captured(sequences, None)) + (sequences < 8)


def test_the_scheduling_of_the_engine_is_passed_on() -> None:
    assert engine_arguments(config(), on_cpu=False)["async_scheduling"] is None
    assert engine_arguments(config(async_scheduling=False), on_cpu=False)["async_scheduling"] is False


def test_the_engines_sizes_are_said_in_one_line() -> None:
    said = config().policy.generation.vllm_cfg.resolve(on_cpu=False).sizes
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
    assert environment["VLLM_RPC_BASE_PATH"] == str(tmp_path), "TMPDIR may be too long for a socket"


def test_an_error_of_vllm_names_the_shells_variables() -> None:
    said = explain(config(), "ValueError: Unable to configure handler 'vllm'", ["VLLM_LOGGING_LEVEL"], on_cpu=True)
    assert "VLLM_LOGGING_LEVEL" in said
    assert "unset" not in explain(config(), "ValueError: no", on_cpu=True)
    assert "util-linux" in explain(config(), "CalledProcessError: Command 'lscpu --json' returned 127", on_cpu=True)


def test_an_installation_whose_engines_outlive_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(engine, "entry_points", lambda **_: ())
    with pytest.raises(ServiceError, match="install it again"):
        prepare_environment(config(), tmp_path / "report")


def vllm_config(
    *,
    parallel: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    moe: str = "triton",
    device: str = "cuda",
    lora: bool = False,
) -> SimpleNamespace:
    """What is looked at of a `VllmConfig`, which can be made without its model's files."""
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}
    sizes["tensor_parallel_size"] = 1
    kind = {"model": "M", "quantization": None, "enforce_eager": False, "use_mla": False, "is_moe": False}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes | (parallel or {})),
        model_config=SimpleNamespace(**kind | (model or {})),
        device_config=SimpleNamespace(device_type=device),
        kernel_config=SimpleNamespace(moe_backend=moe),
        lora_config=SimpleNamespace() if lora else None,
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline parallel (2 ways)"),
        ({"parallel": {"data_parallel_size": 4}}, "data parallel (4 ways)"),
        ({"parallel": {"enable_expert_parallel": True}}, "expert parallel"),
        ({"model": {"quantization": "fp8"}}, "M is quantised (fp8)"),
        ({"model": {"use_mla": True}}, "enforce_eager=true"),
        ({"model": {"is_moe": True}, "moe": "flashinfer_trtllm"}, "moe_backend flashinfer_trtllm"),
        ({"model": {"is_moe": True}, "lora": True}, "refit adapter: the replica is a mixture of experts"),
        ({"model": {"use_mla": True}, "lora": True, "device": "cpu"}, "latent attention (MLA), where this is not"),
        ({"parallel": {"tensor_parallel_size": 2}, "lora": True}, "tensor parallel (2 ways), where this is not proved"),
    ],
)
def test_a_model_that_cant_be_refitted_safely_is_refused(changes: dict[str, Any], said: str) -> None:
    assert said in str(refit_problem(vllm_config(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"is_moe": True}},
        {"lora": True},
        {"parallel": {"tensor_parallel_size": 2}},
        {"model": {"is_moe": True, "enforce_eager": True}, "moe": "auto"},
        {"model": {"use_mla": True, "enforce_eager": True}},
        {"model": {"is_moe": True, "use_mla": True}, "moe": "auto", "device": "cpu"},
    ],
)
def test_one_that_can_be_is_not(changes: dict[str, Any]) -> None:
    assert refit_problem(vllm_config(**changes)) is None


def test_dtypes_and_the_attention_backend_are_configured() -> None:
    arguments = engine_arguments(config(kv_cache_dtype="fp8", attention_backend="FLASHINFER"), on_cpu=False)
    assert (arguments["kv_cache_dtype"], arguments["attention_backend"]) == ("fp8", "FLASHINFER")
    assert "attention_backend" not in engine_arguments(config(), on_cpu=False)


def test_float32_is_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = {"VLLM_FLOAT32_MATMUL_PRECISION": "high"}
    monkeypatch.setattr(os, "environ", environment)
    prepare_environment(config(), tmp_path)
    assert environment["VLLM_FLOAT32_MATMUL_PRECISION"] == "high"
    assert "TRITON_F32_DEFAULT" not in environment
    prepare_environment(config(precision="float32"), tmp_path)
    assert environment["VLLM_FLOAT32_MATMUL_PRECISION"] == "highest"
    assert environment["TRITON_F32_DEFAULT"] == "ieee"


@pytest.mark.parametrize(("given", "there", "warned"), [("", "ieee", 0), ("ieee", "ieee", 0), ("tf32", "tf32", 1)])
def test_the_shells_setting_of_triton_stays_and_is_no_secret(
    given: str,
    there: str,
    warned: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "environ", {"TRITON_F32_DEFAULT": given})
    prepare_environment(config(precision="float32"), tmp_path)
    assert os.environ["TRITON_F32_DEFAULT"] == there
    assert len([line for line in caplog.messages if "TRITON_F32_DEFAULT=tf32" in line]) == warned


def test_nccl_and_model_runner_are_chosen_before_vllm_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {})
    given = Config.model_validate({"weight_channel": {"timeout_s": 90}})
    prepare_environment(given, tmp_path)
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "45"  # half of it
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    monkeypatch.setattr(os, "environ", {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    prepare_environment(given, tmp_path)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_a_child_that_ended_is_known_by_vllms_words() -> None:
    said = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}"
    assert engine.child_ended(RuntimeError(said))
    assert not engine.child_ended(RuntimeError("the model has no layers"))
    assert not engine.child_ended(ValueError(f"no model at {said}"))
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    raising = Path(str(vllm.origin)).parent / "v1" / "engine" / "utils.py"
    assert "Engine core initialization failed" in raising.read_text()
