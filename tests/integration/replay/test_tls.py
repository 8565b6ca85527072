"""The buffer over TLS: certificates of a private authority, client certificates, and clear words for a wrong one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme
from redis.asyncio import Redis

from headrace.base.errors import ConfigError, ReplayDenied, ReplayUnavailable
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import hide_password, open_redis
from headrace_services.replay import library
from tests.support.buffer import enqueue, generate, healthy_replica, reserve
from tests.support.ports import free_port
from tests.support.redis_servers import RedisServer


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ca.pem`; `server` and `client` signed by it; `other-ca.pem` and a `stranger` that it signed."""
    folder = tmp_path_factory.mktemp("certificates")
    ours, other = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(folder / "ca.pem")
    other.cert_pem.write_to_path(folder / "other-ca.pem")
    for name, host, authority in (("server", "localhost", ours), ("client", "rollout", ours), ("stranger", "x", other)):
        issued = authority.issue_cert(host)
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    return folder


@pytest.fixture
async def tls(certificates: Path, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[RedisServer]:
    """A server that speaks TLS alone; it asks clients for a certificate if the test's parameter says `yes`."""
    port = free_port()
    server = RedisServer(
        tmp_path / "redis",
        port,
        *("--port", "0", "--tls-port", str(port), "--tls-auth-clients", getattr(request, "param", "no")),
        *("--tls-cert-file", str(certificates / "server.pem"), "--tls-key-file", str(certificates / "server.key")),
        *("--tls-ca-cert-file", str(certificates / "ca.pem")),
    )
    server.start()
    url = url_of(server, certificates, certificate="client")
    async with Redis.from_url(url) as client:
        await server.answers(client)
    yield server
    server.kill()


def url_of(
    server: RedisServer, folder: Path, ca: str = "ca.pem", certificate: str | None = None, host: str = "localhost"
) -> str:
    url = f"rediss://{host}:{server.port}/0?ssl_ca_certs={folder / ca}"
    if certificate is not None:
        url += f"&ssl_certfile={folder / certificate}.pem&ssl_keyfile={folder / certificate}.key"
    return url


async def goes_through(url: str, run_id: str, limits: Limits) -> None:
    """A group's whole life, wake-ups included."""
    async with open_redis(url) as redis:
        await library.load(redis)
        await ReplayClient(redis, run_id).open_run(limits)
    replay = await ReplayClient.connect(url, run_id)
    await enqueue(replay, range(2))
    await replay.wait_ready(0.1)
    await generate(replay, await healthy_replica(replay))
    batch = await reserve(replay, 0)
    assert len(await replay.read([t.key for t in batch.trajectories])) == 4
    await replay.aclose()


async def test_the_buffer_works_over_tls(tls: RedisServer, certificates: Path, run_id: str, limits: Limits) -> None:
    await goes_through(url_of(tls, certificates), run_id, limits)


@pytest.mark.parametrize("tls", ["yes"], indirect=True)
async def test_a_client_proves_itself_by_its_certificate(
    tls: RedisServer, certificates: Path, run_id: str, limits: Limits
) -> None:
    await goes_through(url_of(tls, certificates, certificate="client"), run_id, limits)
    for certificate in (None, "stranger"):
        with pytest.raises(ReplayDenied, match=r"TLS .*ssl_certfile"):
            await ReplayClient.connect(url_of(tls, certificates, certificate=certificate), run_id)


async def test_a_wrong_authority_is_said_at_once(tls: RedisServer, certificates: Path, run_id: str) -> None:
    with pytest.raises(ReplayDenied, match=r"refused.*ssl_ca_certs.*replay\.redis_url"):
        await ReplayClient.connect(url_of(tls, certificates, ca="other-ca.pem"), run_id)
    with pytest.raises(ReplayDenied, match="certificate is refused"):
        await ReplayClient.connect(f"rediss://localhost:{tls.port}/0", run_id)


async def test_a_name_that_is_not_in_the_certificate_is_said_at_once(
    tls: RedisServer, certificates: Path, run_id: str
) -> None:
    with pytest.raises(ReplayDenied, match=r"IP address mismatch.*certificate"):
        await ReplayClient.connect(url_of(tls, certificates, host="127.0.0.1"), run_id)


async def test_no_tls_where_the_server_wants_it_is_refused(tls: RedisServer, run_id: str) -> None:
    with pytest.raises(ReplayUnavailable, match=r"reached.*replay\.redis_url"):
        await ReplayClient.connect(f"redis://localhost:{tls.port}/0", run_id, timeout_s=0.2)


@pytest.mark.parametrize("key", ["ssl_ca_certs", "ssl_certfile"])
def test_a_certificate_file_that_is_not_there_is_named(key: str) -> None:
    with pytest.raises(ReplayDenied, match=rf"replay\.redis_url.*No such file.*{key}=/nowhere/x\.pem"):
        open_redis(f"rediss://localhost:1/0?{key}=/nowhere/x.pem")


@pytest.mark.parametrize("url", ["http://host", "redis://host/0?colour=blue", "redis://host:port", "sentinel://host:1"])
def test_an_address_that_can_not_be_used_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"replay\.redis_url .*redis://host"):
        open_redis(url)


def test_no_password_is_ever_shown() -> None:
    assert hide_password("rediss://me:secret@host:1/0?ssl_ca_certs=x") == "rediss://me:***@host:1/0"
    assert hide_password("redis://host:1/0") == "redis://host:1/0"
    with pytest.raises(ConfigError) as refused:
        open_redis("redis://me:secret@host:1/0?colour=blue")
    assert "secret" not in str(refused.value)
