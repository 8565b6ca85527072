"""The documentation builds as a site without a dead link, and shows what the code says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import headrace

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_has_no_dead_link_and_every_page(tmp_path: Path) -> None:
    build = subprocess.run(
        [sys.executable, "scripts/build_site.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert build.returncode == 0, build.stderr
    assert build.stderr == ""
    pages = {path.stem for path in tmp_path.glob("*.html")}
    assert pages >= {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    python = (tmp_path / "python-api.html").read_text()
    assert [name for name in headrace.__all__ if f'id="headrace.{name}"' not in python] == []
    assert 'id="headrace-groups-find"' in (tmp_path / "commands.html").read_text()
    assert "/api/runs/{run}" in (tmp_path / "http-api.html").read_text()
    assert "EnvironmentService" in (tmp_path / "grpc-api.html").read_text()
