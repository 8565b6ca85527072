"""What holds for every command."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app


@pytest.mark.parametrize(("given", "set_to"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_leave_the_cores_unless_told_otherwise(
    given: str | None, set_to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # what the command sets is unset after the test
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    CliRunner().invoke(app, ["config", "reference", "--help"])
    assert os.environ["OMP_WAIT_POLICY"] == set_to
