"""A policy with scripted answers: a server for OpenAI's chat completions API, to try programs without a model."""

from __future__ import annotations

import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

from headrace.base.addresses import LOOPBACK
from headrace.records.trajectory import Message

Answer = str | Mapping[str, Any]
# Answers in turn; once they are used up, the policy refuses calls as it does beyond a limit. Or a function from a call's messages to its
# answer.
Answers = Sequence[Answer] | Callable[[Sequence[Message]], Answer]


@dataclasses.dataclass(frozen=True)
class PolicyCall:
    """A request to the policy: its messages, and its other fields as `options`."""

    messages: tuple[Message, ...]
    options: dict[str, Any]


class ScriptedSession:
    """The answers for one episode, and the calls that it has made."""

    def __init__(self, origin: str, answers: Answers) -> None:
        self.api_key = secrets.token_hex(16)
        self.base_url = f"{origin}/s/{self.api_key}/v1"
        self.calls: list[PolicyCall] = []
        self.ended = False  # once set, the key is refused
        self._answers = answers
        self._lock = threading.Lock()

    def answer(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Record a request, and return its status and body."""
        messages = tuple(request.pop("messages", ()))
        with self._lock:
            self.calls.append(PolicyCall(messages, request))
            number = len(self.calls)
        if self.ended:
            return 401, _error("the episode has ended", "invalid_api_key")
        if callable(self._answers):
            try:
                answer = self._answers(messages)
            except Exception as error:  # noqa: BLE001  # the test's own code failed: the program gets the error
                return 400, _error(f"the test's answers raised {type(error).__name__}: {error}", "invalid_request")
        elif number > len(self._answers):
            why = f"all {len(self._answers)} answers of the test are used up; this counts as a limit of the run"
            return 400, _error(why, "context_length_exceeded")
        else:
            answer = self._answers[number - 1]
        message = {"role": "assistant", **({"content": answer} if isinstance(answer, str) else answer)}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        return 200, {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.get("model", "policy"),
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }


class ScriptedPolicy:
    """The policy's server, on a free port of this machine while the context is open. `strays` are requests with no session's key."""

    def __init__(self) -> None:
        self.strays: list[str] = []
        self._sessions: dict[str, ScriptedSession] = {}
        self._server = ThreadingHTTPServer((LOOPBACK, 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def session(self, answers: Answers) -> ScriptedSession:
        session = ScriptedSession(f"http://{LOOPBACK}:{self._server.server_port}", answers)
        self._sessions[session.api_key] = session
        return session

    def find(self, url: str, authorization: str | None, endpoint: str) -> ScriptedSession | None:
        """Return the session whose key is both in the address and presented."""
        path = urlsplit(url).path
        for key, session in self._sessions.items():
            if path == f"/s/{key}/v1{endpoint}" and authorization == f"Bearer {key}":
                return session
        self.strays.append(f"{path} with {authorization}")
        return None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


def _handler(policy: ScriptedPolicy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            session = policy.find(self.path, self.headers["authorization"], "/chat/completions")
            if session is None:
                self._send(401, _error("the key belongs to no episode", "invalid_api_key"))
                return
            status, answer = session.answer(request)
            if request.get("stream") and status == 200:
                self._stream(answer)
            else:
                self._send(status, answer)

        def do_GET(self) -> None:
            if policy.find(self.path, self.headers["authorization"], "/models") is None:
                self._send(401, _error("the key belongs to no episode", "invalid_api_key"))
                return
            self._send(200, {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "headrace"}]})

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            self._write(status, "application/json", json.dumps(answer).encode())

        def _stream(self, answer: dict[str, Any]) -> None:
            """Send the finished answer in two chunks."""
            (choice,) = answer.pop("choices")
            delta = dict(choice["message"])
            if delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
            answer["object"] = "chat.completion.chunk"
            chunks = [
                {**answer, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
                {**answer, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
            ]
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            self._write(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

        def _write(self, status: int, kind: str, body: bytes) -> None:
            try:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # the caller has gone
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Log nothing: the calls are recorded."""

    return Handler
