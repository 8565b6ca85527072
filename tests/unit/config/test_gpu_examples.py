"""The configurations for GPUs in `examples/`: they are valid, and take the devices that their first lines name."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.devices import Device, Inventory
from headrace.base.errors import ServiceError
from headrace.config import load
from headrace.launch import device_plan
from tests.support.command import headrace

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
