"""What `headrace serve` starts vLLM's server with, and whom the guard beyond the loopback interface lets in."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.cli import serve
from headrace.cli.weights import NamedModel, RunCheckpoint
from headrace.config import Config
from headrace.net import api_key
from tests.support.ports import free_port
from tests.support.processes import descendants, gone

DIR = NamedModel("adder", "models/adder")
KEY = {api_key.VARIABLE: "key"}


def test_the_users_options_win_but_for_where_it_listens(tmp_path: Any) -> None:
    config = Config.model_validate({"policy": {"precision": "float32", "max_total_sequence_length": 64}})
    found = NamedModel("adder@4", "policy", RunCheckpoint(config, 4))
    options = serve.arguments(
        found, "127.0.0.1", 8000, None, ["--max-model-len", "32", "--host", "0.0.0.0"], on_cpu=True
    )
    last = dict(itertools.pairwise(options))
    assert (last["--served-model-name"], last["--model"], last["--dtype"]) == ("adder@4", "policy", "float32")
    assert (last["--max-model-len"], last["--host"], last["--port"]) == ("32", "127.0.0.1", "8000")
    assert last["--kv-cache-memory-bytes"] == str(2**28)
    assert "--enforce-eager" in options
    on_gpu = serve.arguments(found, "127.0.0.1", 8000, None, [], on_cpu=False)
    assert dict(itertools.pairwise(on_gpu))["--gpu-memory-utilization"] == "0.9"
    assert "--enforce-eager" not in on_gpu
    assert "--middleware" not in options
    assert serve.arguments(DIR, "::1", 1, None, [], on_cpu=True) == [
        "--model", "models/adder", "--served-model-name", "adder", "--host", "::1", "--port", "1",
    ]  # fmt: skip


def test_beyond_loopback_there_is_a_guard_and_a_certificate() -> None:
    options = serve.arguments(DIR, "0.0.0.0", 8000, ("cert", "key"), [], on_cpu=True)
    assert options[-6:] == [
        "--ssl-certfile",
        "cert",
        "--ssl-keyfile",
        "key",
        "--middleware",
        "headrace.net.api_key.KeyGuard",
    ]


@pytest.mark.parametrize(
    ("host", "environ", "tls", "insecure", "error"),
    [
        ("127.0.0.1", {}, False, False, None),
        ("0.0.0.0", {}, True, True, "VLLM_API_KEY"),
        ("server.internal", KEY, False, False, "--tls-cert and --tls-key"),
        ("0.0.0.0", KEY, True, False, None),
        ("0.0.0.0", KEY, False, True, None),
    ],
)
def test_nothing_is_served_beyond_loopback_without_key_and_tls(
    host: str, environ: dict[str, str], tls: bool, insecure: bool, error: str | None
) -> None:
    if error is None:
        serve.check(host, [], environ, tls=tls, insecure=insecure)
        return
    with pytest.raises(ConfigError, match=error):
        serve.check(host, [], environ, tls=tls, insecure=insecure)


# A server that is deaf to signals and has an engine that is deaf as well, as vLLM's is while its engine loads.
DEAF = """
import signal, subprocess, sys
code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('engine', flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", code])
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, lambda *_: None)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly),  # the same handler
        (signal.SIGKILL, -9),
    ],
)
def test_however_it_is_stopped_no_process_is_left(tmp_path: Path, signum: int, code: int) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    (tmp_path / "config.json").write_text("{}")
    start = "from headrace.cli import main, serve; serve._SERVER, serve._GRACE_S = 'deaf', 0.5; main()"
    command = [sys.executable, "-c", start, "serve", str(tmp_path), "--port", str(free_port())]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    serving, started = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True), dict[int, str]()
    assert serving.stdout is not None
    try:
        assert "engine\n" in iter(serving.stdout.readline, "")
        started = descendants(serving.pid)
        serving.send_signal(signum)
        assert serving.wait(60) == code
        assert [command for pid, command in started.items() if not gone(pid)] == []
    finally:
        serving.kill()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        serving.wait()
        serving.stdout.close()


@pytest.mark.parametrize("option", ["--api-key", "--api_key=secret"])
def test_a_key_is_not_taken_from_the_command_line(option: str) -> None:
    with pytest.raises(ConfigError, match="command line"):
        serve.check("127.0.0.1", [option], KEY, tls=False, insecure=False)


@pytest.mark.parametrize(
    ("path", "authorization", "status"),
    [
        ("/v1/models", [], 401),
        ("/invocations", [], 401),  # which vLLM leaves open
        ("/v1/models", [b"Bearer other"], 401),
        ("/v1/models", [b"Bearer key", b"Bearer other"], 401),
        ("/v1/models", [b"Basic key"], 401),
        ("/v1/models", [b"bearer key"], 200),
        ("/invocations", [b"Bearer key"], 200),
        ("/health", [], 200),
        ("/health/", [], 401),
    ],
)
async def test_the_guard_asks_for_the_key_on_every_path(
    monkeypatch: pytest.MonkeyPatch, path: str, authorization: list[bytes], status: int
) -> None:
    monkeypatch.setenv(api_key.VARIABLE, "key")
    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"authorization", a) for a in authorization]}
    assert await answers(scope) == [status]
    assert await answers({**scope, "type": "websocket"}) == ([200] if status == 200 and authorization else ["closed"])


async def answers(scope: Any) -> list[Any]:
    """What the guard around an application that answers 200 sends."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append(200)

    async def send(message: Any) -> None:
        if message["type"] == "websocket.close":
            sent.append("closed")
        elif message["type"] == "http.response.start":
            sent.append(message["status"])

    await api_key.KeyGuard(app)(scope, None, send)
    return sent
