"""Whether a tracker would get a run's metrics now, asked before the run starts.

The library of one with a server says so, in a process of its own: in a terminal it would ask for a key, it takes seconds to import, and
some of it runs on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.base.addresses import url_through_proxy
from headrace.config.in_yaml import without_password
from headrace.config.logger import LoggerConfig

_ANSWER_S = 60.0
_SERVER = "MLFLOW_TRACKING_URI"
# An answer that is late now need not be late later. MLflow would try for minutes.
_BRIEFLY = {
    "WANDB_SILENT": "true",
    "WANDB_HTTP_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
}


def find_problems(logger: LoggerConfig) -> Iterator[str]:
    """Yield a warning for each enabled tracker that would not get the metrics now. Its library is there."""
    folder = Path(logger.tensorboard.log_dir or ".").absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if logger.tensorboard_enabled and not (there.is_dir() and os.access(there, os.W_OK)):
        yield f"logger.tensorboard.log_dir {logger.tensorboard.log_dir}: {there} is no folder that can be written to; name another"
    if logger.wandb_enabled and (problem := _ask("wandb")):
        yield f"logger.wandb_enabled: {problem}; WANDB_MODE=offline writes files on purpose"
    server = logger.mlflow.server or ""
    if logger.mlflow_enabled and server.startswith("http") and (problem := _ask("mlflow", server)):
        yield f"logger.mlflow_enabled: {problem}; the run goes on, and MLflow gets its metrics once it takes them"


def is_logged_in(*, verify: bool = False) -> bool:
    """Return whether there is a login for Weights & Biases, or WANDB_MODE makes it unnecessary. With `verify` its server is asked; raises
    an error of the library if it does not accept the login, or does not answer."""
    import wandb

    if "WANDB_MODE" in os.environ:
        return True
    try:
        return bool(wandb.login(verify=verify, timeout=1))
    except (wandb.errors.UsageError, TimeoutError):  # it would prompt for a key
        return False


def _ask(tracker: str, server: str = "") -> str:
    """Return why the tracker would get nothing; empty if it would."""
    argv = [sys.executable, "-P", "-m", __name__, tracker]
    environ = {
        **os.environ,
        **_BRIEFLY,
        **({_SERVER: server} if server else {}),
    }  # not as an argument: it may have a password
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, env=environ
        )
    except subprocess.TimeoutExpired:
        return f"{tracker} has not answered within {_ANSWER_S:g} s"
    if done.returncode == 0:
        return ""
    reason = without_password((done.stderr.splitlines() or [""])[-1]) or f"{tracker} ended the process that asked it"
    return f"{without_password(server)}{url_through_proxy(server)}: {reason}" if server else reason


def _main(tracker: str) -> str | None:
    """Return, in one line, why the tracker would get nothing; None if it would."""
    try:
        if tracker == "mlflow":
            from mlflow import MlflowClient

            server = os.environ[_SERVER]
            MlflowClient(server, registry_uri=server).search_experiments(max_results=1)
        elif not is_logged_in(verify=True):
            return (
                "not logged in (`wandb login`, or WANDB_API_KEY); the run is written to files, which `wandb sync` sends"
            )
    except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return None


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
