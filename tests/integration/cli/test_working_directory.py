"""`headrace up` in a directory whose files have the names of modules: no process that it starts may import them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port

CONFIG = """
run: {{id: test, dir: {folder}/runs}}
data:
  train: {{dataset_name: arithmetic, env_name: math_multi_reward, size: 16}}
env:
  math_multi_reward: {{type: math_multi_reward}}
replay: {{port: 0, redis_port: {redis_port}}}
reward: {{port: 0, http_port: 0, workers: 1}}
trainer: {{num_processes: 2}}
"""
# In place of the services that need a model. The trainer's ranks, under torchrun, say what they import, and end the run.
LIGHT = """
import json, os, random, signal, sys
from pathlib import Path

def rollout(config):
    signal.sigwait({signal.SIGTERM})

def trainer(config):
    (config.run_folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps([random.__file__, sys.path]))
"""
ENTRY_POINTS = "[headrace.services]\nrollout = light_services:rollout\ntrainer = light_services:trainer\n"


def test_files_in_the_working_directory_shadow_no_module(tmp_path: Path) -> None:
    stubs, mine = tmp_path / "stubs", tmp_path / "mine"
    metadata = stubs / "light_services-0.dist-info"
    metadata.mkdir(parents=True)
    (stubs / "light_services.py").write_text(LIGHT)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: light-services\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    mine.mkdir()
    for name in ("random", "headrace_services", "headrace", "torch"):
        (mine / f"{name}.py").write_text(f"raise ImportError('{name}.py of the working directory was imported')\n")
    (mine / "run.yaml").write_text(CONFIG.format(folder=tmp_path, redis_port=free_port()))

    done = subprocess.run(
        [Path(sys.executable).with_name("headrace"), "up", "run.yaml"],
        cwd=mine,
        env={**os.environ, "PYTHONPATH": str(stubs), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        imported, path = json.loads((tmp_path / "runs" / "test" / f"rank{rank}.json").read_text())
        assert Path(imported).parent != mine
        assert str(mine) not in path
        assert "" not in path
