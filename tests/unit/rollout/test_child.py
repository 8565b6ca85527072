"""The engine's processes end with the service that started them, whenever it ends, and with nothing else."""

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SERVICE = """
import multiprocessing, os
from headrace_services.rollout.child import prepare_engine_process
os.environ["ROLLOUT_ENGINE_PARENT"] = str(os.getpid())
os.environ["ROLLOUT_ENGINE_REPORT"] = os.devnull
child = multiprocessing.get_context("spawn").Process(target=prepare_engine_process)
child.start()
child.join()
print(os.getpid(), child.exitcode)
"""


def test_children_of_a_service_that_is_process_1_of_a_container_live() -> None:
    unshare = [shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--pid", "--fork"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no process namespace can be made here ({error}): allow user namespaces")
    done = subprocess.run([*unshare, sys.executable, "-c", SERVICE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]


CHILD = """
import time
from headrace_services.rollout.child import end_with_parent
time.sleep({before})
end_with_parent()
print("lives", flush=True)
time.sleep({after})
"""
PARENT = """
import os, subprocess, sys
os.environ["ROLLOUT_ENGINE_PARENT"] = str(os.getpid())
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


def service(*command: str) -> tuple[subprocess.Popen[str], int]:
    """A process that started a child by this command as the service does, and a descriptor of that child."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    return process, os.pidfd_open(int(process.stdout.readline()))


def ended(descriptor: int, within_s: float) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0])


def test_a_child_ends_when_its_service_is_killed() -> None:
    process, child = service(sys.executable, "-c", CHILD.format(before=0, after=120))
    assert process.stdout
    assert process.stdout.readline() == "lives\n"
    assert not ended(child, 0)
    process.kill()
    assert ended(child, 30)
    process.communicate()
    os.close(child)


def test_a_child_whose_service_was_killed_before_it_looked_ends() -> None:
    process, child = service(sys.executable, "-c", CHILD.format(before=2, after=0))
    process.kill()  # nobody waits for it yet: what is left of it still has its process id
    assert ended(child, 30)
    assert process.communicate()[0] == ""
    os.close(child)


def test_a_program_that_a_child_started_is_left_to_it() -> None:
    script = CHILD.format(before=0, after=0)
    process, child = service(shutil.which("sh") or "sh", "-c", '"$0" -c "$1"; exit', sys.executable, script)
    assert ended(child, 30)
    assert process.communicate()[0] == "lives\n"
    os.close(child)


FORKING = """
import os, sys, time
from headrace_services.rollout import child
os.environ["ROLLOUT_ENGINE_PARENT"] = str(os.getpid())
os.environ["ROLLOUT_ENGINE_REPORT"] = sys.argv[1]
os.register_at_fork(after_in_child=child.prepare_forked_process)
if (pid := os.fork()) == 0:
    import logging
    try:
        raise ValueError("no such model")
    except ValueError:
        logging.getLogger("vllm.v1.engine.core").exception("failed")
    print(os.getpid(), flush=True)
    time.sleep(120)
os.waitpid(pid, 0)
"""


def test_a_forked_child_reports_its_failure_and_ends_with_its_service(tmp_path: Path) -> None:
    report = tmp_path / "errors"
    process = subprocess.Popen([sys.executable, "-c", FORKING, report], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    child = os.pidfd_open(int(process.stdout.readline()))
    assert report.read_text() == "ValueError: no such model\n"
    assert not ended(child, 0)
    process.kill()
    assert ended(child, 30)
    process.communicate()
    os.close(child)


ENDING = """
import gc, os, sys
from headrace_services.rollout import child
os.environ["ROLLOUT_ENGINE_PARENT"] = str(os.getpid())
os.environ["ROLLOUT_ENGINE_REPORT"] = os.devnull
os.register_at_fork(after_in_child=child.prepare_forked_process)
gc.freeze()
if (pid := os.fork()) == 0:
    gc.unfreeze()  # as vLLM does when its engine ends
    os._exit(0 if gc.get_freeze_count() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_an_engine_that_ends_does_not_look_for_garbage() -> None:
    subprocess.run([sys.executable, "-c", ENDING], check=True)
