"""Which hosts a URL names, and how others reach this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.addresses import find_proxy, own_address, parse_hosts
from headrace.base.errors import ConfigError, ServiceError
from headrace.config import load
from headrace_services.refit import sender
from headrace_services.refit.sender import host_towards
from headrace_services.trainer.distributed.ranks import gloo_problem

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic_tiny.yaml"


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("redis://10.0.0.1:6379/0", ["10.0.0.1"]),
        ("rediss://user:p%40ss@redis.internal/0?ssl_ca_certs=ca.pem", ["redis.internal"]),
        ("redis://[::1]:6379/0", ["[::1]"]),
        ("redis://[::1]/0", ["[::1]"]),
        ("sentinel://:secret@a:26379,b:26379/main/0", ["a", "b"]),
        ("unix:///run/redis.sock", []),
    ],
)
def test_a_buffers_url_names_its_hosts(url: str, hosts: list[str]) -> None:
    assert parse_hosts(url) == hosts


@pytest.mark.parametrize("key", ["weight_channel.host", "rollout.advertise_host"])
def test_what_others_reach_a_host_by_is_a_name_or_an_address(key: str) -> None:
    for good in ("trainer", "gpu-1.internal", "my_host", "10.0.0.1", "fd00::1", "fe80::1%eth0"):
        load(EXAMPLE, [f'{key}="{good}"'], {})
    for bad in ("", "a b", "0.0.0.0", "::", "10.0.0.1:29500", "gpu-1:29500", "http://10.0.0.1", "[fd00::1]"):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            load(EXAMPLE, [f'{key}="{bad}"'], {})


def test_where_the_buffer_is_on_this_machine_so_are_the_replicas() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert host_towards("redis://127.0.0.1:6390/0") == host_towards("unix:///run/redis.sock") == "127.0.0.1"
    assert host_towards("redis://[::1]:6390/0") == "::1"


def test_a_name_that_leads_back_to_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "own_address", lambda host: {"redis.internal": "10.0.0.7"}.get(host, "127.0.1.1"))
    assert host_towards("rediss://redis.internal:6379/0") == "10.0.0.7"
    with pytest.raises(ServiceError, match=r"^weight_channel\.host is null.*gpu-1 .*127\.0\.1\.1"):
        host_towards("rediss://gpu-1:6379/0")


def test_a_name_that_is_nowhere_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ServiceError, match=r"weight_channel\.host is null.*no\.invalid"):
        host_towards("redis://no.invalid:6379/0")


TWO_MACHINES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("environ", "address", "said"),
    [
        (TWO_MACHINES, "127.0.1.1", "name gpu-1 is 127.0.1.1 in /etc/hosts"),
        (TWO_MACHINES, None, "name gpu-1 is nothing in /etc/hosts"),
        (TWO_MACHINES, "10.0.0.7", None),
        (TWO_MACHINES | {"GLOO_SOCKET_IFNAME": "eth0"}, "127.0.1.1", None),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, "127.0.1.1", None),
        ({}, "127.0.1.1", None),
    ],
)
def test_ranks_on_several_machines_need_a_name_that_leads_to_this_one(
    environ: dict[str, str], address: str | None, said: str | None
) -> None:
    problem = gloo_problem(environ, "gpu-1", address)
    assert (problem is None) == (said is None)
    assert said is None or (said in str(problem) and "GLOO_SOCKET_IFNAME" in str(problem))


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({"https_proxy": "http://proxy:3128", "ALL_PROXY": "http://other"}, "https://judge/v1", "http://proxy:3128"),
        ({"https_proxy": "http://proxy:3128", "ALL_PROXY": "http://other"}, "http://judge/v1", "http://other"),
        ({"HTTP_PROXY": "proxy:3128"}, "http://judge/v1", "http://proxy:3128"),
        ({"all_proxy": "http://proxy", "no_proxy": "judge"}, "http://judge/v1", None),
        ({"all_proxy": "http://proxy"}, "http://127.0.0.1:8000/v1", None),
        ({}, "https://judge/v1", None),
    ],
)
def test_a_request_goes_through_the_proxy_that_the_environment_names(
    variables: dict[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_proxy(url) == proxy


def test_a_proxy_that_does_not_speak_http_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://user:secret@proxy:1080")
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"all_proxy .*socks5") as error:
        find_proxy("http://judge/v1")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "proxy", ["http://user:secret@[bad", "http://user:secret@:80", "http://user:secret@proxy:99999", "http://"]
)
def test_a_proxy_without_host_or_port_is_refused_without_its_password(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(ConfigError, match="http_proxy") as refused:
        find_proxy("http://judge/v1")
    assert "secret" not in str(refused.value)
