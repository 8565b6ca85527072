"""A server of a test's own HTTP handler."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(
    handler: Callable[..., BaseHTTPRequestHandler], host: str = "127.0.0.1", context: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve on a port of its own while the context is open; yields the address without its scheme. Over TLS with a server's `context`."""
    with ThreadingHTTPServer((host, 0), handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"{host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
