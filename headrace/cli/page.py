"""`headrace page`: print the address of a run's page of curves, with a code that signs a browser in."""

from __future__ import annotations

import typer

from headrace.base.addresses import reached, with_port
from headrace.base.errors import ConfigError
from headrace.cli.common import RunOption
from headrace.config import Config
from headrace.launch import runs
from headrace.net.http_access import new_code


def page(run: RunOption) -> None:
    """Print the address of the run's curves. It signs one browser in, once; addresses printed earlier stop working."""
    config = runs.find(run)
    if not config.trainer.port:
        raise ConfigError(f"--run {run}: trainer.port is 0, so only the trainer's log has its port; set trainer.port")
    typer.echo(address(config))


def address(config: Config) -> str:
    """Return the URL of the trainer's page on this machine, with a new code. Raises `ConfigError`."""
    return f"{url(config, config.trainer.host, config.trainer.port)}/#code={new_code(config.run_folder)}"


def url(config: Config, host: str, port: int) -> str:
    """Return the URL of a service's pages on this machine."""
    scheme = "http" if config.security.tls_cert is None else "https"
    return f"{scheme}://{with_port(reached(host), port)}"
