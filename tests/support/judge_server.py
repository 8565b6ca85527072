"""A server that speaks OpenAI's API, and whose model is a function of the test."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (status, body) for a request: its parsed body. Of a body without an end, the parts. Headers may follow.
Answer = tuple[int, bytes | Iterator[bytes]] | tuple[int, bytes | Iterator[bytes], dict[str, str]]
Answers = Callable[[dict[str, Any]], Answer]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class JudgeServer:
    """Listens while the context is open, on a port of its own; over TLS with a server's `context`."""

    def __init__(self, answers: Answers, context: ssl.SSLContext | None = None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/chat/completions"
                outer.requests.append(body)
                outer.headers.append(dict(self.headers))
                status, answer, *more = answers(body)
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                parts = [answer] if isinstance(answer, bytes) else answer
                self.send_header("Content-Length", str(len(answer) if isinstance(answer, bytes) else 2**16))
                self.send_header("Content-Type", "application/json")
                if status in (301, 302, 307, 308):
                    self.send_header("Location", f"http://127.0.0.1:{outer.port}/v1/elsewhere")
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    for part in parts:
                        self.wfile.write(part)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        scheme = "http"
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.port = self._server.server_address[1]
        self.base_url = f"{scheme}://localhost:{self.port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> JudgeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def said(content: object, **usage: int) -> tuple[int, bytes]:
    """A chat completion with this text; of what is no text, its JSON."""
    text = content if isinstance(content, str) else json.dumps(content)
    choices = [{"index": 0, "message": {"role": "assistant", "content": text}}]
    return 200, json.dumps({"choices": choices, **({"usage": usage} if usage else {})}).encode()


def judged(request: dict[str, Any]) -> dict[str, Any]:
    """What a request shows the judge between its marks."""
    system, user = request["messages"]
    first, data, last = user["content"].split("\n")
    assert first == last
    assert first in system["content"]
    found = json.loads(data)
    assert isinstance(found, dict)
    return found
