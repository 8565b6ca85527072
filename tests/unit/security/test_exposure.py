"""Nothing listens or connects beyond the loopback interface without TLS and credentials, unless it is said that it may."""

from __future__ import annotations

from typing import Any

import pytest

import headrace
from headrace.base.addresses import is_loopback, replace_wildcard, target_is_local, with_port
from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace.launch.exposure import check

FILES = {"tls_cert": "c.pem", "tls_key": "c.key", "tls_ca": "ca.pem", "credentials": "credentials"}
TLS_ALONE = {key: FILES[key] for key in ("tls_cert", "tls_key", "tls_ca")}
MINE = {"mine": {"target": "env.internal:50400"}}


def config_of(security: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate({"security": security, **sections})


EXPOSED = [
    ("replay", {"replay": {"host": "0.0.0.0"}}, "replay.host 0.0.0.0", FILES),
    ("reward", {"reward": {"host": "::"}}, "reward.host ::", FILES),
    ("rollout", {"rollout": {"host": "10.0.0.1"}}, "rollout.host 10.0.0.1", FILES),
    ("trainer", {"trainer": {"host": "trainer.internal"}}, "trainer.host trainer.internal", FILES),
    ("replay", {"reward": {"address": "hub:50390"}}, "reward.address hub:50390", FILES),
    ("replay", {"reward": {"host": "10.0.0.1"}}, "reward.host 10.0.0.1", FILES),
    ("reward", {"env": MINE}, "env.mine.target env.internal:50400", FILES),
]


@pytest.mark.parametrize(("service", "sections", "named", "enough"), EXPOSED)
def test_what_listens_and_what_is_called_beyond_loopback_needs_both(
    service: str, sections: dict[str, Any], named: str, enough: dict[str, Any]
) -> None:
    for security in ({}, TLS_ALONE, {"credentials": "credentials"}):
        with pytest.raises(ConfigError) as refused:
            check(config_of(security, **sections), service)
        said = str(refused.value)
        assert said.startswith(f"{named}: ")
        assert "`headrace certs`" in said
        assert "`headrace credentials`" in said
        assert "security.insecure: true" in said
    check(config_of(enough, **sections), service)
    check(config_of({"insecure": True}, **sections), service)


@pytest.mark.parametrize("service", ["replay", "reward", "rollout", "trainer"])
def test_loopback_needs_nothing(service: str) -> None:
    check(config_of({}, env={"mine": {"target": "[::1]:50400"}}), service)
    check(config_of({}, env={"mine": {"target": "unix:/run/mine"}}, replay={"redis_url": "unix:///run/redis"}), service)


@pytest.mark.parametrize("service", ["replay", "rollout", "trainer"])
@pytest.mark.parametrize(
    ("url", "missing"),
    [
        ("redis://redis:6379/0", "without TLS"),
        ("redis://me:secret@redis:6379/0", "without TLS"),
        ("rediss://redis:6379/0", "without a login"),
        ("sentinel://127.0.0.1:1,far:2/S?ssl=false", "without TLS"),
        ("sentinel://127.0.0.1:1,far:2/S?ssl=true", "without a login"),
    ],
)
def test_the_buffers_server_is_called_over_tls_with_a_login(service: str, url: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"replay\.redis_url .*{missing}") as refused:
        check(config_of({}, replay={"redis_url": url}), service)
    assert "secret" not in str(refused.value)
    check(config_of({"insecure": True}, replay={"redis_url": url}), service)


@pytest.mark.parametrize(
    "url", ["rediss://me:x@redis/0", "rediss://redis/0?ssl_certfile=c", "sentinel://me:x@far:1/S?ssl=true"]
)
def test_a_server_with_tls_and_a_login_may_be_anywhere(url: str) -> None:
    check(config_of({}, replay={"redis_url": url}), "trainer")


def test_the_embedded_server_speaks_no_tls() -> None:
    with pytest.raises(ConfigError, match=r"replay\.redis_host 0\.0\.0\.0.*TLS"):
        check(config_of(FILES, replay={"redis_host": "0.0.0.0"}), "replay")


def test_an_environment_of_the_users_own_is_bound_alike() -> None:
    with pytest.raises(ConfigError, match=r"host '0\.0\.0\.0'.*insecure=True"):
        headrace.serve(headrace.Environment(), 50400, "0.0.0.0")
    with pytest.raises(ConfigError, match=r"host '0\.0\.0\.0'"):
        headrace.serve(headrace.Environment(), 50400, "0.0.0.0", token_file="x")
    with pytest.raises(ConfigError, match="give both, or neither"):
        headrace.serve(headrace.Environment(), 50400, tls_cert="x")


def test_certificate_and_key_go_together() -> None:
    with pytest.raises(ValueError, match="give both, or neither"):
        config_of({"tls_cert": "c.pem"})


def test_what_is_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")] == [True] * 5
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "redis", "localhost.evil.com", "")] == [
        False
    ] * 6
    assert [target_is_local(t) for t in ("127.0.0.1:1", "[::1]:1", "unix:x", "dns:///localhost:1")] == [True] * 4
    assert [target_is_local(t) for t in ("redis:1", "dns:///redis:1", "10.0.0.1:1", "ipv4:10.0.0.1:1")] == [False] * 4


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:1"),
        ("0.0.0.0", "127.0.0.1:1"),
        ("::", "[::1]:1"),
        ("fd00::2", "[fd00::2]:1"),
        ("a.b", "a.b:1"),
    ],
)
def test_where_a_service_is_reached_on_its_machine(host: str, address: str) -> None:
    assert with_port(replace_wildcard(host), 1) == address
