"""`headrace up` in hostile shells: the run is the same as in any other, and the variables are in the table of docs/operations.md.

By day one shell with many variables; `make test-all` has others, and every variable alone. What is refused is in
tests/unit/cli/test_shell.py.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """
run: {{id: test, dir: {folder}/runs}}
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 2
  max_num_steps: 1
  use_leave_one_out_baseline: false
  val_at_start: true
  val_period: 0
  async_grpo: {{enabled: true, max_trajectory_age_steps: 1}}
loss_fn: {{reference_policy_kl_penalty: 0}}
policy:
  model_name: {model}
  precision: float32
  max_total_sequence_length: 64
  generation: {{max_new_tokens: 6, val_temperature: 0, vllm_cfg: {{kv_cache_memory_bytes: 67108864}}}}
data:
  train: {{dataset_name: arithmetic, env_name: math, size: 200}}
  validation: {{dataset_name: arithmetic, env_name: math, size: 40, seed: 1}}
env:
  math: {{type: math}}
reward: {{workers: 1}}
"""

NOTHING = "/nonexistent/nothing"
# Variables that change nothing, each alone and all of a shell together. FOLDER is a folder of the test.
SHELLS: dict[str, dict[str, str]] = {
    "quiet": {
        "LD_PRELOAD": f"{NOTHING}.so",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_USE_V1": "0",
        "VLLM_ATTENTION_BACKEND": "FLASHINFER",
        "VLLM_API_KEY": "canary",
        "HF_TOKEN": "canary",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "GRPC_VERBOSITY": "debug",
        "GRPC_ENABLE_FORK_SUPPORT": "1",
        "SSL_CERT_FILE": NOTHING,
        "SSL_CERT_DIR": NOTHING,
        "REQUESTS_CA_BUNDLE": NOTHING,
        "PYTHONOPTIMIZE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONIOENCODING": "ascii",
        "PYTHONSTARTUP": NOTHING,
        "LC_ALL": "C",
        "LANG": "nonsense",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "COLUMNS": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "WANDB_MODE": "disabled",
        "WANDB_API_KEY": "canary",
        "CUDA_VISIBLE_DEVICES": "",
        "MKL_NUM_THREADS": "7",
        "TMPDIR": "FOLDER/with a space",
    },
    "loud": {
        "VLLM_WORKER_MULTIPROC_METHOD": "forkserver",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "10.9.9.9",
        "VLLM_PORT": "5599",
        "HF_HOME": "/proc/nothing",
        "TRANSFORMERS_CACHE": "/proc/nothing",
        "HOME": "/proc",
        "XDG_CACHE_HOME": "/proc/nothing",
        "XDG_CONFIG_HOME": "/proc/nothing",
        "MPLBACKEND": "TkAgg",
        "MPLCONFIGDIR": "/proc/nothing",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "",
        "PYTHONFAULTHANDLER": "1",
        "LC_ALL": "tr_TR.UTF-8",
        "TORCH_COMPILE_DISABLE": "0",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TORCH_LOGS": "+dynamo",
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": NOTHING,
        "TZ": "Nonsense/Zone",
        "OMP_WAIT_POLICY": "ACTIVE",
        "OMP_PROC_BIND": "true",
        "MLFLOW_TRACKING_URI": "http://mlflow.invalid",
        "TMPDIR": "FOLDER/" + "x" * 200,
    },
    # slow ones
    "night": {
        "GRPC_TRACE": "all",
        "PYTHONDEVMODE": "1",
        "TMPDIR": "/proc/nothing",
        "FORCE_COLOR": "1",
    },
}


@dataclasses.dataclass(frozen=True)
class Shell:
    """Variables, and what happens to the process before it becomes `headrace up`."""

    variables: Mapping[str, str]
    before: Callable[[], object] = lambda: None


def limited() -> None:
    """A narrow shell: new files are its user's alone, few may be open, there are no core dumps and no input."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.close(0)


def shells() -> list[object]:
    """That of every day, the others, and each variable alone."""
    many = [
        pytest.param(Shell(SHELLS["loud"], limited), id="loud"),
        pytest.param(Shell(SHELLS["quiet"]), id="quiet", marks=pytest.mark.nightly),
    ]
    alone = [
        pytest.param(Shell({name: value}), id=f"{name}={value:.20}", marks=pytest.mark.nightly)
        for variables in SHELLS.values()
        for name, value in variables.items()
    ]
    streams = [
        pytest.param(Shell({}, lambda number=number: os.close(number)), id=f"{number}>&-", marks=pytest.mark.nightly)
        for number in range(3)
    ]
    return [*many, *alone, *streams]


@pytest.fixture(scope="module")
def answers() -> dict[str, float]:
    """What the validation of the initial weights found in the first shell: greedy answers, so those of every other."""
    return {}


@pytest.mark.parametrize("shell", shells())
def test_a_run_is_the_same_in_a_hostile_shell(
    shell: Shell, tmp_path: Path, tiny_model: Path, answers: dict[str, float]
) -> None:
    config, said = tmp_path / "run.yaml", tmp_path / "up.out"
    config.write_text(CONFIG.format(folder=tmp_path, model=tiny_model))
    variables = {name: value.replace("FOLDER", str(tmp_path)) for name, value in shell.variables.items()}
    if variables.get("TMPDIR", "").startswith(str(tmp_path)):
        Path(variables["TMPDIR"]).mkdir()
    with said.open("wb") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", "up", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            preexec_fn=shell.before,
        )
        try:
            assert run.wait(timeout=600) == 0, said.read_text(errors="replace")
        finally:
            run.terminate()
            run.wait()
    assert "restarting" not in said.read_text(errors="replace")
    folder = tmp_path / "runs" / "test"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [0]
    (first,) = [line["metrics"] for line in lines if line["kind"] == "validation" and line["step"] == 0]
    assert answers.setdefault("accuracy", first["accuracy"]) == first["accuracy"]
    assert (folder / "checkpoints" / "step_1" / "policy" / "model.safetensors").stat().st_size > 0
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in written if b"canary" in path.read_bytes()] == []


def test_the_table_has_what_is_tested() -> None:
    table = (ROOT / "docs" / "operations.md").read_text().partition("## What your shell sets")[2].partition("\n## ")[0]
    patterns = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)))
    refused = ("PYTHONWARNINGS", "PYTHONINSPECT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GRPC_POLL_STRATEGY")
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
    tested = {*refused, *caches, *(name for variables in SHELLS.values() for name in variables)}
    assert sorted(name for name in tested if not any(fnmatch.fnmatchcase(name, one) for one in patterns)) == []
