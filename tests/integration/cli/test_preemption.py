"""`headrace preemption-watch`: a command is stopped in order when its cloud gives notice, and only then."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ServiceError
from headrace.launch.preemption import Notices
from tests.support.http_server import Quiet, serving
from tests.support.waiting import wait_until

CLOUDS = ["aws", "azure", "gcp"]
# Says when it may be stopped, and stops in order.
COMMAND = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("up", flush=True)
signal.pause()
"""


class Metadata:
    """The metadata servers of all clouds. `notice`: for whom one is given, if anyone."""

    def __init__(self) -> None:
        self.notice: str | None = None
        self.token = "token"
        self.asked = 0

    def answer(self, method: str, path: str, headers: Any) -> str | None:
        self.asked += 1
        match method, path.partition("?")[0]:
            case "PUT", "/latest/api/token" if "X-aws-ec2-metadata-token-ttl-seconds" in headers:
                return self.token
            case "GET", "/latest/meta-data/spot/instance-action":
                return self.notice and json.dumps({"action": "terminate", "time": "2026-11-26T22:00:00Z"})
            case "GET", "/computeMetadata/v1/instance/preempted" if headers["Metadata-Flavor"] == "Google":
                return "TRUE" if self.notice else "FALSE"
            case "GET", "/metadata/scheduledevents" if headers["Metadata"] == "true":
                event = {"EventType": "Preempt", "Resources": [self.notice], "NotBefore": ""}
                others = {"EventType": "Reboot", "Resources": ["this"], "NotBefore": ""}
                return json.dumps({"DocumentIncarnation": 1, "Events": [others, *([event] if self.notice else [])]})
            case "GET", "/metadata/instance/compute/name" if headers["Metadata"] == "true":
                return "this"
        return None


@pytest.fixture
def metadata() -> Iterator[tuple[Metadata, str]]:
    state = Metadata()

    class Handler(Quiet):
        def do_GET(self) -> None:
            answer = state.answer(self.command, self.path, self.headers)
            refused = self.headers.get("X-aws-ec2-metadata-token", state.token) != state.token
            self.send_response(401 if refused else 404 if answer is None else 200)
            self.end_headers()
            self.wfile.write((answer or "").encode())

        do_PUT = do_GET

    with serving(Handler) as address:
        yield state, f"http://{address}"


def watch(cloud: str, url: str, *command: str) -> subprocess.Popen[str]:
    faster = "from headrace.cli import main, preemption; preemption._LOOK_S = 0.05; main()"
    argv = [sys.executable, "-c", faster, "preemption-watch", "--cloud", cloud, "--metadata", url, "--", *command]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_stops_the_command_in_order(metadata: tuple[Metadata, str], cloud: str) -> None:
    state, url = metadata
    process = watch(cloud, url, sys.executable, "-c", COMMAND)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    before = state.asked
    wait_until(lambda: state.asked > before + 3)
    assert process.poll() is None
    state.notice = "this"
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "takes this machine away" in said


def test_a_notice_to_another_machine_of_a_set_is_not_for_this_one(metadata: tuple[Metadata, str]) -> None:
    state, url = metadata
    notices = Notices("azure", url)
    state.notice = "other"
    assert notices.find() is None
    state.notice = "this"
    assert "Preempt" in (notices.find() or "")


def test_a_token_that_has_ended_is_no_fault(metadata: tuple[Metadata, str]) -> None:
    state, url = metadata
    notices = Notices("aws", url)
    assert notices.find() is None
    state.token = "another"
    assert notices.find() is None


def test_an_answer_that_is_not_http_is_a_fault_of_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(1024)
                connection.sendall(b"garbage\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ServiceError, match="--cloud"):
            Notices("gcp", f"http://127.0.0.1:{server.getsockname()[1]}").find()


def test_a_signal_and_the_exit_code_pass_through(metadata: tuple[Metadata, str]) -> None:
    _, url = metadata
    process = watch("gcp", url, sys.executable, "-c", COMMAND)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    process.communicate()
    assert watch("gcp", url, sys.executable, "-c", "raise SystemExit(7)").wait(60) == 7


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_machine_of_another_cloud_is_refused_before_the_start(cloud: str, tmp_path: Path) -> None:
    process = watch(cloud, "http://127.0.0.1:9", sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "--cloud" in said
    assert not (tmp_path / "ran").exists()
