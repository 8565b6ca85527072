"""How the process of a replica ends that is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys

# what each replica does in place of its work, in a fork of what has imported it
EACH = """
import atexit, os, signal, sys
from headrace.base.parent import die_with_parent
from headrace.config import Config
from headrace_services.rollout import main

class Stopped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

for code in sys.argv[1:]:
    if not os.fork():
        die_with_parent(signal.SIGKILL)
        os.dup2(1, 2)
        atexit.register(print, "taken apart")
        exec(f"def run(config):\\n{code}")
        main._run = run
        main.main(Config())
        sys.exit()
    _, status = os.wait()
    print("", os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)
"""


def ended(*codes: str) -> list[str]:
    """What each of these replicas has said, and its exit code."""
    command = [sys.executable, "-c", EACH, *codes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_a_replica_that_has_left_ends_at_once_with_what_it_has_said() -> None:
    """To take the interpreter apart would take seconds, with vLLM in it."""
    left = "    print('left', end='')"
    assert ended(left, f"{left}; os.kill(os.getpid(), signal.SIGTERM)") == ["left 0"] * 2


def test_a_signal_that_python_loses_at_the_start_ends_it_still() -> None:
    *said, code = ended("    main._LEAVING_S = 1\n    Stopped()\n    signal.pause()")
    assert any("Exception ignored in" in line for line in said)
    assert int(code) == -signal.SIGALRM
