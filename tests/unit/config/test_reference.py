"""docs/configuration.md is what the models say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_reference_is_current(tmp_path: Path) -> None:
    fresh = tmp_path / "configuration.md"
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_reference.py", fresh], check=True)
    assert fresh.read_text() == (ROOT / "docs" / "configuration.md").read_text(), "run `make docs`"
