"""Services on an address of this machine that is not loopback: TLS and tokens from one end to the other, and what replaces them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

import headrace
from headrace.base.tls import CertificateFiles, client_context
from headrace.cli.app import app as cli
from headrace.config import Config
from headrace.config.environments import AttachedConfig
from headrace.env.server import serving
from headrace.env.wire import sample_to_wire
from headrace.launch.exposure import check
from headrace.net import rpc
from headrace.net.credentials import Credentials
from headrace.net.http_access import HttpAccess
from headrace.net.service import bind, create_app, serve_http
from headrace.v1 import reward_pb2, reward_pb2_grpc
from headrace_services.reward.main import running

READY = Path(__file__).parents[3] / "deploy" / "bin" / "ready"
TOKENS = "operator boss\nreader eye\nscorer judge\nenvironment mine own\nenvironment other foreign\n"


class Always(headrace.Environment):
    def score(self, sample: headrace.Sample) -> float:
        return 0.25


@pytest.fixture(scope="module")
def address() -> str:
    """Of this machine, as others see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@pytest.fixture
def certs(tmp_path: Path, address: str) -> Path:
    issue(tmp_path / "certs", address)
    return tmp_path / "certs"


def issue(folder: Path, host: str) -> None:
    assert CliRunner().invoke(cli, ["certs", "--dir", str(folder), host]).exit_code == 0


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    path.chmod(0o600)
    return path


def config_of(address: str, certs: Path, tokens: Path, target: str = "127.0.0.1:1") -> Config:
    files = {"tls_cert": f"{certs / address}.pem", "tls_key": f"{certs / address}.key", "tls_ca": f"{certs}/ca.pem"}
    return Config.model_validate(
        {
            "env": {"mine": {"target": target, "timeout_s": 20}},
            "reward": {"host": address, "port": 0},
            "security": {**files, "credentials": str(tokens)},
        }
    )


@contextlib.asynccontextmanager
async def calling(config: Config, target: str, token: str | None) -> AsyncIterator[Any]:
    given = None if token is None else lambda: token
    async with rpc.channel(target, security=config.security, token=given) as channel:
        yield reward_pb2_grpc.RewardServiceStub(channel)


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    code: grpc.StatusCode = error.value.code()
    return code


async def test_a_trajectory_is_scored_over_tls_with_each_ones_own_token(
    address: str, certs: Path, tokens: Path, tmp_path: Path
) -> None:
    """Scorer to hub to environment; a stranger, a wrong role and a wrong authority get nothing."""
    mine = written(tmp_path / "mine", "environment mine own\n")
    certificate = CertificateFiles(Path(f"{certs / address}.pem"), Path(f"{certs / address}.key"))
    async with serving(Always(), address, 0, Credentials(mine), certificate) as port:
        config = config_of(address, certs, tokens, f"{address}:{port}")
        check(config, "reward")
        async with running(config) as hub:
            target = f"{address}:{hub.port}"
            request = reward_pb2.ScoreRequest(
                trajectories=[sample_to_wire(headrace.Sample("x", environment="mine", group_id="g"))]
            )
            async with calling(config, target, "judge") as stub:
                answer = await stub.Score(request, timeout=30)
                assert [result.reward for result in answer.results] == [0.25]
            for token, code in ((None, "UNAUTHENTICATED"), ("wrong", "UNAUTHENTICATED")):
                async with calling(config, target, token) as stub:
                    assert (await refused(stub.Score(request, timeout=30))).name == code
                    assert (await refused(stub.ListEnvironments(reward_pb2.ListEnvironmentsRequest()))).name == code
            for token in ("boss", "eye", "own"):
                async with calling(config, target, token) as stub:
                    assert await refused(stub.Score(request, timeout=30)) == grpc.StatusCode.PERMISSION_DENIED
            async with calling(config, target, "eye") as stub:
                assert len((await stub.ListEnvironments(reward_pb2.ListEnvironmentsRequest())).environments) == 1
            # another environment's token is none for this one
            written(tokens, TOKENS.replace("mine own", "mine foreign"))
            async with calling(config, target, "judge") as stub:
                result = (await stub.Score(request, timeout=30)).results[0]
                assert not result.HasField("reward")
                assert "UNAUTHENTICATED" in result.message


ATTACHING = """
import sys, headrace

class Always(headrace.Environment):
    build = "1"

    def score(self, sample):
        return 0.25

hub, tokens, authority = sys.argv[1:]
headrace.attach(hub, Always(), "mine", token_file=tokens, tls_ca=authority)
"""


async def test_an_environment_attaches_over_tls_with_its_own_token(
    address: str, certs: Path, tokens: Path, tmp_path: Path
) -> None:
    config = config_of(address, certs, tokens)
    config = config.model_copy(update={"env": {"mine": AttachedConfig()}})
    mine = written(tmp_path / "mine", "environment mine own\n")
    request = reward_pb2.ScoreRequest(
        trajectories=[sample_to_wire(headrace.Sample("x", environment="mine", group_id="g"))]
    )
    async with running(config) as hub, calling(config, f"{address}:{hub.port}", "judge") as stub:
        argv = ["-c", ATTACHING, f"{address}:{hub.port}", str(mine), f"{certs}/ca.pem"]
        process = await asyncio.create_subprocess_exec(sys.executable, *argv)
        try:
            async with asyncio.timeout(60):
                while not (result := (await stub.Score(request)).results[0]).HasField("reward"):
                    assert "no process is attached" in result.message
                    await asyncio.sleep(0.05)
        finally:
            process.kill()
            await process.wait()
    assert result.reward == 0.25


async def test_no_tls_or_another_authority_is_refused(address: str, certs: Path, tokens: Path, tmp_path: Path) -> None:
    issue(tmp_path / "others", address)
    async with running(config_of(address, certs, tokens)) as hub:
        target = f"{address}:{hub.port}"
        health = health_pb2.HealthCheckRequest()
        async with (
            rpc.channel(target) as plain,
            rpc.channel(target, security=config_of(address, tmp_path / "others", tokens).security) as stranger,
            rpc.channel(target, security=config_of(address, certs, tokens).security) as channel,
        ):
            assert (await health_pb2_grpc.HealthStub(channel).Check(health, timeout=30)).status == 1  # needs no token
            for other in (plain, stranger):
                code = await refused(health_pb2_grpc.HealthStub(other).Check(health, timeout=30))
                assert code == grpc.StatusCode.UNAVAILABLE
        assert await https(address, hub.http_port, certs) == 401
        with pytest.raises(httpx.ConnectError):
            await https(address, hub.http_port, tmp_path / "others")


async def https(address: str, port: int, certs: Path, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    verify = client_context(f"{certs}/ca.pem")
    async with httpx.AsyncClient(verify=verify, headers=headers, trust_env=False) as client:
        return (await client.get(f"https://{address}:{port}/readyz")).status_code


async def test_new_certificates_and_tokens_are_taken_while_it_runs(address: str, certs: Path, tokens: Path) -> None:
    config = config_of(address, certs, tokens)
    async with running(config) as hub:
        ports = (hub.port, hub.http_port)
        before = await shown(address, ports)
        assert await https(address, hub.http_port, certs, "eye") == 200
        issue(certs, address)
        after = await shown(address, ports)
        assert before[0] == before[1] != after[0] == after[1]
        assert after[0] == content_of(Path(f"{certs / address}.pem"))
        assert await https(address, hub.http_port, certs, "eye") == 200

        written(Path(f"{certs / address}.pem"), "half of one")
        assert await shown(address, ports) == after

        written(tokens, TOKENS.replace("reader eye", "reader another"))
        issue(certs, address)
        assert await https(address, hub.http_port, certs, "eye") == 401
        assert await https(address, hub.http_port, certs, "another") == 200


def content_of(path: Path) -> str:
    return path.read_text().strip()


async def shown(address: str, ports: tuple[int, int]) -> list[str]:
    """The certificates that the ports show."""
    found = [await asyncio.to_thread(ssl.get_server_certificate, (address, port)) for port in ports]
    return [pem.strip() for pem in found]


async def test_a_caller_presents_a_replaced_token_at_once(tmp_path: Path) -> None:
    theirs, ours = written(tmp_path / "theirs", "environment mine old\n"), tmp_path / "ours"
    written(ours, "environment mine old\nreader eye\n")
    async with serving(Always(), credentials=Credentials(theirs)) as port:
        env = {"mine": {"target": f"127.0.0.1:{port}"}}
        config = Config.model_validate({"env": env, "reward": {"port": 0}, "security": {"credentials": str(ours)}})
        async with running(config) as hub:
            assert await problem(hub.http_port) == ""
            written(theirs, "environment mine new\n")
            assert "environment (bearer)" in await problem(hub.http_port)
            written(ours, "environment mine new\nreader eye\n")
            assert await problem(hub.http_port) == ""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


async def problem(port: int) -> str:
    """What the hub waits for."""
    async with httpx.AsyncClient(headers={"Authorization": "Bearer eye"}, trust_env=False) as client:
        return "".join((await client.get(f"http://127.0.0.1:{port}/readyz")).json().get("waits_for", []))


async def test_a_containers_health_check_asks_over_tls_with_a_token(address: str, certs: Path, tokens: Path) -> None:
    config = config_of(address, certs, tokens)
    local = config.reward.model_copy(update={"host": "127.0.0.1"})
    environ = {"HEADRACE_SECURITY__CREDENTIALS": str(tokens), "HEADRACE_SECURITY__TLS_CA": f"{certs}/ca.pem"}

    async def ready(port: int) -> str:
        """What the check says; nothing if the service is ready."""
        command = (sys.executable, str(READY), str(port))
        check = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.PIPE)
        said = (await check.communicate())[1].decode()
        assert (check.returncode == 0) == (said == "")
        return said

    async with running(config.model_copy(update={"env": {}, "reward": local})) as hub:
        assert await ready(hub.http_port) == ""
        written(tokens, TOKENS.replace("reader eye", ""))
        written(Path(f"{tokens}.other"), "reader eye\n")
        environ["HEADRACE_SECURITY__CREDENTIALS"] = f"{tokens}.other"
        assert "401" in await ready(hub.http_port)


async def test_a_service_on_loopback_asks_nobody_but_keeps_other_sites_out() -> None:
    async def ready() -> str | None:
        return None

    access = HttpAccess.of(Config(), "127.0.0.1")
    with contextlib.closing(bind("127.0.0.1", 0, "port")) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with serve_http(create_app("test", ready), sock, access), httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{url}/readyz")).status_code == 200
            assert (await client.get(f"{url}/readyz", headers={"Host": "evil.example"})).status_code == 403
            assert (await client.post(f"{url}/readyz", content="x")).status_code == 415


def test_a_service_beyond_loopback_refuses_to_start_unprotected(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("run: {id: x}\nreward: {host: 0.0.0.0}\n")
    command = [sys.executable, "-m", "headrace.cli", "reward", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 1
    assert done.stderr.startswith("error: reward.host 0.0.0.0: ")
    assert "security.insecure: true" in done.stderr
