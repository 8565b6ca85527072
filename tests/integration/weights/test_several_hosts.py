"""Buffer, trainer and replica on machines of their own, each with its address, and with defaults."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.parent import die_with_parent
from tests.chaos import runs

pytestmark = [
    pytest.mark.nightly,  # a real trainer and a replica, which both import torch; `test_addresses.py` has the choice of the address
    pytest.mark.timeout(1000),
]


def run(folder: Path, model: Path, url: str, machine: str) -> tuple[int, str, str]:
    """The trainer's exit code, and the logs of trainer and replica."""
    if lacks := runs.missing():
        pytest.skip(lacks)
    command = [
        *runs.NAMESPACES,
        sys.executable,
        "-m",
        "tests.support.several_hosts",
        str(folder),
        str(model),
        url,
        machine,
    ]
    kill = functools.partial(die_with_parent, signal.SIGKILL)
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, preexec_fn=kill)
    trainer, replica = ((folder / f"{name}.log").read_text() for name in ("trainer", "replica"))
    assert "Traceback" not in done.stderr, done.stderr + trainer + replica
    return done.returncode, trainer, replica


def test_replicas_elsewhere_find_the_trainer_by_its_default_address(tmp_path: Path, tiny_model: Path) -> None:
    """Although each machine's own name is 127.0.1.1, as Debian installs it."""
    code, trainer, replica = run(tmp_path, tiny_model, "redis://{buffer}:6379/0", "trainer")
    assert code == 0, trainer + replica
    assert "handed out at 10.77.0.3:" in trainer
    assert (tmp_path / "hosts" / "metrics.jsonl").exists(), list(tmp_path.iterdir())


def test_a_server_at_127_0_1_1_for_the_trainer_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """The trainer is on the server's machine and calls it by that machine's name: replicas elsewhere could not reach what it told them."""
    code, trainer, _ = run(tmp_path, tiny_model, "redis://node:6379/0", "buffer")
    assert code != 0
    (error,) = [line for line in trainer.splitlines() if line.startswith("error: ")]
    assert "weight_channel.host is null, and node (replay.redis_url) resolves to 127.0.0.1" in error
