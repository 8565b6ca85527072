"""What holds for every command."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.commands import SECTIONS
from tests.support.command import refused
from tests.support.page_runs import recorded_run


@pytest.mark.parametrize(("given", "set_to"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_leave_the_cores_unless_told_otherwise(
    given: str | None, set_to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # what the command sets is unset after the test
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    CliRunner().invoke(app, ["config", "reference", "--help"])
    assert os.environ["OMP_WAIT_POLICY"] == set_to


@pytest.mark.parametrize("command", [[], ["groups"], ["groups", "find"], ["up"]])
def test_short_help_is_help(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)


def test_help_begins_with_what_one_begins_with_and_has_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert [shown.index(f"─ {section} ─") for section in SECTIONS] == sorted(
        shown.index(f"─ {section} ─") for section in SECTIONS
    )
    assert all(f"│ {name} " in shown for commands in SECTIONS.values() for name in commands)
    assert "─ Commands ─" not in shown


@pytest.mark.parametrize("command", [["model"], ["groups", "find"]])
def test_help_breaks_its_lines_where_the_terminal_does(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "400"}).stdout
    assert " SmolLM2-135M-Instruct." in shown if command == ["model"] else " left over. `headrace" in shown
    assert (
        len([line for line in shown.splitlines() if line.strip().startswith(("Make a", "Find", "`tiny", "failed"))])
        == 1
    )


def test_the_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout.split()) == (0, ["headrace", importlib.metadata.version("headrace")])


ENDING = """
import atexit, sys, threading
from headrace.cli import run

class Freed:
    def __del__(self):
        print("shut down")

kept = Freed()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread"))).start()
sys.argv[0] = "headrace"
run()
"""


@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("--unknown", 2)])
def test_a_command_ends_its_threads_and_its_process_alone(argument: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", ENDING, argument], stdout=subprocess.PIPE, text=True)
    assert done.returncode == code
    assert done.stdout.splitlines()[-2:] == ["a thread", "at exit"]


def test_a_shell_completes_commands() -> None:
    words = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": "headrace gro", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], env=words, prog_name="headrace")
    assert "groups" in done.stdout.split()


@pytest.mark.parametrize(
    "command",
    [
        ["groups", "find", "RUN", "1+1", "-n", "1"],
        ["groups", "find", "-n", "1", "--state", "trained", "RUN", "1+1"],
        ["groups", "find", "1+1", "--run", "RUN", "-n", "1"],
        ["groups", "find", "--run=RUN", "1+1", "-n", "1"],
        ["samples", "RUN", "-n", "1"],
        ["samples", "-n", "1", "--run", "RUN"],
        ["samples", "--run=RUN", "-n", "1"],
    ],
)
def test_a_run_is_an_option_or_the_first_argument(command: list[str], tmp_path: Path) -> None:
    run = str(recorded_run(tmp_path))
    done = CliRunner().invoke(app, [word.replace("RUN", run) if "RUN" in word else word for word in command])
    assert done.exit_code == 0, done.output
    assert "1+1" in done.stdout


@pytest.mark.parametrize("command", [["show", "RUN", "0-3"], ["show", "0-3", "--run", "RUN"]])
def test_a_run_comes_before_the_other_arguments(command: list[str], tmp_path: Path) -> None:
    run = str(recorded_run(tmp_path))
    done = CliRunner().invoke(app, ["groups", *(run if word == "RUN" else word for word in command)])
    assert done.exit_code == 0, done.output
    assert "0-3 (trained)" in done.stdout


@pytest.mark.parametrize("command", [["groups", "find"], ["groups", "show", "e0-train-3"], ["env", "token", "mine"]])
def test_a_command_without_a_run_says_that_it_lacks_one(command: list[str]) -> None:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "--run" in done.output


def test_an_unknown_run_names_those_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("adder", "multiplier"):
        recorded_run(tmp_path / "runs", name)
    for given in ("multiplyer", tmp_path / "runs" / "multiplyer"):
        told = refused("samples", given)
        assert "did you mean multiplier?" in told
        assert "adder" in told
    assert "did you mean" not in refused("samples", "entirely-different")
