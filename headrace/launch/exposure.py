"""Checks that a service has TLS and credentials before it listens or connects beyond the loopback interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from headrace.base.addresses import is_loopback, parse_hosts, target_is_local
from headrace.base.errors import ConfigError
from headrace.config.environments import JudgeConfig, LLMJudgeConfig

if TYPE_CHECKING:
    from headrace.config import Config

_REMEDY = (
    "give security.tls_cert and security.tls_key (`headrace certs`) and security.credentials (`headrace credentials`), or "
    "security.insecure: true to do without on a network that you trust"
)


def check(config: Config, service: str) -> None:
    """Refuse to start `service` if it would listen or connect beyond the loopback interface without TLS and credentials.

    Raises `ConfigError` naming key, value and remedy. The weight channel is not checked: neither torch nor vLLM encrypts it.
    """
    if not config.security.insecure:
        for problem in _problems(config, service):
            raise ConfigError(problem)


def _problems(config: Config, service: str) -> Iterator[str]:
    security = config.security
    guarded = security.tls_cert is not None and security.credentials is not None
    host: str = getattr(config, service).host
    if not is_loopback(host) and not guarded:
        yield f"{service}.host {host}: a service doesn't listen beyond the loopback interface without TLS and credentials; {_REMEDY}"
    if service in ("replay", "agents"):  # they call the hub
        if config.reward.address is not None:
            for address in config.reward.addresses:
                if not target_is_local(address):
                    yield from _check_dialled(config, "reward.address", address)
        elif not is_loopback(config.reward.host):
            yield from _check_dialled(config, "reward.host", config.reward.host)
    if service == "reward":
        for name, env in config.env.items():
            if env.address is not None and not target_is_local(env.address):
                yield from _check_dialled(config, f"env.{name}.target", env.address)
            for place, judge in enumerate(env.judges if isinstance(env, LLMJudgeConfig) else []):
                yield from _check_judge(f"env.{name}.judges.{place}.base_url", judge)
    elif service != "page":  # it reads files alone
        yield from _redis(config, service)


def _check_dialled(config: Config, key: str, value: str) -> Iterator[str]:
    security = config.security
    if not security.tls or security.credentials is None:
        yield (
            f"{key} {value}: nothing is sent beyond the loopback interface without TLS and credentials; give security.tls_ca "
            "(`headrace certs`) and security.credentials (`headrace credentials`), or security.insecure: true to do without on a network "
            "that you trust"
        )


def _check_judge(key: str, judge: JudgeConfig) -> Iterator[str]:
    url = urlsplit(judge.base_url)
    if is_loopback(url.hostname or "") or (url.scheme == "https" and judge.api_key_file is not None):
        return
    yield (
        f"{key} {judge.base_url}: no completion is sent beyond the loopback interface without TLS and a key; give an https address and "
        "api_key_file, or security.insecure: true to do without on a network that you trust"
    )


def _redis(config: Config, service: str) -> Iterator[str]:
    url, credentials = config.replay.redis_url, config.security.credentials
    if url is None:
        if not is_loopback(config.replay.redis_host):
            yield (
                f"replay.redis_host {config.replay.redis_host}: the embedded server has no TLS, so it listens only on the loopback "
                "interface; give a server with TLS (replay.redis_url: rediss://…), or security.insecure: true to do without on a "
                "network that you trust"
            )
        return
    if all(map(is_loopback, parse_hosts(url))):
        return
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    tls = parts.scheme == "rediss" or options.get("ssl", [""])[0].lower() == "true"
    known = "@" in parts.netloc or credentials is not None or "ssl_certfile" in options
    if not tls or not known:
        from headrace.replay.connection import hide_password

        missing = "TLS" if not tls else "a login"
        yield (
            f"replay.redis_url {hide_password(url)}: without {missing} nothing is sent beyond the loopback interface; give "
            f"rediss://…?ssl_ca_certs=FILE and the password of RUN-{service} in security.credentials (`headrace acl`), or "
            "security.insecure: true to do without on a network that you trust"
        )
