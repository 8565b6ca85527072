"""`headrace agents`: one runner with its gateway. It leases and runs episodes until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from urllib.parse import urlsplit

import aiohttp

from headrace.base.addresses import with_port
from headrace.base.errors import ConfigError
from headrace.base.http_client import open_session
from headrace.base.tls import CertificateFiles, client_context
from headrace.config import Config
from headrace.net.credentials import buffer_url, make_token_source
from headrace.net.http_access import HttpAccess, names_in
from headrace.net.replica_client import ROLE, ReplicaClient
from headrace.net.service import bind, create_app, hide_from_user, serve_http, serve_openly, stop_on_signals
from headrace.replay import ReplayClient

from .fleet import Fleet, RunClock
from .gateway import Gateway, build_app
from .program_starter import hub_programs
from .runner import EpisodeRunner

_log = logging.getLogger("headrace.agents")
_CONNECT_S = 10.0


def main(config: Config) -> None:
    """Run episodes until SIGTERM or SIGINT, then end their programs and return their leases. Raises `HeadraceError` for an error that the
    user must fix."""
    if not config.has_episodes:
        raise ConfigError("no environment has episodes, so there is nothing to run; set env.<name>.episodes to true")
    hide_from_user()
    asyncio.run(_serve(config))


async def _serve(config: Config) -> None:
    stop = stop_on_signals()
    agents, access = config.agents, HttpAccess.of(config, config.agents.host)
    async with contextlib.AsyncExitStack() as stack:
        sock = stack.enter_context(bind(agents.host, agents.port, "agents.port"))
        http = stack.enter_context(bind(agents.host, agents.http_port, "agents.http_port"))
        replay = await ReplayClient.connect(buffer_url(config, "agents"), config.run.id)
        stack.push_async_callback(replay.aclose)
        token = make_token_source(config, ROLE)
        fleet = Fleet(lambda url: ReplicaClient(url, token, config.security.tls_ca), RunClock())
        stack.push_async_callback(fleet.aclose)
        gateway = Gateway(
            config.policy.model_name,
            max_request_bytes=agents.max_request_bytes,
            max_parallel_calls=agents.max_parallel_calls,
            max_requests_per_s=agents.max_requests_per_s,
            peers_every_s=None if agents.advertised_url is None else config.rollout.heartbeat_s,
        )
        scheme = "http" if access.certificate is None else "https"
        host = socket.gethostname() if agents.host in ("0.0.0.0", "::") else agents.host
        own = f"{scheme}://{with_port(host, sock.getsockname()[1])}"
        pages = f"{scheme}://{with_port(host, http.getsockname()[1])}"
        info = {
            "name": gateway.name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "gateway": own,
            "url": pages,
            "slots": agents.slots,
        }
        programs = await stack.enter_async_context(hub_programs(config))
        runner = EpisodeRunner(config, replay, fleet, gateway, programs, agents.advertised_url or own, info)

        async def ready() -> str | None:
            return runner.problem()

        await stack.enter_async_context(serve_http(create_app("Headrace agents", ready), http, access))
        forward = forwarding(config, access.certificate)
        stack.push_async_callback(forward.close)
        await stack.enter_async_context(serve_openly(build_app(gateway, forward), sock, access.certificate))
        _log.info("gateway on %s, HTTP on %s", own, pages)
        await runner.run(stop)


def forwarding(config: Config, certificate: CertificateFiles | None) -> aiohttp.ClientSession:
    """Return the session for other gateways. If this gateway's `certificate` names the host of the common address, so do the others', and
    they are verified against that host; else each is verified against its own host."""
    # no timeout for answers: the other gateway has the clocks
    if certificate is None:
        return open_session(None, connect_s=_CONNECT_S)
    name = urlsplit(config.agents.advertised_url or "").hostname or ""
    shared = name if name in map(str.lower, names_in(certificate.chain)) else None
    return open_session(client_context(config.security.tls_ca), connect_s=_CONNECT_S, server_hostname=shared)
