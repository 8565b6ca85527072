"""The benchmark of long runs, at toy size."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import rich

from benchmarks import long_run
from benchmarks.long_run import PROMPTS, QUARTERS, Quarter, configuration, disk_mb, measure, table
from benchmarks.processes import PROCESSES
from headrace.config import Config
from headrace_services.trainer.data import Prompts
from headrace_services.trainer.network.policy_model import load_tokenizer
from tests.support.light_services import instead_of
from tests.support.ports import free_ports

pytestmark = pytest.mark.slow


@pytest.mark.nightly  # a run of four services; its prompts, its table, and what ends it are tested below
def test_each_quarter_says_what_every_process_and_file_takes(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", instead_of(tmp_path / "services")["PYTHONPATH"])
    quarters = measure(tmp_path, tiny_model, QUARTERS)
    assert [quarter.steps for quarter in quarters] == sorted({quarter.steps for quarter in quarters})
    assert len(quarters) == QUARTERS
    for quarter in quarters:
        assert quarter.step_s > 0
        # without vLLM's engine, and `up`; what else this process has started is "other"
        assert {*quarter.memory_mb} - {"other"} == {*quarter.cpu_ms} - {"other"} == {*PROCESSES} - {"engine", "up"}
        assert min(quarter.memory_mb.values()) > 1
        assert sum(quarter.cpu_ms.values()) > 0  # the trainer's own process only waits for the forked one
        assert {"metrics.jsonl", "replay", "logs"} <= {*quarter.disk_mb}
    rich.print(table(quarters))
    assert "MB of memory, trainer" in capsys.readouterr().out


def test_the_prompts_last_for_all_steps(tmp_path: Path, tiny_model: Path) -> None:
    config = Config.model_validate(configuration(tmp_path, tiny_model, 10_000, 1))
    assert Prompts(config, load_tokenizer(config)).counts.orders >= PROMPTS * config.max_num_steps


def test_a_process_that_ends_is_an_error_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # the environment's
        monkeypatch.setattr(long_run, "free_port", iter([port, *free_ports(2)]).__next__)
        with pytest.raises(SystemExit, match=rf"environment ended with \d+ after 0 steps:\n[\s\S]*{port}"):
            measure(tmp_path, tmp_path / "no_such_model", QUARTERS)


def test_disk_is_of_all_files_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a").write_bytes(bytes(2_000_000))
    (tmp_path / "deep" / "b").write_bytes(bytes(1_000_000))
    (tmp_path / "c").write_bytes(bytes(500_000))
    assert disk_mb(tmp_path) == {"c": 0.5, "deep": 3.0}


def test_what_came_in_some_quarters_leaves_the_others_empty() -> None:
    quarters = [
        Quarter(1, 0.5, {"trainer": 3.0}, {"trainer": 100.0}, {}),
        Quarter(2, 0.25, {"trainer": 2.0}, {"trainer": 100.0}, {"logs": 1.0}),
    ]
    columns = {column.header: list(column.cells) for column in table(quarters).columns}
    assert columns["step 1"] == ["0.500", "3.0", "100.0", ""]
    assert columns["step 2"] == ["0.250", "2.0", "100.0", "1.0"]
