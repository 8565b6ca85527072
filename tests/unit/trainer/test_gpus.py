"""What nvidia-smi says becomes metrics of a step."""

from __future__ import annotations

import pytest

from headrace_services.trainer.telemetry.gpus import GPUMonitor, readings
from headrace_services.trainer.telemetry.metric_names import unknown


def test_lines_of_nvidia_smi_are_read_and_what_is_not_supported_is_left_out() -> None:
    assert list(readings("0, 87, 71680\n1, [N/A], 512\n\n2, 0, 1024\n")) == [("0", 87.0, 70.0), ("2", 0.0, 1.0)]


def test_a_step_gets_the_mean_use_and_the_largest_memory_since_the_one_before() -> None:
    answers = iter(["0, 50, 1024\n", "0, 100, 2048\n", "0, 10, 512\n"])
    monitor = GPUMonitor(10.0, lambda: next(answers))
    monitor.sample()
    monitor.sample()
    metrics = monitor.take()
    assert metrics == {"gpu/0/util": 75.0, "gpu/0/mem_gb": 2.0}
    assert unknown(metrics) == []
    monitor.sample()
    assert monitor.take() == {"gpu/0/util": 10.0, "gpu/0/mem_gb": 0.5}
    assert monitor.take() == {}


def test_a_failure_is_said_once_and_the_next_look_tries_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi")
    calls = 0

    def query() -> str:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise OSError("driver mismatch")
        monitor._stop.set()
        return "0, 1, 1024\n"

    monitor = GPUMonitor(0.001, query)
    monitor.start()
    monitor._thread.join(60)
    assert caplog.text.count("driver mismatch") == 1
    assert monitor.take() == {"gpu/0/util": 1.0, "gpu/0/mem_gb": 1.0}
