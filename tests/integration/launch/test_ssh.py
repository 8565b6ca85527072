"""`headrace deploy ssh` on three hosts: the real services, with TLS and tokens, over a real server for ssh on each."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headrace.base.parent import die_with_parent
from tests.chaos import runs
from tests.support import ssh_hosts
from tests.support.command import said
from tests.support.up import DEMO

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
]  # `tests/unit/test_ssh.py` has the decisions, with a stand-in for ssh

SHORT = (
    "run.id=three",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "rollout.replicas=2",
    "checkpointing.save_period=100",
)


def on_three_hosts(folder: Path, event: str, *command: object) -> tuple[int, str]:
    """The exit code of a command and what it said, in a world with three hosts."""
    if lacks := runs.missing() or ssh_hosts.missing():
        pytest.skip(lacks)
    world = [*runs.NAMESPACES, sys.executable, "-m", "tests.support.ssh_hosts", str(folder), event]
    kill = functools.partial(die_with_parent, signal.SIGKILL)
    done = subprocess.run([*world, *map(str, command)], cwd=runs.ROOT, capture_output=True, text=True, preexec_fn=kill)
    told = folder / "told"
    assert done.returncode != ssh_hosts.LEFT, (folder / "left").read_text()
    return done.returncode, told.read_text() if told.exists() else done.stderr


@pytest.mark.parametrize(
    ("event", "steps", "code"),
    [
        ("lost", 60, 0),
        ("stopped", 1000, 128 + signal.SIGINT),
        ("killed", 1000, -signal.SIGKILL),
    ],
)
def test_a_run_on_three_hosts(tmp_path: Path, tiny_model: Path, event: str, steps: int, code: int) -> None:
    """Host b is lost with its replica, the command is told to stop, or it is killed. Nothing is left on the hosts, whatever happens."""
    command = [sys.executable, "-m", "headrace.cli", "deploy", "ssh", DEMO, *SHORT, f"policy.model_name={tiny_model}"]
    ended, told = on_three_hosts(
        tmp_path, event, *command, f"grpo.max_num_steps={steps}", "--hosts", "a,b,c", "--folder", "{there}"
    )
    logs = {log.name: log.read_text() for log in (tmp_path / "here" / "runs" / "three" / "logs").glob("*.log")}
    assert ended == ssh_hosts.exit_code(code), told + "\n".join(
        f"== {name}\n{text[-3000:]}" for name, text in logs.items()
    )
    assert "step 0: " in told
    assert {"redis.log", "rollout-1.log", "rollout-2.log"} == logs.keys()
    if event == "lost":
        assert f"step {steps - 1}: " in told
        assert "rollout-1 on b: " in told
    if event == "stopped":
        assert "saving a checkpoint" in told


def test_a_task_of_skypilot_on_three_nodes(tmp_path: Path, tiny_model: Path) -> None:
    """Each node runs the task's script as SkyPilot does, in the same folder."""
    here = tmp_path / "here"
    here.mkdir()
    shutil.copy(DEMO, here / "run.yaml")
    (here / ".venv").symlink_to(Path(sys.prefix))
    settings = (*SHORT, f"policy.model_name={tiny_model}", "grpo.max_num_steps=2", "--nodes", "3", "--gpus", "none")
    task = yaml.safe_load(said_in(here, "deploy", "skypilot", "run.yaml", *settings))
    ended, told = on_three_hosts(tmp_path, "nodes", "bash", "-ec", task["run"].replace("{", "{{").replace("}", "}}"))
    assert ended == 0, told
    metrics = (here / "runs" / "three" / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, metrics) if line["kind"] == "train"] == [0, 1]


def said_in(folder: Path, *arguments: object) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return said(*arguments)
