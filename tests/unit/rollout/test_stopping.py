"""How the process of a replica ends that is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys

BEGIN = """
import atexit, os, signal
from headrace.config import Config
from headrace_services.rollout import main

atexit.register(print, "taken apart")

class Stopped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
"""


def ended(code: str) -> subprocess.CompletedProcess[str]:
    """The process of a replica that does `code` in place of its work."""
    return subprocess.run(
        [sys.executable, "-c", f"{BEGIN}\ndef run(config):\n{code}\nmain._run = run\nmain.main(Config())"],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_replica_that_has_left_ends_at_once_with_what_it_has_said() -> None:
    """To take the interpreter apart would take seconds, with vLLM in it."""
    for code in ("    print('left', end='')", "    print('left', end=''); os.kill(os.getpid(), signal.SIGTERM)"):
        done = ended(code)
        assert (done.returncode, done.stdout) == (0, "left"), done.stderr


def test_a_signal_that_python_loses_at_the_start_ends_it_still() -> None:
    done = ended("    main._LEAVING_S = 1\n    Stopped()\n    signal.pause()")
    assert "Exception ignored in" in done.stderr
    assert done.returncode == -signal.SIGALRM
