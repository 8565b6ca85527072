"""`headrace acl`: what it prints, and the passwords it keeps."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.cli.app import app
from headrace.net.credentials import REDIS_ROLES, Credentials


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
    file = tmp_path / "credentials"
    lines = printed(run, "--credentials", file)
    users = [*(f"adder-{role}" for role in REDIS_ROLES if role != "admin"), "headrace-admin"]
    assert [line.split()[1] for line in lines] == ["default", *users]
    passwords = [Credentials(file).token(f"redis {role}") for role in REDIS_ROLES]
    assert len(set(passwords)) == len(REDIS_ROLES)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(word in line for word in passwords for line in lines)
    assert printed(run, "--credentials", file) == lines


def test_given_passwords_are_used(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("redis trainer mine\n")
    before = printed(run, "--credentials", file)
    assert Credentials(file).token("redis trainer") == "mine"
    file.write_text(file.read_text().replace("mine", "another"))
    after = printed(run, "--credentials", file)
    assert [old.split()[1] for old, new in zip(before, after, strict=True) if old != new] == ["adder-trainer"]


def test_a_foreign_servers_functions_are_loaded_by_its_administrator(run: Path, tmp_path: Path) -> None:
    def who(*options: str) -> set[str]:
        lines = printed(run, "--credentials", tmp_path / "credentials", *options)
        return {line.split()[1] for line in lines if {"+function|load", "+@all"} & {*line.split()}}

    assert who() == {"default", "headrace-admin"}  # the first is off
    assert who("--own-server") == {"default", "headrace-admin", "adder-replay", "adder-up"}


def test_a_file_that_can_not_be_used_is_named_and_left_as_it_is(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("operator\n")
    with pytest.raises(ConfigError, match=r"line 1.*`ROLE TOKEN`"):
        CliRunner().invoke(app, ["acl", str(run), "--credentials", str(file)], catch_exceptions=False)
    assert file.read_text() == "operator\n"
