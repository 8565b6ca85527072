"""The committed stubs are what the .proto files say, and the .proto files are as buf wants them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUF = Path(sys.executable).with_name("buf")


def test_the_committed_stubs_are_those_that_the_proto_files_make(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_stubs.py", tmp_path], check=True)
    made = {path.name: path.read_text() for path in (tmp_path / "headrace" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "headrace" / "v1").glob("*_pb2*")}
    assert made
    assert committed == made


def test_buf_finds_nothing_to_mend() -> None:
    lint = subprocess.run([BUF, "lint"], cwd=ROOT, capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout
    form = subprocess.run([BUF, "format", "--diff", "--exit-code"], cwd=ROOT, capture_output=True, text=True)
    assert form.returncode == 0, form.stdout


def test_what_was_released_can_still_be_read(tmp_path: Path) -> None:
    """`buf breaking`: fields and methods are added, never changed or removed."""
    breaking = [BUF, "breaking", "--against", str(ROOT / "proto" / "released.binpb")]
    kept = subprocess.run(breaking, cwd=ROOT, capture_output=True, text=True)
    assert kept.returncode == 0, kept.stdout
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    changed = tmp_path / "proto" / "headrace" / "v1" / "environment.proto"
    changed.write_text(changed.read_text().replace("uint32 capacity = 5;", "string capacity = 5;"))
    broken = subprocess.run(breaking, cwd=tmp_path, capture_output=True, text=True)
    assert "changed type from" in broken.stdout
