"""The configurations for GPUs in `examples/`: they are valid, and take the devices that their first lines name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from headrace.cli import device_plan
from headrace.config import load
from headrace.devices import Device, Inventory
from headrace.errors import ServiceError
from tests.support.command import headrace

EXAMPLES = Path(__file__).parents[3] / "examples"
CUDA = {"torch": "2.13.0", "vllm": "0.32.0"}


def machine(gpus: int) -> Inventory:
    devices = (Device(f"GPU-{index}", str(index), "H100", 80 * 1024**3) for index in range(gpus))
    return Inventory(tuple(devices), "580", (13, 0))


@pytest.mark.parametrize("name", ["gpu_1_5b_1gpu", "gpu_8b_8gpus", "gpu_32b_16gpus"])
def test_an_example_for_gpus_is_valid(name: str) -> None:
    done = headrace("config", "check", EXAMPLES / f"{name}.yaml")
    assert done.returncode == 0, done.stderr
    # models come from the hub; nothing else is amiss
    assert {line.split(":")[1] for line in done.stderr.splitlines()} <= {" policy.model_name"}


@pytest.mark.parametrize(("name", "gpus"), [("gpu_1_5b_1gpu", 1), ("gpu_8b_8gpus", 8), ("gpu_32b_16gpus", 16)])
def test_an_example_takes_as_many_gpus_as_it_says(name: str, gpus: int) -> None:
    config = load(EXAMPLES / f"{name}.yaml")
    plan = device_plan.planned(config, machine(gpus), CUDA)
    assert plan is not None
    assert not plan.rest
    assert plan.is_shared == (gpus == 1)
    with pytest.raises(ServiceError, match=f"and this machine has {gpus - 1} for it"):
        device_plan.planned(load(EXAMPLES / f"{name}.yaml", ["trainer.device=cuda"]), machine(gpus - 1), CUDA)


def test_the_slurm_script_is_one_of_bash() -> None:
    subprocess.run(["bash", "-n", EXAMPLES / "slurm_two_nodes.sh"], check=True)
