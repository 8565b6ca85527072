"""`headrace deploy skypilot`: the task has what SkyPilot knows, and its first node starts the run on all."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command import headrace, refused, said

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpu_8b_8gpus.yaml"
# of a task in SkyPilot 0.14.1, `get_task_schema` in sky/utils/schemas.py; docs.skypilot.co/en/stable/reference/yaml-spec.html
KEYS = {"name": str, "workdir": str, "num_nodes": int, "resources": dict, "setup": str, "run": str}


def task(*arguments: object) -> Any:
    text = said("deploy", "skypilot", *arguments)
    assert text.startswith("# ")
    return yaml.safe_load(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a configuration whose name needs quotes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's a run.yaml").write_text(f"defaults: {EXAMPLE}\n")
    return tmp_path


def test_a_task_has_only_what_skypilot_knows(folder: Path) -> None:
    found = task(folder / "it's a run.yaml", "run.id=My_Run", "--nodes", "2", "--gpus", "A100-80GB:8")
    assert {key: type(value) for key, value in found.items()} == KEYS
    assert found["name"] == "headrace-my-run"
    assert found["num_nodes"] == 2
    assert found["resources"] == {"accelerators": "A100-80GB:8"}
    assert "headrace[cuda]" in found["setup"]


def test_the_first_node_starts_the_run_on_all(folder: Path) -> None:
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "headrace").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (programs / "headrace").chmod(0o755)
    found = task("it's a run.yaml", "run.id=a", "run.dir=a b", "--gpus", "H100:8")
    environ = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "PATH": "/usr/bin:/bin"}

    def run(rank: str) -> list[str]:
        code = ["bash", "-ec", found["run"]]
        return subprocess.run(
            code, env={**environ, "SKYPILOT_NODE_RANK": rank}, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    assert run("1") == []
    assert run("0") == ["deploy", "ssh", "it's a run.yaml", "run.id=a", "run.dir=a b", "--hosts", "10.0.0.1,10.0.0.2"]
    for script in (found["run"], found["setup"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0


def test_a_task_without_gpus_is_on_cpus(folder: Path) -> None:
    found = task("it's a run.yaml", "run.id=a", "rollout.replicas=1", "--gpus", "none")
    assert "accelerators" not in found["resources"]
    assert "headrace[cpu]" in found["setup"]


def test_checkpoints_that_end_with_the_cluster_are_told(folder: Path) -> None:
    assert "checkpointing.store" in headrace("deploy", "skypilot", "it's a run.yaml", "run.id=a").stderr


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        (("it's a run.yaml",), ("run.id",)),
        ((EXAMPLE, "run.id=a"), ("SkyPilot copies",)),
        (("it's a run.yaml", "run.id=a", "--gpus", "H100:x"), ("--gpus H100:x",)),
        (("it's a run.yaml", "run.id=a", "--gpus", "H100:2"), ("has no place", "node 0 2", "deploy slurm")),
        (("it's a run.yaml", "run.id=a", "--nodes", "9"), ("node 5, node 6, node 7, node 8 would have no replica",)),
    ],
)
def test_what_has_no_place_is_refused(folder: Path, arguments: tuple[object, ...], tokens: tuple[str, ...]) -> None:
    error = refused("deploy", "skypilot", *arguments)
    for token in tokens:
        assert token in error
