"""Every command after `pip install headrace` alone: it works, or says in a line which packages to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.past_run import past_run

CONFIG = """
run: {id: test, dir: %s}
policy: {model_name: some/model}
data: {train: {dataset_name: arithmetic, env_name: math}}
env: {math: {type: math}}
"""

# Runs every command in a process that can't import what the extras install, and prints for each its words, exit code and error.
ALL_COMMANDS = """
import contextlib, importlib.metadata, io, json, re, sys
from packaging.requirements import Requirement

light, queue = set(), ["headrace"]
while queue:
    name = queue.pop()
    if name in light:
        continue
    light.add(name)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for each in map(Requirement, importlib.metadata.requires(name) or ()):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", "hiredis")):
                queue.append(re.sub("[-_.]+", "-", each.name).lower())
for package, distributions in importlib.metadata.packages_distributions().items():
    if not light & {re.sub("[-_.]+", "-", each).lower() for each in distributions} and package not in ("packaging", "tests"):
        sys.modules[package] = None

import typer
from headrace.cli import main
from headrace.cli.app import app

given = json.loads(sys.argv[1])

def leaves(command, words):
    for name, inner in command.commands.items() if hasattr(command, "commands") else ():
        yield from leaves(inner, (*words, name))
    if not hasattr(command, "commands"):
        yield words, command

for words, command in leaves(typer.main.get_command(app), ()):
    arguments = []
    for each in command.params:
        if each.required or each.name in given["always"]:
            value = given["by_command"].get(" ".join((*words, each.name))) or given["by_name"].get(each.name)
            if value is None:  # a command that watches until it is stopped: its help must do
                arguments = ["--help"]
                break
            arguments += [each.opts[0], value] if each.param_type_name == "option" else [value]
    for asked in ([*words, "--help"], [*words, *arguments]):
        code, out, err = 0, io.StringIO(), io.StringIO()
        sys.argv = ["headrace", *asked]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as left:
                code = left.code or 0
        print(json.dumps([asked, code, err.getvalue()]), flush=True)
"""


def test_every_command_works_or_names_the_packages_that_it_needs(tmp_path: Path) -> None:
    config, script, rewards = tmp_path / "run.yaml", tmp_path / "train.py", tmp_path / "mine.py"
    config.write_text(CONFIG % (tmp_path / "runs"))
    script.write_text("from trl import GRPOTrainer\nGRPOTrainer(model='m', reward_funcs=[])\n")
    rewards.write_text("import headrace\nclass Mine(headrace.Environment):\n    def score(self, sample): return 1.0\n")
    run = past_run(
        tmp_path / "runs", "past", 2, data="{train: {dataset_name: arithmetic, env_name: math}}", env="{math: {}}"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1"}\n')
    given = {
        "always": [],
        "by_name": {
            "config": str(config),
            "run": str(run),
            "first": str(run),
            "second": str(run),
            "source": str(run),
            "new": "forked",
            "model": str(run),
            "output": str(tmp_path / "out"),
            "version": "1",
            "most": "4",
            "step": "1",
            "env": "math",
            "name": "tiny",
            "directory": str(tmp_path / "made"),
            "credentials": str(tmp_path / "credentials"),
            "hosts": "localhost",
            "target": f"{rewards}:Mine",
            "hub": "127.0.0.1:1",
            "port": "1",
            "prompts": str(tmp_path / "prompts.jsonl"),
            "group": "e0-train-1",
        },
        "by_command": {
            "migrate trl source": str(script),
            "migrate verl source": "algorithm.adv_estimator=grpo",
            "env new name": "made_here",
            "groups export output": str(tmp_path / "out.parquet"),
            # these serve until they are stopped: an address that can't be had ends them
            "env serve target": f"{rewards}:Nothing",
            "env attach target": f"{rewards}:Nothing",
        },
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", ALL_COMMANDS, json.dumps(given)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) > 80
    lacking = set()
    for words, code, said in told:
        assert code in (0, 1), (words, code, said)
        assert "Traceback" not in said, (words, said)
        assert "--help" not in words or code == 0, (words, said)
        if "install" in said or "No module" in said:
            assert "pip install 'headrace[" in said, (words, said)
            assert len([line for line in said.splitlines() if " WARNING " not in line]) == 1, (words, said)
            lacking.add(words[0])
    services = {"replay", "reward", "rollout", "agents", "trainer"}
    assert lacking >= services | {"demo", "up", "model", "page", "data", "plan", "certs", "groups", "replay-step"}
