"""What the comparisons with TRL share: its virtual environment, processes that end with the benchmark, free ports."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from headrace.net.service import die_with_parent

PEER = ("torch==2.13.0", "trl==1.16.*")
TIMEOUT_S = 900


def peer_python(console: Console) -> Path:
    """The Python of an environment that holds TRL, made on first use: it wants a newer transformers than vLLM."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace" / "trl-1.16"
    python = cache / "bin" / "python"
    complete = cache / "complete"
    if not complete.exists():
        console.print(f"installing {' and '.join(PEER)} in {cache} …")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(cache)], check=True)
        for requirement in PEER:  # torch first: what comes after must not bring another one
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", requirement], check=True)
        complete.touch()
    return python


def peer_environment(threads: int) -> dict[str, str]:
    """Environment of a peer's process: so many threads, which wait as those of the pipeline's services do, no GPU, no model hub."""
    ours = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return os.environ | ours | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(command: list[str], environment: dict[str, str]) -> str:
    """Its standard output. Raises `SystemExit` with its last words if it fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{command} took more than {TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise SystemExit(f"{command} failed with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[None]:
    child = subprocess.Popen(command, preexec_fn=die_with_parent)
    try:
        yield
    finally:
        child.terminate()
        child.wait(timeout=30)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
