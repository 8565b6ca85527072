"""`FILE.py:CLASS` where no `headrace up` serves it: the reward service does, in a container too."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path

import pytest
import yaml

from headrace import Episode, Sample
from headrace.base.errors import ServiceError
from headrace.base.tls import CertificateFiles
from headrace.config import load
from headrace.env.kit.scripted_policy import ScriptedPolicy
from headrace.env.wire import episode_to_wire, outcome_from_wire, sample_to_wire
from headrace.net import rpc
from headrace.net.credentials import Credentials
from headrace.v1 import reward_pb2, reward_pb2_grpc
from tests.support.command import said
from tests.support.ports import free_ports, listens
from tests.support.processes import started
from tests.support.reward_hub import WAIT_S, start_hub
from tests.support.waiting import eventually, wait_until

DEPLOY = Path(__file__).parents[3] / "deploy"
SOURCE = """
import asyncio
import ssl

import beside
import headrace


class Exact(headrace.Environment):
    def score(self, sample):
        return beside.worth * (sample.completion.strip() == sample.extra_env_info["answer"])


class Asks(headrace.Environment):
    async def episode(self, e):
        said = await e.chat(list(e.messages))
        return float(said["content"] == e.public["answer"])


class Trusts(headrace.Environment):
    async def score(self, sample):
        _, writer = await asyncio.open_connection("localhost", int(sample.completion), ssl=True)
        writer.close()
        return float(len(ssl.create_default_context().get_ca_certs()) > 1)  # and whom it trusts otherwise
"""
RECIPE = """
env:
  exact: {target: "examples/my_env.py:Exact"}
data:
  train: {dataset_name: arithmetic, env_name: exact}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As the image has it: recipes and what lies beside them."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "my_env.py").write_text(SOURCE)
    (tmp_path / "examples" / "beside.py").write_text("worth = 0.5")
    (tmp_path / "examples" / "mine.yaml").write_text(RECIPE)
    return tmp_path


async def test_the_hub_serves_scores_and_episodes_of_a_file(folder: Path) -> None:
    file = folder / "examples" / "my_env.py"
    envs = {
        "exact": {"target": f"{file}:Exact"},
        "asks": {"target": f"{file}:Asks", "episodes": True, "public": ["answer"]},
    }
    right, wrong = (Sample(text, {"answer": "2"}, environment="exact") for text in ("2", "3"))
    with ScriptedPolicy() as policy:
        async with start_hub(envs) as hub:
            assert [score.reward for score in await hub.score([right, wrong])] == [0.5, 0]
            session = policy.session(["2"])
            episode = Episode(
                session.base_url,
                session.api_key,
                ({"role": "user", "content": "1+1"},),
                {"answer": "2"},
                deadline=time.monotonic() + WAIT_S,
                environment="asks",
            )
            request = reward_pb2.RunEpisodeRequest(episode=episode_to_wire(episode))
            outcome = outcome_from_wire((await hub.stub.RunEpisode(request, timeout=WAIT_S)).outcome)
            assert outcome.score is not None
            assert outcome.score.reward == 1
            listed = await hub.environments()
            assert {each.kind for each in listed.values()} == {reward_pb2.EnvironmentStatus.KIND_SERVED}


async def test_its_programs_trust_the_authority_of_the_run(folder: Path) -> None:
    """As they have to, to call a gateway beyond the loopback interface."""
    said("certs", "--dir", folder, "gateway")
    certificate = CertificateFiles(folder / "gateway.pem", folder / "gateway.key")
    env = {"trusts": {"target": f"{folder}/examples/my_env.py:Trusts"}}
    async with await asyncio.start_server(lambda *_: None, "localhost", 0, ssl=certificate.context()) as server:
        sample = Sample(str(server.sockets[0].getsockname()[1]), {}, environment="trusts")
        async with start_hub(env, tls_ca=folder / "ca.pem") as hub:
            assert [score.reward for score in await hub.score([sample])] == [1]


async def test_a_file_that_cannot_be_served_ends_the_service(folder: Path) -> None:
    with pytest.raises(ServiceError, match=r"env\.exact.*my_env\.py.*Other.*Exact"):
        async with start_hub({"exact": {"target": f"{folder}/examples/my_env.py:Other"}}):
            pass


@pytest.mark.nightly  # four commands, each with Python to start; the hub itself is tested above
async def test_a_container_serves_the_file_beside_its_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, the variables, the secrets and the check of the service `reward` in deploy/docker-compose.yml."""
    monkeypatch.chdir(folder)
    service = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]["reward"]
    recipe, secrets, (port, http_port) = "examples/mine.yaml", folder / "secrets", free_ports(2)
    said("certs", "--dir", secrets, "reward")
    said("credentials", recipe, "--dir", secrets)
    for name in ("pem", "key"):
        (secrets / f"reward.{name}").rename(secrets / f"tls.{name}")
    own = {**service["environment"], "HEADRACE_REWARD__PORT": port, "HEADRACE_REWARD__HTTP_PORT": http_port}
    for name, value in own.items():
        told = re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value)).replace("/run/headrace", str(secrets))
        monkeypatch.setenv(name, told)
    command = [re.sub(r"\$\{CONFIG:-.*\}", recipe, word) for word in service["command"]]
    async with started(sys.executable, "-m", "headrace.cli", *command) as process:
        # two processes start, one after the other
        await asyncio.to_thread(wait_until, lambda: process.returncode is not None or listens(http_port))

        async def is_ready() -> bool:
            check = await asyncio.create_subprocess_exec(sys.executable, DEPLOY / "bin" / "ready", str(http_port))
            return await check.wait() == 0

        await eventually(is_ready)  # asked again, as the engine asks: the port listens before the service answers
        token = Credentials(secrets / "credentials").make_token_source("scorer")
        async with rpc.channel(f"localhost:{port}", security=load(recipe).security, token=token) as channel:
            sample = sample_to_wire(Sample("2", {"answer": "2"}, environment="exact"))
            request = reward_pb2.ScoreRequest(trajectories=[sample])
            response = await reward_pb2_grpc.RewardServiceStub(channel).Score(request, timeout=WAIT_S)
        assert [result.reward for result in response.results] == [0.5]
        process.terminate()
        assert await process.wait() == 0
