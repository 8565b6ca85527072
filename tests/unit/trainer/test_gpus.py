"""What NVML reports becomes metrics of a step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pynvml
import pytest

from headrace.run.metric_names import unknown
from headrace_services.trainer.telemetry.gpus import GPUMonitor

MIB = 1024**2


@dataclasses.dataclass
class FakeGPU:
    """A GPU by its index; what the driver doesn't report is None."""

    use: int | None
    memory: int | None


@dataclasses.dataclass
class FakeNVML:
    """The functions of pynvml that are called, over some GPUs; `failures` are raised first, one at each look."""

    gpus: list[FakeGPU]
    failures: list[pynvml.NVMLError] = dataclasses.field(default_factory=list)
    init_error: pynvml.NVMLError | None = None
    open: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("Init", "Shutdown", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetUtilizationRates"):
            monkeypatch.setattr(pynvml, f"nvml{name}", getattr(self, name))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", self.DeviceGetMemoryInfo)

    def Init(self) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.open += 1

    def Shutdown(self) -> None:
        self.open -= 1

    def DeviceGetCount(self) -> int:
        if self.failures:
            raise self.failures.pop(0)
        return len(self.gpus)

    def DeviceGetHandleByIndex(self, index: int) -> FakeGPU:
        return self.gpus[index]

    def DeviceGetUtilizationRates(self, gpu: FakeGPU) -> SimpleNamespace:
        if gpu.use is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=gpu.use, memory=99)

    def DeviceGetMemoryInfo(self, gpu: FakeGPU, version: int) -> SimpleNamespace:
        assert version == pynvml.nvmlMemory_v2
        if gpu.memory is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(used=gpu.memory, reserved=MIB, total=80 * 1024 * MIB)


def test_a_step_gets_mean_use_and_largest_memory_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FakeGPU(50, 1024 * MIB), FakeGPU(None, 512 * MIB)
    FakeNVML([first, second]).install(monkeypatch)
    monitor = GPUMonitor(10.0)
    monitor.sample()
    first.use, first.memory = 100, 2048 * MIB
    monitor.sample()
    metrics = monitor.take()
    assert metrics == {"gpu/0/util": 75.0, "gpu/0/mem_gb": 2.0, "gpu/1/mem_gb": 0.5}
    assert unknown(metrics) == []
    first.use, first.memory, second.use = 10, 512 * MIB, 0
    monitor.sample()
    assert monitor.take() == {"gpu/0/util": 10.0, "gpu/0/mem_gb": 0.5, "gpu/1/util": 0.0, "gpu/1/mem_gb": 0.5}
    assert monitor.take() == {}


@pytest.mark.parametrize(
    ("gpu", "metrics"),
    [
        (FakeGPU(40, None), {"gpu/0/util": 40.0}),  # GB10, Jetson
        (FakeGPU(None, 512 * MIB), {"gpu/0/mem_gb": 0.5}),  # divided (MIG)
        (FakeGPU(None, None), {}),
    ],
)
def test_what_a_driver_does_not_report_is_left_out_alone(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeGPU, metrics: dict[str, float]
) -> None:
    FakeNVML([gpu, FakeGPU(1, MIB)]).install(monkeypatch)
    monitor = GPUMonitor(10.0)
    monitor.sample()
    assert monitor.take() == {**metrics, "gpu/1/util": 1.0, "gpu/1/mem_gb": 1 / 1024}


def test_a_failure_is_logged_once_and_the_next_look_tries_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    nvml = FakeNVML([FakeGPU(1, 1024 * MIB)], failures=[lost, lost])
    nvml.install(monkeypatch)
    monitor = GPUMonitor(0.001)
    monitor.start()
    metrics: dict[str, float] = {}
    while not metrics:
        metrics = monitor.take()
    monitor.stop()
    assert metrics == {"gpu/0/util": 1.0, "gpu/0/mem_gb": 1.0}
    assert caplog.text.count(str(lost)) == 1
    assert nvml.open == 0, "NVML is shut down"


@pytest.mark.parametrize(
    ("code", "logged"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, False),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, True),
    ],
)
def test_without_a_driver_nothing_is_sampled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int, logged: bool
) -> None:
    FakeNVML([FakeGPU(1, MIB)], init_error=pynvml.NVMLError(code)).install(monkeypatch)
    monitor = GPUMonitor(0.001)
    monitor.start()
    monitor.stop()
    assert monitor.take() == {}
    assert ("no gpu/* metrics" in caplog.text) is logged
