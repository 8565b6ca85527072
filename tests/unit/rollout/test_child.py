"""What keeps the engine's processes from outliving the service must not end them where the service is process 1."""

import shutil
import subprocess
import sys

import pytest

SERVICE = """
import multiprocessing, os
from services.rollout.child import attend
os.environ["ROLLOUT_ENGINE_REPORT"] = os.devnull
child = multiprocessing.get_context("spawn").Process(target=attend)
child.start()
child.join()
print(os.getpid(), child.exitcode)
"""


def test_children_of_a_service_that_is_process_1_of_a_container_live() -> None:
    unshare = [shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--pid", "--fork"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no process namespace can be made here: {error}")
    done = subprocess.run([*unshare, sys.executable, "-c", SERVICE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]
