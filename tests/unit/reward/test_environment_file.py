"""FILE.py:CLASS: what is refused before anything runs, and what is when the file is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import Sample
from headrace.base.errors import ConfigError
from headrace.cli.app import app
from headrace.config import Config
from headrace.env import environment_file
from headrace.launch import environment_processes

FINE = """
import headrace
import beside_it

class Exact(headrace.Environment):
    def score(self, sample):
        return beside_it.REWARD

class Other:
    pass

if __name__ == "__main__":
    headrace.serve(Exact(), port=50400)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", [*sys.path])  # it is added to
    (tmp_path / "beside_it.py").write_text("REWARD = 0.5\n")
    (tmp_path / "my_env.py").write_text(FINE)
    return tmp_path / "my_env.py"


def test_a_class_is_loaded_with_the_modules_beside_its_file(file: Path) -> None:
    assert environment_file.load(f"{file}:Exact").score(Sample("x")) == 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("class Exact(:\n", "invalid syntax (my_env.py, line 1)"),
        (FINE.replace("Exact", "Exakt"), "does not define Exact; it defines Exakt, Other"),
        ("", "does not define Exact; it defines no class"),
        (FINE.replace('if __name__ == "__main__":\n    ', ""), "line 12 of {file} serves an environment"),
    ],
)
def test_what_shows_without_running_the_file_is_refused_first(file: Path, text: str | None, said: str) -> None:
    file.unlink() if text is None else file.write_text(text)
    config = Config.model_validate({"env": {"mine": {"target": f"{file}:Exact"}}})
    with pytest.raises(ConfigError) as refused:
        environment_processes.check(config)
    assert str(refused.value).startswith(f"env.mine.target {file}:Exact: ")
    assert said.format(file=file).replace("(my_env.py", f"({file.name}") in str(refused.value)


def test_names_that_are_imported_or_made_are_there_too(file: Path) -> None:
    for text in (
        "from x import Exact",
        "import y as Exact",
        "Exact = make()",
        "try:\n    import Exact\nexcept E: pass",
    ):
        file.write_text(text)
        environment_file.check(f"{file}:Exact")
    file.write_text("from x import *")
    environment_file.check(f"{file}:Exact")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (FINE, "Exact"),
        ("class Base(Environment): ...\nclass Mine(Base): ...", "Mine"),
        ("from headrace import Environment\nclass Other: ...\nclass Mine(Other, Environment): ...", "Mine"),
    ],
)
def test_the_one_environment_of_a_file_needs_no_name(file: Path, text: str, named: str) -> None:
    file.write_text(text)
    assert environment_file.complete_target(str(file)) == f"{file}:{named}"
    assert environment_file.complete_target(f"{file}:Given") == f"{file}:Given"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class A(Environment): ...\nclass B(headrace.Environment): ...", "several environments: A, B"),
        ("class A: ...", "headrace.Environment (A)"),
        ("", "headrace.Environment (it has none)"),
    ],
)
def test_of_none_or_several_the_user_names_one(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        environment_file.complete_target(str(file))
    assert said in str(refused.value)


@pytest.mark.parametrize("target", ["golden.jsonl", "my_env", "my_env.py:", ":Exact", "127.0.0.1:50400"])
def test_what_names_no_python_file_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{target} .*FILE.py:CLASS"):
        environment_file.load(environment_file.complete_target(target))


def test_a_file_is_told_from_an_address() -> None:
    assert all(map(environment_file.is_file, ("a.py", "b/a.py:Mine")))
    assert not any(map(environment_file.is_file, ("host:50400", "host.py.org:5", "unix:/tmp/a", "a.pyc")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Exact = 3", "Exact is 3, not a subclass of headrace.Environment"),
        ("class Exact: pass", "not a subclass of headrace.Environment"),
        ("import nonexistent_module\nExact = 3", "ModuleNotFoundError: No module named 'nonexistent_module'"),
        (FINE.replace("def score(self, sample)", "def __init__(self, judge)"), "positional argument: 'judge'"),
    ],
)
def test_what_goes_wrong_when_the_file_runs_is_said(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        environment_file.load(f"{file}:Exact")
    assert said in str(refused.value)


def test_a_program_that_is_not_there_is_refused_first() -> None:
    config = Config.model_validate({"env": {"mine": {"command": ["./no-such-judge"]}}})
    with pytest.raises(ConfigError, match=r"env\.mine\.command '\./no-such-judge'"):
        environment_processes.check(config)


def test_config_check_says_who_starts_it_and_what_is_missing(file: Path) -> None:
    config = file.with_suffix(".yaml")
    config.write_text("data: {train: {dataset_name: arithmetic, env_name: math}}\nenv: {math: {}}")
    arguments = [
        "config",
        "check",
        str(config),
        "env.away.target=127.0.0.1:5",
        'env.program.command=["sh", "-c", "x y"]',
    ]
    checked = CliRunner().invoke(app, [*arguments, f"env.file.target={file}:Exact"])
    assert checked.exit_code == 0, checked.output
    assert checked.stdout.splitlines()[1:] == [
        "environment away: 127.0.0.1:5; the run waits until it is up",
        "environment program: `headrace up` starts sh -c 'x y'",
        f"environment file: `headrace up` serves {file}:Exact",
    ]
    refused = CliRunner().invoke(app, [*arguments, f"env.file.target={file}:Exakt"])
    assert isinstance(refused.exception, ConfigError)
    assert "does not define Exakt" in str(refused.exception)


@pytest.mark.parametrize(
    ("text", "said", "frames"),
    [
        ("def __init__(self): {}['judge']", "Exact() raised KeyError: 'judge'", 1),
        ("1 / 0", "raised ZeroDivisionError", 2),
        ("raise SystemExit(0)", "raised SystemExit: 0 when it was loaded", 2),
        ("def __init__(self): raise SystemExit(0)", "Exact() raised SystemExit: 0", 1),
        ("def __init__(self): raise type('E', (Exception,), {'__str__': exit})", "Exact() raised E: (its __str__", 1),
    ],
)
def test_what_the_file_raises_is_said_with_its_own_frames_alone(file: Path, text: str, said: str, frames: int) -> None:
    file.write_text(f"import headrace\nclass Exact(headrace.Environment):\n    {text}\n")
    with pytest.raises(ConfigError) as refused:
        environment_file.load(f"{file}:Exact")
    message, *lines = str(refused.value).splitlines()
    assert said in message
    assert sum(line.lstrip().startswith("File ") for line in lines) == frames
    assert all(str(file) in line for line in lines if line.lstrip().startswith("File "))
