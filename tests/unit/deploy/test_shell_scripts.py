"""Shell scripts, of the repository and written by commands: shellcheck finds no error and nothing that is likely one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.launch import ssh

ROOT = Path(__file__).parents[3]
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def scripts() -> list[str]:
    """The files of the repository that a shell runs."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    here = (ROOT / name for name in names.split("\0") if name)
    return [str(path) for path in here if path.is_file() and re.match(rb"#!.*\b(ba|da)?sh\n", path.read_bytes()[:80])]


def findings(*arguments: str, text: str | None = None) -> str:
    call = [SHELLCHECK, "--severity=warning", *arguments]
    return subprocess.run(call, input=text, capture_output=True, text=True).stdout


def test_what_may_remove_everything_is_found() -> None:
    assert "SC2115" in findings("-", text='#!/bin/sh\nrm -rf "$1/"*\n')


def test_every_shell_script_of_the_repository_is_sound() -> None:
    found = scripts()
    assert str(ROOT / "deploy" / "helm" / "kind_demo.sh") in found
    assert findings(*found) == ""


def test_the_job_for_slurm_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["deploy", "slurm", "examples/gpu_32b_16gpus.yaml", "run.id=x"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("#!")
    assert findings("-", text=done.stdout) == ""


def test_what_hosts_run_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["deploy", "skypilot", "examples/gpu_8b_8gpus.yaml", "run.id=x"])
    assert done.exit_code == 0, done.output
    task = yaml.safe_load(done.stdout)
    for text in (task["setup"], task["run"]):
        assert findings("--shell=bash", "-", text=text) == ""
    assert findings("--shell=sh", "-", text=ssh.SECRETS) == ""
