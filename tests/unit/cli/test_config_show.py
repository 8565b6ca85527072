"""What `headrace config show` prints of secrets that the configuration itself holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.config import load

RUN = """\
env: {math: {type: math}}
data: {train: {dataset_name: arithmetic, env_name: math}}
"""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:canary@host/0", "redis://me:***@host/0"),
        ("rediss://:canary@host:6379/0?ssl_ca_certs=ca.pem", "rediss://:***@host:6379/0?ssl_ca_certs=ca.pem"),
        ("redis://host/0?password=canary&ssl_password=canary2", "redis://host/0?password=***&ssl_password=***"),
        ("sentinel://me:canary@a:1,b:2/main", "sentinel://me:***@a:1,b:2/main"),
        ("redis://host/0", "redis://host/0"),
    ],
)
def test_the_password_of_an_address_is_masked(url: str, shown: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{RUN}replay: {{redis_url: '{url}'}}\n")
    printed = CliRunner().invoke(app, ["config", "show", str(file)]).output
    assert "canary" not in printed
    assert yaml.safe_load(printed)["replay"]["redis_url"] == shown
    assert load(file).replay.redis_url == url
