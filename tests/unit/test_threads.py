"""How many threads compute, and on how many cores."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.base import control_groups
from headrace.config import Config, threads
from headrace.config.loading import examine
from headrace.config.threads import Threads


def planned(cores: int, *, omp: str = "", trains: bool = True, generates: bool = True, **sections: Any) -> Threads:
    config = Config.model_validate(sections)
    environ = {"OMP_NUM_THREADS": omp} if omp else {}
    return threads.of(config, cores, environ, trains=trains, generates=generates)


@pytest.mark.parametrize(
    ("cores", "trainer", "rollout"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 3, 1), (8, 6, 2), (16, 12, 4), (64, 48, 16)]
)
def test_training_gets_what_generation_leaves(cores: int, trainer: int, rollout: int) -> None:
    assert planned(cores) == Threads(trainer, rollout)


def test_ranks_and_replicas_share_what_they_get_and_each_has_a_thread() -> None:
    assert planned(16, trainer={"num_processes": 3}, rollout={"replicas": 2}) == Threads(4, 2)
    assert planned(2, trainer={"num_processes": 4}, rollout={"replicas": 4}) == Threads(1, 1)
    slices = {"generation": {"vllm_cfg": {"tensor_parallel_size": 2}}}
    assert planned(16, policy=slices, rollout={"replicas": 2}) == Threads(12, 1)


def test_what_a_gpu_computes_leaves_the_cores_to_the_other() -> None:
    assert planned(8, trains=False) == Threads(None, 8)
    assert planned(8, generates=False) == Threads(8, 1)
    assert planned(8, trains=False, generates=False) == Threads(None, 1)


def test_an_evaluation_trains_nothing() -> None:
    data = {"evaluate": {"held_out": {"dataset_name": "arithmetic", "env_name": "math"}}}
    assert planned(8, data=data, env={"math": {"type": "math"}}).rollout == 8


def test_numbers_that_are_given_are_obeyed() -> None:
    given = {"trainer": {"num_threads": 5}, "rollout": {"num_threads": 3}}
    assert planned(2, **given) == planned(2, omp="1", **given) == Threads(5, 3)
    assert planned(8, trainer={"num_threads": None}).trainer is None


@pytest.mark.parametrize("omp", ["1", "3"])
def test_auto_takes_what_the_environment_says(omp: str) -> None:
    assert planned(8, omp=omp) == Threads(int(omp), int(omp))


@pytest.mark.parametrize("omp", ["0", "many", "4,2", "-1"])
def test_what_is_no_number_of_threads_is_passed_over(omp: str) -> None:
    assert planned(8, omp=omp) == Threads(6, 2)


def test_a_process_can_be_told_by_its_environment(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {id: test}\n")
    told = {"HEADRACE_TRAINER__NUM_THREADS": "3", "HEADRACE_ROLLOUT__NUM_THREADS": "auto"}
    config = examine(file, environ=told).config
    assert (config.trainer.num_threads, config.rollout.num_threads) == (3, "auto")


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make this process one of the control groups in a /proc/…/cgroup, whose hierarchies are in `tmp_path`."""
    monkeypatch.setattr(control_groups, "MOUNT", tmp_path)
    return lambda groups: monkeypatch.setattr(control_groups, "own", lambda: groups)


def test_a_control_group_and_those_around_it_limit_the_cores(tmp_path: Path, group: Callable[[str], None]) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    group("0::/outer/inner\n")
    assert threads.quota() == math.inf
    (inner / "cpu.max").write_text("max 100000\n")
    assert threads.quota() == math.inf
    (tmp_path / "outer" / "cpu.max").write_text("250000 100000\n")
    assert threads.quota() == 2.5
    (inner / "cpu.max").write_text("150000 100000\n")
    assert threads.quota() == 1.5
    group("0::/\n")
    assert threads.quota() == math.inf


def test_a_control_group_of_the_first_version_limits_them_too(tmp_path: Path, group: Callable[[str], None]) -> None:
    folder = tmp_path / "cpu,cpuacct" / "docker"
    folder.mkdir(parents=True)
    group("4:memory:/docker\n2:cpu,cpuacct:/docker\n0::/\n")
    assert threads.quota() == math.inf
    (folder / "cpu.cfs_quota_us").write_text("400000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert threads.quota() == 4.0
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads.quota() == math.inf


def test_this_process_has_a_core() -> None:
    assert threads.usable_cores() >= 1


def test_what_a_variable_of_the_shell_costs_is_told() -> None:
    def told(omp: str, **sections: Any) -> str | None:
        config = Config.model_validate(sections)
        return threads.cost_of_variable(config, 8, {"OMP_NUM_THREADS": omp} if omp else {}, trains=True, generates=True)

    line = told("1")
    assert line is not None
    assert "OMP_NUM_THREADS=1" in line
    assert str(planned(8)) in line
    assert told("") is None
    assert told("nonsense") is None
    assert told("1", trainer={"num_threads": 3}, rollout={"num_threads": 1}) is None
