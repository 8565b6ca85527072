"""A service's HTTP port and an environment's gRPC port, in a process whose memory can be looked at.

python -m tests.support.guarded_ports CREDENTIALS [CERTIFICATE KEY]
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import headrace
from headrace.base.tls import CertificateFiles
from headrace.config import Config
from headrace.env.server import serving
from headrace.net.credentials import Credentials
from headrace.net.http_access import HttpAccess
from headrace.net.service import bind, create_app, serve_http, stop_on_signals

HOST = "127.0.0.1"


class Half(headrace.Environment):
    def score(self, sample: headrace.Sample) -> float:
        return 0.5


async def main(credentials: str, *certificate: str) -> None:
    files = CertificateFiles(*map(Path, certificate)) if certificate else None
    access = HttpAccess.of(Config.model_validate({"security": {"credentials": credentials}}), HOST)
    access = dataclasses.replace(access, certificate=files)
    stop, sock = stop_on_signals(), bind(HOST, 0, "port")

    async def ready() -> None:
        return None

    async with (
        serve_http(create_app("test", ready), sock, access),
        serving(Half(), credentials=Credentials(Path(credentials)), certificate=files) as port,
    ):
        sys.stdout.write(f"{sock.getsockname()[1]} {port}\n")
        sys.stdout.flush()
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
