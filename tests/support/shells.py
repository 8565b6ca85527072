"""Shells in which `headrace up` is started: variables, and limits, that change nothing."""

from __future__ import annotations

import dataclasses
import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

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
    "night": {"GRPC_TRACE": "all", "PYTHONDEVMODE": "1", "TMPDIR": "/proc/nothing", "FORCE_COLOR": "1"},
}


@dataclasses.dataclass(frozen=True)
class Shell:
    """Variables, and what happens to the process before it becomes `headrace up`."""

    variables: Mapping[str, str]
    before: Callable[[], object] = lambda: None

    def environ(self, folder: Path) -> dict[str, str]:
        """Its variables for a test with this folder."""
        variables = {name: value.replace("FOLDER", str(folder)) for name, value in self.variables.items()}
        if variables.get("TMPDIR", "").startswith(str(folder)):
            Path(variables["TMPDIR"]).mkdir()
        return variables


def limited() -> None:
    """A narrow shell: new files are its user's alone, few may be open, there are no core dumps and no input."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.close(0)


LOUD = Shell(SHELLS["loud"], limited)
