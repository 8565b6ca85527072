"""`headrace env list` of a run with several hubs, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.launch import runs
from headrace.net.credentials import FILE, complete
from headrace.replay import Limits, ReplayClient
from tests.support.command import headrace, refused
from tests.support.kept_run import kept_run
from tests.support.ports import free_port
from tests.support.waiting import wait_until


async def nothing(replay: ReplayClient) -> None:
    """The buffer of a run that has not begun."""


@contextlib.contextmanager
def hub(config: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "headrace.cli", "reward", "--config", str(config), f"reward.port={port}"]
    process = subprocess.Popen([*argv, "reward.address=null"], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_hub_that_is_down_is_named_and_hides_no_other(tmp_path: Path, limits: Limits) -> None:
    ports = free_port(), free_port()
    one, other = (f"127.0.0.1:{port}" for port in ports)
    with kept_run(tmp_path, "two", limits, nothing) as (folder, _):
        for command in (("list", folder), ("token", "math", "--run", folder)):
            assert f"run two has no {folder / FILE}" in refused("env", *command)
        complete(folder / FILE, ["reader"])
        config = folder / runs.SAVED
        written = (
            config.read_text()
            .replace("env_name: math", "env_name: mine")
            .replace("math: {type: math}", "mine: {attached: true}")
        )
        config.write_text(f"{written}reward: {{http_port: 0, address: [{one}, {other}]}}\n")
        with hub(config, ports[0]), hub(config, ports[1]) as lost:
            wait_until(lambda: headrace("env", "list", folder).returncode == 0)
            table = headrace("env", "list", folder).stdout
            assert [line for line in table.splitlines() if line.startswith("hub ")] == [f"hub {one}", f"hub {other}"]
            lost.kill()
            lost.wait()
            done = headrace("env", "list", folder)
            assert (done.returncode, done.stderr) == (1, "")
            assert f"hub {one}\n" in done.stdout
            assert "mine         attached  0 processes" in done.stdout
            (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"hub {other} ")]
            assert line.startswith(f"hub {other} doesn't answer (UNAVAILABLE: ")
            assert line.endswith("remove it from reward.address")
            as_json = headrace("env", "list", folder, "--json")
            assert as_json.returncode == 1
            found = json.loads(as_json.stdout)
            assert [each["name"] for each in found["hubs"][one]] == ["mine"]
            assert found["away"][other].startswith("UNAVAILABLE: ")
        assert f"no hub of run two answers: at {one}" in refused("env", "list", folder)
