"""`headrace acl`: what it prints, and the file of passwords it keeps."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.errors import ConfigError

ROLES = ["replay", "trainer", "rollout", "operator", "reader", "up", "admin"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("run: {id: adder}\n")
    return path


def printed(*words: str | Path) -> list[str]:
    result = CliRunner().invoke(app, ["acl", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout.splitlines()


def test_passwords_are_made_once_and_kept_for_their_owner_alone(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "passwords.yaml"
    lines = printed(run, "--passwords", file)
    assert [line.split()[1] for line in lines] == [
        "default",
        *(f"adder-{role}" for role in ROLES[:-1]),
        "headrace-admin",
    ]
    passwords = yaml.safe_load(file.read_text())
    assert list(passwords) == ROLES
    assert len(set(passwords.values())) == len(ROLES)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(word in line for word in passwords.values() for line in lines)
    assert printed(run, "--passwords", file) == lines


def test_given_passwords_are_used(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "passwords.yaml"
    file.write_text("trainer: mine\n")
    before = printed(run, "--passwords", file)
    assert yaml.safe_load(file.read_text())["trainer"] == "mine"
    file.write_text(file.read_text().replace("mine", "another"))
    changed = [old.split()[1] for old, new in zip(before, printed(run, "--passwords", file), strict=True) if old != new]
    assert changed == ["adder-trainer"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainor: x\n", "no roles are called trainor"),
        ("trainer: 17\n", "in quotes"),
        ("- x\n", "lines"),
        ("{", "can't be read"),
    ],
)
def test_a_file_that_can_not_be_used_is_named(run: Path, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "passwords.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--passwords .*{said}"):
        CliRunner().invoke(app, ["acl", str(run), "--passwords", str(file)], catch_exceptions=False)
    assert file.read_text() == text
