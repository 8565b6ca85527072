"""Headrace's base package: the environment SDK, runs from Python, and what all services share (contract, configuration and client).

It imports no torch, no vLLM and no transformers. `import headrace` loads only the errors; each other name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ChatError, CodecError, ConfigError, HeadraceError, MissingPackage, ServiceError

if TYPE_CHECKING:
    from headrace.api.run import Run, train
    from headrace.env.attachment import Attachment
    from headrace.env.environment import Environment, Sample
    from headrace.env.episode import Episode
    from headrace.records.score import Score

__all__ = [
    "ChatError",
    "CodecError",
    "ConfigError",
    "Environment",
    "Episode",
    "HeadraceError",
    "MissingPackage",
    "Run",
    "Sample",
    "Score",
    "ServiceError",
    "attach",
    "serve",
    "train",
]

_MODULES = {
    "Environment": "env.environment",
    "Episode": "env.episode",
    "Run": "api.run",
    "Sample": "env.environment",
    "Score": "records.score",
    "train": "api.run",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """As `__all__`, so that completion and the reference have the names that are loaded late."""
    return sorted({*globals(), *__all__})


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
    """Serve `environment` over gRPC on `host:port` until SIGTERM or SIGINT. With port 0 a free port is chosen and logged.

    `token_file` has a line `environment NAME TOKEN`, the same as in the hub's credentials. Only callers that present this token are
    answered. `tls_cert` and `tls_key` are PEM files. All three files are read again when they change. A `host` beyond the loopback
    interface requires all three, unless `insecure` is true.

    Raises `ServiceError` if the port is busy, `ConfigError` if a file is missing or can't be used.
    """
    # only a process that serves loads gRPC
    from pathlib import Path

    from headrace.base.addresses import is_loopback
    from headrace.base.tls import CertificateFiles
    from headrace.env import server
    from headrace.net.credentials import Credentials

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError(f"tls_cert {tls_cert!r} with tls_key {tls_key!r}: give both, or neither")
    if not (insecure or is_loopback(host)) and (tls_cert is None or token_file is None):
        raise ConfigError(
            f"host {host!r}: an environment doesn't listen beyond the loopback interface without TLS and a token; give tls_cert and "
            "tls_key (`headrace certs`) and token_file (`headrace credentials`), or insecure=True on a network that you trust"
        )
    credentials = None if token_file is None else Credentials(Path(token_file))
    certificate = None if tls_cert is None or tls_key is None else CertificateFiles(Path(tls_cert), Path(tls_key))
    server.run(environment, host, port, credentials, certificate)


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
    """Score with `environment` for the run whose reward hub is at `hub` (host:port), under `name` (default: the environment's own). Return
    on SIGTERM, on SIGINT or, in a notebook, when the cell is interrupted. The run declares `env.NAME: {attached: true}`. This process
    listens on no port.

    The connection is restored automatically after the hub was away. `capacity` is the number of samples, and the number of episodes, that
    the environment works on at a time (default: what the environment states). An earlier attachment of this process as `name` is replaced.
    With `wait=False` the work continues in the background: the returned object has `stop()` and `wait()`.

    For a hub on this machine the credentials are found automatically. For a hub on another machine give `token`, or a file with a line
    `environment NAME TOKEN` (`headrace env token NAME` prints it), and `tls_ca`, the PEM file of the authority that signed the hub's
    certificate (default: the system's authorities). `insecure` does without TLS, on a network that you trust.

    Raises `ServiceError` if the hub refuses the environment, `ConfigError` for arguments that can't be used.
    """
    from headrace.env import attachment

    if capacity is not None and capacity < 1:
        raise ConfigError(f"capacity {capacity}: give 1 or more")
    name = name or environment.label
    options = attachment.dial_options(hub, name, token=token, token_file=token_file, tls_ca=tls_ca, insecure=insecure)
    attached = attachment.attach(hub, environment, name, capacity, options)
    if wait:
        attached.wait()
    return attached
