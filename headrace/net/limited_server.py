"""`python -m headrace.net.limited_server MODULE [ARGUMENT…]` runs a module as `python -m MODULE` does, but uvicorn's servers in it (vLLM's)
have the limits of Headrace's own HTTP ports, and run on asyncio's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import runpy
import socket
import sys
from functools import partial

import uvicorn

from headrace.net import service
from headrace.net.http_connection import Connection

_start = uvicorn.Server.startup


async def start_limited(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
    """Start a server whose configuration is loaded. It leaves TLS to the connections, so that they have a limit from the first byte on. As
    on every other port, `Upgrade` is ignored."""
    config = server.config
    config.http_protocol_class = partial(Connection, context=config.ssl, most_waiting=service.most_connections())  # type: ignore[assignment]
    config.ws_protocol_class = None
    config.ssl = None
    await _start(server, sockets)


def main() -> None:
    with contextlib.suppress(ImportError):
        import uvloop

        # it reads on although a connection pauses, and the beginning of a handshake would be taken for a request
        uvloop.run = asyncio.run  # type: ignore[assignment]
    uvicorn.Server.startup = start_limited  # type: ignore[assignment, method-assign]  # a subclass of vLLM's calls it
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
