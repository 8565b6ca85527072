"""A server of uvicorn's that limits nobody, started and configured as vLLM's. It prints its port.

python -m tests.support.unlimited_server HEAD_S [CERTIFICATE KEY]

In a process that limits it, a head has this much time, and there are at most 20 connections.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
import uvloop

from headrace.net import http_connection, service


class OwnServer(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        sys.stdout.write(f"{self.servers[0].sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


async def main(head_s: str, *certificate: str) -> None:
    http_connection.HEAD_S, service.most_connections = float(head_s), lambda: 20
    files = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=False))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="error", **files)
    config.load()
    await OwnServer(config).serve()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
