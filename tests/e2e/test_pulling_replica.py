"""Whole runs in which a replica pulls its weights from the store."""

from __future__ import annotations

import gzip
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.run.journal import JOURNAL, read_journal
from headrace.run.lineage import FOLDER, LineageFiles
from tests.support.up import DEMO, Up, demo_arguments, own_run
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]


def test_what_a_pulling_replica_wrote_is_trained_beside_the_others(tmp_path: Path, tiny_model: Path) -> None:
    log, folder = tmp_path / "pulling.log", tmp_path / "demo"
    more = [
        f"checkpointing.store=file://{tmp_path}/store",
        "checkpointing.save_period=100000",
        "grpo.max_num_steps=100000",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.async_grpo.enabled=true",
        # more than a pull takes: so the one that pulls always may begin work, and has its share (law 6)
        "grpo.async_grpo.max_trajectory_age_steps=8",
        "page.port=null",
    ]
    up = Up(DEMO, *demo_arguments(tmp_path, tiny_model, *more), output=tmp_path / "up")
    pulling = None
    try:
        wait_until(lambda: (folder / "config.yaml").exists() or up.process.poll() is not None)
        assert up.process.poll() is None, up.said()
        command = [sys.executable, "-m", "headrace.cli", "rollout", "--config", str(folder / "config.yaml")]
        with log.open("wb") as out:
            pulling = subprocess.Popen(
                [*command, "rollout.weights_from=store", "rollout.port=0"], stdout=out, stderr=out
            )

        def both_are_trained() -> bool:
            assert up.process.poll() is None, up.said()
            assert pulling is not None
            assert pulling.poll() is None, log.read_text()
            names = set(re.findall(r"(rollout-\w+) is HEALTHY", log.read_text()))
            return bool(names) and {name in names for name in writers(folder)} == {True, False}

        wait_until(both_are_trained)
        pulling.send_signal(signal.SIGTERM)
        assert pulling.wait(60) == 0
        assert up.stop(signal.SIGTERM) == []
    finally:
        for process in (up.process, pulling):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    verified = [int(version) for version in re.findall(r"version (\d+) is verified", log.read_text())]
    assert verified == sorted(set(verified))
    assert len(verified) > 1


@pytest.mark.parametrize(("age", "replicas"), [(0, 1), (2, 1), (2, 3)])
def test_a_run_whose_replicas_all_pull_trains_and_validates(
    tmp_path: Path, tiny_model: Path, age: int, replicas: int
) -> None:
    more = [
        f"rollout.replicas={replicas}",
        "rollout.weights_from=store",
        f"checkpointing.store=file://{tmp_path}/store",
        "grpo.max_num_steps=4",
        "grpo.val_period=2",
        "grpo.max_val_samples=16",
        f"grpo.async_grpo.enabled={str(age > 0).lower()}",
        f"grpo.async_grpo.max_trajectory_age_steps={max(1, age)}",
        "page.port=null",
    ]
    up = Up(DEMO, *own_run(tmp_path, "demo", tiny_model), *more, output=tmp_path / "up")
    try:
        assert up.ends() == 0, up.said()
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
    lines = read_journal(tmp_path / "demo" / JOURNAL)
    assert [line.step for line in lines if line.kind == "train"] == [0, 1, 2, 3]
    validated = {line.step: line.metrics for line in lines if line.kind == "validation"}
    assert set(validated) >= {0, 2, 4}
    for version, metrics in validated.items():
        assert (metrics["version_min"], metrics["version_max"]) == (version, version)
        assert (metrics["pending"], metrics["failed"]) == (0, 0)
    # of three, the third is below the first in their tree
    logs = [file.read_text() for file in (tmp_path / "demo" / "logs").glob("rollout-*.log")]
    assert len(logs) == replicas
    fetched = [sum(map(float, re.findall(r"([0-9.]+) MB of it from other replicas", log))) > 0 for log in logs]
    assert sorted(fetched) == [*[False] * min(replicas, 2), *[True] * (replicas - 2)]


def writers(folder: Path) -> set[str]:
    """The replicas that wrote what was trained."""
    paths = [path for _, path in LineageFiles(folder / "checkpoints" / FOLDER).files()]
    return {name for path in paths for name in re.findall(r"rollout-\w+", gzip.decompress(path.read_bytes()).decode())}
