"""How the embedded server is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port

SCRIPT = """
import asyncio, os, pathlib, sys
from headrace_services.replay.embedded import EmbeddedServer
folder = pathlib.Path(sys.argv[1])
os.register_at_fork(after_in_child=(folder / "forked").touch)
server = EmbeddedServer(folder / "replay", "127.0.0.1", int(sys.argv[2]))
asyncio.run(server.start())
asyncio.run(server.stop())
"""


def test_nothing_runs_in_a_forked_copy_of_the_service(tmp_path: Path) -> None:
    """Whose threads of gRPC would be half there."""
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), str(free_port())], check=True, timeout=120)
    assert (tmp_path / "replay" / "appendonlydir").is_dir()
    assert not (tmp_path / "forked").exists()
