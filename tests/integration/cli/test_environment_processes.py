"""The environments that `headrace up` starts, as it starts them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from headrace.base.tls import CertificateFiles
from headrace.config import Config
from headrace.launch.environment_processes import children
from tests.support.command import said

# Its first argument is a port on this machine, its second the URL of the same port.
CALLS = """
import asyncio, ssl, sys
import requests

async def main():
    _, writer = await asyncio.open_connection("localhost", int(sys.argv[1]), ssl=True)
    writer.close()

asyncio.run(main())
assert len(ssl.create_default_context().get_ca_certs()) > 1, "it trusts nobody else any more"
assert requests.get(sys.argv[2]).text == "yes"
"""


async def test_a_program_trusts_the_authority_of_the_run(tmp_path: Path) -> None:
    """As it has to, to call a gateway beyond the loopback interface."""
    said("certs", "--dir", tmp_path, "gateway")
    certificate = CertificateFiles(tmp_path / "gateway.pem", tmp_path / "gateway.key")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline():
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nyes")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "localhost", 0, ssl=certificate.context()) as server:
        port = server.sockets[0].getsockname()[1]
        command = [sys.executable, "-c", CALLS, str(port), f"https://localhost:{port}"]
        for tls_ca, status in ((tmp_path / "ca.pem", 0), (None, 1)):
            settings: dict[str, Any] = {
                "run": {"id": "test", "dir": str(tmp_path / "runs")},
                "env": {"mine": {"command": command, "port": 1}},
                "data": {"train": {"dataset_name": "arithmetic", "env_name": "mine"}},
                "security": {"tls_ca": None if tls_ca is None else str(tls_ca)},
            }
            child = children(Config.model_validate(settings), tmp_path / "logs")["mine"]
            process = await asyncio.create_subprocess_exec(*child.argv, env=child.environ)
            assert await process.wait() == status
