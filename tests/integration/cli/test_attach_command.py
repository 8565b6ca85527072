"""Attaching to a run of this machine, whose credentials are found by the port of its hub, and the token for other machines."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import Sample
from headrace.cli.app import app
from headrace.config import Config
from headrace.env.wire import sample_to_wire
from headrace.launch import runs
from headrace.net import rpc
from headrace.net.credentials import Credentials
from headrace.v1 import reward_pb2, reward_pb2_grpc
from tests.support.ports import free_port
from tests.support.processes import started
from tests.support.reward_hub import WAIT_S

EXAMPLE = Path(__file__).parents[3] / "examples" / "attached_environment.py"
ENV = [sys.executable, "-m", "headrace.cli", "env"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of a run as `headrace up` makes it."""
    config = Config.model_validate(
        {
            "run": {"id": "mine", "dir": str(tmp_path_factory.mktemp("runs"))},
            "env": {"exact": {"attached": True}, "math": {}},
            "reward": {"port": free_port(), "workers": 1},
            "data": {},
        }
    )
    config = runs.with_credentials(config)
    runs.save(config)
    runs.make_credentials(config)
    return config


@pytest.fixture(scope="module")
def hub(config: Config) -> Iterator[str]:
    """The address of the run's hub, a process of its own."""
    saved = config.run_folder / runs.SAVED
    process = subprocess.Popen([sys.executable, "-m", "headrace.cli", "reward", "--config", str(saved)])
    try:
        yield f"127.0.0.1:{config.reward.port}"
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def scorer(config: Config, hub: str) -> AsyncIterator[reward_pb2_grpc.RewardServiceStub]:
    token = Credentials(config.run_folder / "credentials").make_token_source("scorer")
    async with rpc.channel(hub, token=token) as channel:
        await asyncio.wait_for(channel.channel_ready(), WAIT_S)
        yield reward_pb2_grpc.RewardServiceStub(channel)


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param([sys.executable, EXAMPLE], id="script"),
        # the test below attaches by the command too
        pytest.param([*ENV, "attach", str(EXAMPLE), "--name", "exact"], id="command", marks=pytest.mark.nightly),
    ],
)
async def test_attaching_to_a_local_run_takes_no_token(config: Config, hub: str, argv: list[str]) -> None:
    sample = Sample(" 132\n", {"answer": "132"}, environment="exact")
    async with scorer(config, hub) as stub, started(*argv, hub) as process:
        async with asyncio.timeout(WAIT_S):
            while True:
                request = reward_pb2.ScoreRequest(trajectories=[sample_to_wire(sample)])
                (result,) = (await stub.Score(request, timeout=WAIT_S)).results
                if result.HasField("reward"):
                    break
                await asyncio.sleep(0.05)
        assert (result.reward, result.environment) == (1.0, "Exact")
        process.terminate()
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


async def test_a_changed_file_is_attached_anew_unless_it_is_broken(config: Config, hub: str, tmp_path: Path) -> None:
    file = tmp_path / "my_env.py"
    source = "import headrace\nclass Exact(headrace.Environment):\n    def score(self, sample):\n        return {}\n"
    request = reward_pb2.ScoreRequest(trajectories=[sample_to_wire(Sample("x", environment="exact"))])

    async def scores(stub: reward_pb2_grpc.RewardServiceStub, wanted: float) -> str:
        """The build that gave this reward, once it does."""
        async with asyncio.timeout(WAIT_S):
            while True:
                (result,) = (await stub.Score(request, timeout=WAIT_S)).results
                if result.reward == wanted:
                    return result.build
                await asyncio.sleep(0.05)

    file.write_text(source.format(1.0))
    argv = [*ENV, "attach", f"{file}:Exact", hub, "--name", "exact", "--reload"]
    async with scorer(config, hub) as stub, started(*argv, stderr=asyncio.subprocess.PIPE) as process:
        assert process.stderr is not None
        builds = [await scores(stub, 1.0)]
        file.write_text(source.format(2.0))
        builds.append(await scores(stub, 2.0))
        file.write_text("class Exact")
        async with asyncio.timeout(WAIT_S):
            while b"The previous environment stays attached" not in await process.stderr.readline():
                pass
        builds.append(await scores(stub, 2.0))
        file.write_text(source.format(1.0))
        builds.append(await scores(stub, 1.0))
        assert builds == [builds[0], builds[1], builds[1], builds[0]]
        assert len({*builds}) == 2
        process.terminate()
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


async def test_a_name_that_the_local_run_does_not_declare_is_refused(config: Config, hub: str, tmp_path: Path) -> None:
    file = tmp_path / "my_env.py"
    file.write_text(EXAMPLE.read_text())
    async with scorer(config, hub):
        attach = [*ENV, "attach", f"{file}:Exact", hub, "--name", "math"]
        refused = await asyncio.to_thread(subprocess.run, attach, capture_output=True, text=True, timeout=WAIT_S)
    assert refused.returncode == 1
    assert "no attached environment 'math'" in refused.stderr
    assert "env.math: {attached: true}" in refused.stderr


def test_the_token_for_another_machine_is_printed(config: Config) -> None:
    folder = str(config.run_folder)
    line = CliRunner().invoke(app, ["env", "token", "exact", "--run", folder]).stdout
    assert line == f"environment exact {Credentials(config.run_folder / 'credentials').token('environment exact')}\n"
    unknown = CliRunner().invoke(app, ["env", "token", "math", "--run", folder])
    assert "it has exact" in str(unknown.exception)
