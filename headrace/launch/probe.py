"""Probing a service: the question over HTTP, its answer, and how long a service may give none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from typing import Any

from headrace.base.addresses import replace_wildcard, with_port
from headrace.base.tls import client_context
from headrace.config import Config
from headrace.net.credentials import load_credentials

# The most that one poll adds to the silence of a service that did not answer.
LONGEST_PROBE_GAP_S = 10.0
# In place of a status: the service accepted the connection, but did not answer.
NO_ANSWER = 504


async def http_get(
    host: str, port: int, path: str, token: str, tls: ssl.SSLContext | None = None, timeout_s: float = 5.0
) -> tuple[int, str]:
    """GET over HTTP/1.0. Return (status, body). The status is 0 if nothing listens there, and `NO_ANSWER` if the listener is silent."""
    target = replace_wildcard(host)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(target, port, ssl=tls)
            with contextlib.closing(writer):
                head = (
                    f"GET {path} HTTP/1.0\r\nHost: {with_port(target, port)}\r\nAuthorization: Bearer {token}\r\n\r\n"
                )
                writer.write(head.encode())
                head, _, body = (await reader.read()).decode(errors="replace").partition("\r\n\r\n")
    except TimeoutError:
        return NO_ANSWER, f"no answer from {target}:{port} within {timeout_s:.0f} s"
    except OSError as error:
        return 0, f"no answer from {target}:{port} ({error})"
    words = head.split(maxsplit=2)
    return (int(words[1]) if len(words) > 1 and words[1].isdecimal() else 0), body


async def ask_ready(config: Config, host: str, port: int, timeout_s: float = 5.0) -> tuple[int, str]:
    """Return what `http_get` does for the `/readyz` of a service of the run, with a reader's token if there is one."""
    credentials = load_credentials(config)
    tokens = [] if credentials is None else credentials.tokens("reader")
    tls = client_context(config.security.tls_ca) if config.security.tls_cert is not None else None
    return await http_get(host, port, "/readyz", tokens[0] if tokens else "", tls, timeout_s)


def parse_json(text: str) -> Any:
    """Return the JSON value, or None for text that was cut off because its sender died."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def parse_reason(answer: str) -> str:
    """Return why a service is not ready, from the answer of its `/readyz`."""
    body = parse_json(answer)
    return str(body.get("reason") or "") if isinstance(body, dict) else ""


def patience(config: Config, environment: str | None = None, *, is_broken: bool = False) -> tuple[float, str]:
    """Return for how many seconds a service may answer nothing before it is restarted, and the key that decides it. An environment may be
    busy, and hold its process, until the time of its longest call is over: the hub has sent it nothing since, and waits for nothing. If its
    breaker is open, it has nothing to do."""
    limit = config.run.hang_timeout_s, "run.hang_timeout_s"
    if environment is None or is_broken:
        return limit
    env = config.env[environment]
    longest_s, key = (
        (config.longest_episode_s, "agents.episode_s and replay.group_deadline_s")
        if env.runs_episodes
        else (env.timeout_s, f"env.{environment}.timeout_s")
    )
    return max(limit, (longest_s + LONGEST_PROBE_GAP_S, key))
