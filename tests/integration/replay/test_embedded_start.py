"""How the embedded server is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port

RESERVED = """
import asyncio, os, pathlib, socket, sys
from headrace.net.service import pass_sockets, reserve
from headrace_services.replay.embedded import EmbeddedServer

def steal():
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            thief.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

async def main():
    server = EmbeddedServer(pathlib.Path(sys.argv[1]), "127.0.0.1", port)
    for _ in range(2):
        assert not steal()
        await server.start()
        assert not steal()
        await server.stop()
    assert not steal()

with reserve("127.0.0.1", "replay.redis_port") as sock:
    port = sock.getsockname()[1]
    os.environ |= pass_sockets([sock])
    asyncio.run(main())
"""

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


def test_the_servers_port_is_reserved_before_between_and_after_starts(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", RESERVED, str(tmp_path)], check=True, timeout=120)
