"""The configurations for GPUs in `examples/`: they are valid, and take the devices that their first lines name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.devices import Device, Inventory
from headrace.base.errors import ServiceError
from headrace.config import load
from headrace.launch import device_plan
from headrace.net.service import EXIT_STOPPED
from tests.support.command import headrace
from tests.support.waiting import wait_until

EXAMPLES = Path(__file__).parents[3] / "examples"
CUDA = {"torch": "2.13.0", "vllm": "0.32.0"}


def machine(gpus: int) -> Inventory:
    devices = (Device(f"GPU-{index}", str(index), "H100", 80 * 1024**3, (9, 0)) for index in range(gpus))
    return Inventory(tuple(devices), "580", (13, 0))


@pytest.mark.parametrize(("name", "gpus"), [("gpu_1_5b_1gpu", 1), ("gpu_8b_8gpus", 8), ("gpu_32b_16gpus", 16)])
def test_an_example_is_valid_and_fits_on_gpus_of_80_gb(name: str, gpus: int) -> None:
    done = headrace("config", "check", EXAMPLES / f"{name}.yaml", "--gpu-memory", "79", "--gpus", str(gpus))
    assert done.returncode == 0, done.stderr
    # models come from the hub; nothing else is amiss
    assert {line.split(":")[1] for line in done.stderr.splitlines()} <= {" policy.model_name"}


def test_a_laptop_refuses_what_a_cluster_could_not_hold() -> None:
    check = ("config", "check", EXAMPLES / "gpu_32b_16gpus.yaml", "--gpu-memory")
    done = headrace(*check, "40", "--gpus", "16")
    assert done.returncode != 0
    assert "of 40.0 GiB" in done.stderr
    change = done.stderr.partition("smallest change that fits: ")[2].split()
    assert headrace(*check, "40", "--gpus", "16", *change).returncode == 0
    assert "--gpus is 8" in headrace(*check, "79", "--gpus", "8").stderr


@pytest.mark.parametrize("option", ["--gpus", "--gpus-per-host"])
def test_a_number_of_gpus_without_their_memory_is_refused(option: str) -> None:
    done = headrace("config", "check", EXAMPLES / "gpu_1_5b_1gpu.yaml", option, "4")
    assert done.returncode != 0
    for token in (f"{option} 4", "--gpu-memory"):
        assert token in done.stderr


@pytest.mark.parametrize(("name", "gpus"), [("gpu_1_5b_1gpu", 1), ("gpu_8b_8gpus", 8), ("gpu_32b_16gpus", 16)])
def test_an_example_takes_as_many_gpus_as_it_says(name: str, gpus: int) -> None:
    config = load(EXAMPLES / f"{name}.yaml")
    plan = device_plan.plan_devices(config, machine(gpus), CUDA)
    assert plan is not None
    assert not plan.rest
    assert plan.is_shared == (gpus == 1)
    with pytest.raises(ServiceError, match=f"machine has {gpus - 1}"):
        device_plan.plan_devices(load(EXAMPLES / f"{name}.yaml", ["trainer.device=cuda"]), machine(gpus - 1), CUDA)


SRUN = """#!{python}
import os, pathlib, signal, sys
with open("{folder}/calls", "a") as calls:
    calls.write(" ".join(sys.argv) + "\\n")
if "trainer" in sys.argv:
    told = lambda *_: (pathlib.Path("{folder}/told").write_text("TERM"), os._exit({code}))
    signal.signal(signal.SIGTERM, told)
    with open("{folder}/trains", "a") as trains:
        trains.write("one ")
    signal.pause()
print("10.0.0.1")
"""


def test_a_slurm_job_whose_time_ends_tells_the_trainer(tmp_path: Path) -> None:
    commands = {
        "srun": SRUN.format(python=sys.executable, folder=tmp_path, code=EXIT_STOPPED),
        "scontrol": "#!/bin/sh\necho first\necho second\n",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    trains = tmp_path / "trains"
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", EXAMPLES / "slurm_two_nodes.sh"], env=environ, start_new_session=True)
    try:
        wait_until(lambda: trains.exists() and trains.read_text() == "one one ", within_s=60)
        calls = (tmp_path / "calls").read_text()
        assert calls.index("config check") < min(calls.index(service) for service in ("replay", "rollout", "trainer"))
        assert calls.count("trainer.launch 6 --nnodes 2") == 2
        job.terminate()  # as Slurm does: the script alone, by --signal=B:TERM
        assert job.wait(60) == EXIT_STOPPED
        assert (tmp_path / "told").read_text() == "TERM"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
