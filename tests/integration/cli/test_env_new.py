"""`headrace env new`: what it makes works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import env_new
from tests.support.command import headrace, headrace_process, refused, said

ROOT = Path(__file__).parents[3]
# without the plugins of this checkout's own tests, which take most of a start
WITHOUT = [
    word for name in ("cacheprovider", "hypothesispytest", "schemathesis", "xdist") for word in ("-p", f"no:{name}")
]
# -B: Python would take the bytecode of a file that is written twice within a second for that of the second
TEST = [sys.executable, "-B", "-m", "pytest", "-q", *WITHOUT]


@pytest.fixture(autouse=True)
def without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options for the tests of this repository are not for theirs."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert "word_count/ has word_count.py" in said("env", "new", "word_count")
    return tmp_path / "word_count"


def test_its_test_passes_and_fails_once_the_reward_is_another(made: Path) -> None:
    passed = subprocess.run(TEST, cwd=made, capture_output=True, text=True)
    assert passed.returncode == 0, passed.stdout
    assert "7 passed" in passed.stdout
    file = made / "word_count.py"
    file.write_text(file.read_text().replace("correct * stopped", "correct + stopped"))
    failed = subprocess.run(TEST, cwd=made, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "reward 2 is not between" in failed.stdout


def test_its_test_passes_in_a_project_with_settings_of_its_own(made: Path) -> None:
    """Such as those of this checkout, by which pytest looks for modules in the project's root alone."""
    options = '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "--import-mode=importlib"\n'
    (made.parent / "pyproject.toml").write_text(options)
    passed = subprocess.run(TEST, cwd=made, capture_output=True, text=True)
    assert passed.returncode == 0, passed.stdout


def test_it_has_no_fault(made: Path) -> None:
    checked = headrace_process("env", "check", "word_count.py", "--samples", "golden.jsonl", cwd=made)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "word_count.py: nothing is wrong" in checked.stdout


def test_its_configuration_is_accepted(made: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (made / "models").mkdir()
    (made / "models" / "tiny").symlink_to(tiny_model)
    monkeypatch.chdir(made)
    checked = headrace("config", "check", "word_count.yaml")
    assert checked.returncode == 0, checked.stderr
    assert checked.stderr == ""
    assert "serves word_count.py:WordCount" in checked.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Word", "lower-case letters"),
        ("a/b", "lower-case letters"),
        ("class", "lower-case letters"),
        ("math", "Python's module math"),
        ("headrace", "Python's module headrace"),
        ("there", "already exists"),
    ],
)
def test_names_that_wont_do_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert words in refused("env", "new", name)
    assert os.listdir(tmp_path) == ["there"]


def test_the_tests_on_the_page_pass_for_the_reward_on_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    for section, file in (("Your first environment", "my_env.py"), ("Testing an environment", "test_my_env.py")):
        text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
        (tmp_path / file).write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    passed = subprocess.run(TEST, cwd=tmp_path, capture_output=True, text=True)
    assert passed.returncode == 0, passed.stdout
    assert "3 passed" in passed.stdout


def test_it_is_the_same_each_time() -> None:
    assert env_new.files("mine") == env_new.files("mine")
