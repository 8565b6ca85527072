"""The environments that `headrace up` starts, as it starts them."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace import Episode, Sample
from headrace.base.tls import CertificateFiles
from headrace.cli.display import LineDisplay
from headrace.config import Config
from headrace.env.wire import episode_to_wire, sample_to_wire
from headrace.launch import runs, supervisor
from headrace.launch.environment_processes import children
from headrace.launch.pipeline import Pipeline
from headrace.net import rpc
from headrace.net.credentials import Credentials
from headrace.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2
from headrace_services.reward.main import running
from tests.support.command import said
from tests.support.ports import free_ports
from tests.support.reward_hub import WAIT_S

# Its first argument is a port on this machine, its second the URL of the same port.
CALLS = """
import asyncio, ssl, sys
import requests

async def main():
    _, writer = await asyncio.open_connection("localhost", int(sys.argv[1]), ssl=True)
    writer.close()

asyncio.run(main())
assert len(ssl.create_default_context().get_ca_certs()) > 1, "it trusts nobody else any more"
assert requests.get(sys.argv[2]).text == "yes"
"""


async def test_a_program_trusts_the_authority_of_the_run(tmp_path: Path) -> None:
    """As it has to, to call a gateway beyond the loopback interface."""
    said("certs", "--dir", tmp_path, "gateway")
    certificate = CertificateFiles(tmp_path / "gateway.pem", tmp_path / "gateway.key")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline():
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nyes")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "localhost", 0, ssl=certificate.context()) as server:
        port = server.sockets[0].getsockname()[1]
        command = [sys.executable, "-c", CALLS, str(port), f"https://localhost:{port}"]
        for tls_ca, status in ((tmp_path / "ca.pem", 0), (None, 1)):
            settings: dict[str, Any] = {
                "run": {"id": "test", "dir": str(tmp_path / "runs")},
                "env": {"mine": {"command": command, "port": 1}},
                "data": {"train": {"dataset_name": "arithmetic", "env_name": "mine"}},
                "security": {"tls_ca": None if tls_ca is None else str(tls_ca)},
            }
            child = children(Config.model_validate(settings), tmp_path / "logs")["mine"]
            process = await asyncio.create_subprocess_exec(*child.argv, env=child.environ)
            assert await process.wait() == status


# Its first process holds the interpreter, and answers nobody; the next one does not.
HOLDS = """
import os, pathlib, re, headrace

def hold():
    begun = pathlib.Path(__file__).with_suffix(".begun")
    if not begun.exists():
        begun.write_text(str(os.getpid()))
        re.match("(a|a)*b", "a" * 64)
    return 1.0

class Scores(headrace.Environment):
    def score(self, sample):
        return hold()

class Plays(headrace.Environment):
    episodes = 1

    async def episode(self, episode):
        return hold()
"""


async def result_of(kind: str, port: int, credentials: Credentials) -> Any:
    """What a hub answers about one completion, or one episode, of the environment `mine`."""
    token = credentials.make_token_source("scorer" if kind == "Scores" else "agents")
    async with rpc.channel(f"127.0.0.1:{port}", token=token) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        if kind == "Scores":
            request = reward_pb2.ScoreRequest(trajectories=[sample_to_wire(Sample("1", environment="mine"))])
            return (await stub.Score(request, timeout=WAIT_S)).results[0]
        deadline = time.monotonic() + WAIT_S
        episode = Episode("http://127.0.0.1:1/v1", "key", (), {}, deadline=deadline, environment="mine", group_id="g")
        request = reward_pb2.RunEpisodeRequest(episode=episode_to_wire(episode))
        return (await stub.RunEpisode(request, timeout=WAIT_S)).outcome.result


@pytest.mark.parametrize(
    ("kind", "decides"), [("Scores", "env.mine.timeout_s"), ("Plays", "agents.episode_s and replay.group_deadline_s")]
)
async def test_an_environment_that_holds_the_interpreter_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, decides: str
) -> None:
    """Its silence is real; how long it lasts is told, not waited for."""
    # a function to call between fork and exec, which gRPC's threads don't survive: `up` has none, but the hub is in this process
    monkeypatch.setattr(supervisor, "die_with_parent", None)
    (tmp_path / "holds.py").write_text(HOLDS)
    begun = tmp_path / "holds.begun"
    hub_port, page_port, own_port = free_ports(3)
    target = f"{tmp_path / 'holds.py'}:{kind}"
    settings = {
        "run": {"id": "r", "dir": str(tmp_path), "hang_timeout_s": 50},
        "env": {"mine": {"target": target, "port": own_port, "timeout_s": 100, "episodes": kind == "Plays"}},
        "replay": {"group_deadline_s": 50},
        "agents": {"episode_s": 30, "finish_s": 20},
        "reward": {"port": hub_port, "http_port": page_port},
    }
    config = runs.with_credentials(Config.model_validate(settings))
    saved = runs.save(config)
    runs.make_credentials(config)
    credentials = Credentials(Path(str(config.security.credentials)))
    printed = io.StringIO()
    pipeline = Pipeline(config, saved, None, {}, LineDisplay(Console(file=printed, width=300)))
    (child,) = pipeline.children.environments.values()

    async def look(until: Callable[[], bool], after_s: float = 0.0) -> None:
        async with asyncio.timeout(WAIT_S):
            while not until():
                await pipeline._look_at_environments(after_s)
                await asyncio.sleep(0.02)

    async with running(config):
        supervision = asyncio.create_task(pipeline.supervisor.supervise(child))
        try:
            await look(lambda: child.state == "ready")
            held = asyncio.create_task(result_of(kind, hub_port, credentials))
            await look(begun.exists)
            await look(lambda: child.silent_s > 0, 1.0)
            child.silent_s = 109.0
            pipeline._replace_silent()
            assert printed.getvalue() == ""
            child.silent_s = 111.0
            pipeline._replace_silent()
            assert f"environment-mine: no answer for 111 s ({decides})" in printed.getvalue()
            await look(lambda: child.restarts == 1 and child.state == "ready")
            assert (await held).status != trajectory_pb2.STATUS_SCORED
            assert (await result_of(kind, hub_port, credentials)).status == trajectory_pb2.STATUS_SCORED
        finally:
            supervision.cancel()
            await asyncio.wait({supervision})
            await pipeline.supervisor.stop([child])
            pipeline.supervisor.close()
