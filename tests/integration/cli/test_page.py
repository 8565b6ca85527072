"""`headrace page`: serves a folder of runs, or finds the page that a run serves already."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from headrace.launch.runs import SAVED, make_credentials, tunnel, with_credentials
from headrace.run.folder import load_saved
from tests.support.command import refused, said
from tests.support.page_runs import recorded_run
from tests.support.ports import free_port
from tests.support.waiting import wait_until


@contextlib.contextmanager
def page(tmp_path: Path, *arguments: object, **environ: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The command as a process, and the file with what it says."""
    output = tmp_path / "said"
    with output.open("wb") as out:
        command = [sys.executable, "-m", "headrace.cli", "page", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environ})
    try:
        yield process, output
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, output.read_text()


def find_address(process: subprocess.Popen[bytes], output: Path) -> re.Match[str]:
    def found() -> re.Match[str] | None:
        assert process.poll() is None, output.read_text()
        return re.search(r"page: (http://127\.0\.0\.1:(\d+))(\S*)#code=(\S+)", output.read_text())

    wait_until(lambda: found() is not None)
    match = found()
    assert match is not None
    return match


def is_alive(port: int) -> bool:
    """Whether the page answers: its port listens a little earlier."""
    with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60):
        return True
    return False


def sign_in(at: str, code: str) -> str:
    body = json.dumps({"code": code}).encode()
    request = Request(f"{at}/session", body, {"content-type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        cookie: str = answer.headers["set-cookie"]
    return cookie.partition(";")[0]


def test_a_folder_of_runs_is_served_from_its_files(tmp_path: Path) -> None:
    recorded_run(tmp_path / "runs")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if "groups" not in path.parts}
    with page(tmp_path, tmp_path / "runs" / "adder", "--port", 0, SSH_CONNECTION="10.0.0.9 50000 10.0.0.1 22") as (
        process,
        output,
    ):
        address = find_address(process, output)
        assert address[3] == "/runs/adder"
        assert f"ssh -N -L {address[2]}:127.0.0.1:{address[2]}" in output.read_text()
        cookie = sign_in(address[1], address[4])
        with urlopen(Request(f"{address[1]}/api/runs", headers={"cookie": cookie}), timeout=60) as answer:
            assert [run["id"] for run in json.load(answer)["runs"]] == ["adder"]
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"{address[1]}/api/runs", timeout=60)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if "groups" not in path.parts}
    assert after == before, "it only reads"


def test_the_page_that_a_run_serves_is_found(tmp_path: Path) -> None:
    folder, port = recorded_run(tmp_path / "runs", state="running"), free_port()
    saved = folder / SAVED
    saved.write_text(
        saved.read_text().replace("dir: elsewhere", f"dir: '{tmp_path / 'runs'}'") + f"page: {{port: {port}}}\n"
    )
    config = with_credentials(load_saved(saved))
    make_credentials(config)
    with saved.open("a") as file:
        file.write(f"security: {{credentials: '{config.security.credentials}'}}\n")
    with page(tmp_path, "--config", saved) as (process, output):
        wait_until(lambda: process.poll() is not None or is_alive(port))
        assert process.poll() is None, output.read_text()
        for asked in (tmp_path / "runs", folder):
            address = re.search(rf"page: http://127.0.0.1:{port}/runs/adder#code=(\S+)", said("page", asked))
            assert address is not None
        assert sign_in(f"http://127.0.0.1:{port}", address[1])


def test_what_is_no_folder_of_runs_is_refused(tmp_path: Path) -> None:
    assert "nowhere" in refused("page", tmp_path / "nowhere")
    assert "page.host" in refused("page", tmp_path, "--host", "0.0.0.0")


def test_the_tunnel_leads_to_the_server_that_was_logged_in_to() -> None:
    assert tunnel(8396, {}) is None
    there = {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.1 2222", "USER": "me"}
    assert tunnel(8396, there) == "ssh -N -L 8396:127.0.0.1:8396 -p 2222 me@10.0.0.1"
