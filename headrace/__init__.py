"""Headrace's base package: the environment SDK, and the contract, configuration and client that all services share.

It imports no torch, no vLLM and no transformers; importing `headrace` itself loads only the environment SDK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.environment import Environment, Sample
from headrace.episode import Episode
from headrace.errors import ChatError
from headrace.trajectory import Score

if TYPE_CHECKING:
    from headrace.attachment import Attachment

__all__ = ["ChatError", "Environment", "Episode", "Sample", "Score", "attach", "serve"]


def serve(
    environment: Environment,
    port: int,
    host: str = "127.0.0.1",
    *,
    token_file: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    insecure: bool = False,
) -> None:
    """Serve `environment` over gRPC on `host:port` until SIGTERM or SIGINT. Port 0 takes a free port and logs it.

    `token_file` has a line `environment NAME TOKEN`, the same as the hub's credentials: only who presents that token is answered.
    `tls_cert` and `tls_key` are PEM files. All are read again when they change. A `host` beyond the loopback interface needs the three of
    them, unless `insecure`.

    Raises `ServiceError` if the port is busy, `ConfigError` for files that are missing or can't be used.
    """
    # gRPC is loaded only by a process that serves
    from pathlib import Path

    from headrace import environment_server
    from headrace.addresses import is_loopback
    from headrace.credentials import Credentials
    from headrace.errors import ConfigError
    from headrace.tls import CertificateFiles

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError(f"tls_cert {tls_cert!r} with tls_key {tls_key!r}: give both, or neither")
    if not (insecure or is_loopback(host)) and (tls_cert is None or token_file is None):
        raise ConfigError(
            f"host {host!r}: an environment doesn't listen beyond the loopback interface without TLS and a token; give tls_cert and "
            "tls_key (`headrace certs`) and token_file (`headrace credentials`), or insecure=True in a network that you trust"
        )
    credentials = None if token_file is None else Credentials(Path(token_file))
    certificate = None if tls_cert is None or tls_key is None else CertificateFiles(Path(tls_cert), Path(tls_key))
    environment_server.run(environment, host, port, credentials, certificate)


def attach(
    hub: str,
    environment: Environment,
    name: str | None = None,
    *,
    capacity: int | None = None,
    token: str | None = None,
    token_file: str | None = None,
    tls_ca: str | None = None,
    insecure: bool = False,
    wait: bool = True,
) -> Attachment:
    """Score with `environment` for the run whose reward hub is at `hub` (host:port), under `name` (default: its own), until SIGTERM, SIGINT
    or, in a notebook, the interruption of the cell. The run declares `env.NAME: {attached: true}`. Nothing listens here.

    It comes back by itself when the hub was away. `capacity` is how many samples, and how many episodes, it may be at work on at a time
    (default: what the environment says). What this process has attached as `name` before is replaced. With `wait=False` it goes on in the
    background: the returned object has `stop()` and `wait()`.

    For a hub on this machine the credentials are found. For another give `token`, or a file with a line `environment NAME TOKEN`
    (`headrace env token NAME` prints it), and `tls_ca`, the PEM file of the authority that signed the hub's certificate (default: the
    system's); `insecure` goes without TLS, in a network that you trust.

    Raises `ServiceError` if the hub refuses it, `ConfigError` for arguments that can't be used.
    """
    from headrace import attachment
    from headrace.errors import ConfigError

    if capacity is not None and capacity < 1:
        raise ConfigError(f"capacity {capacity}: give 1 or more")
    name = name or environment.label
    options = attachment.dial_options(hub, name, token=token, token_file=token_file, tls_ca=tls_ca, insecure=insecure)
    attached = attachment.attach(hub, environment, name, capacity, options)
    if wait:
        attached.wait()
    return attached
