"""`headrace replay|reward|rollout|trainer`: one service as a process of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import typer

from headrace.cli import plugins, runs
from headrace.cli.lifecycle import EXIT_TRY_AGAIN
from headrace.cli.options import ConfigOption, Overrides, say_error
from headrace.config import load
from headrace.errors import ConfigError, ReplayUnavailable

SERVICES = {
    "replay": "The replay buffer: its state machine in Redis, the scorer and the HTTP API.",
    "reward": "The gRPC hub of reward environments.",
    "rollout": "One generation replica: a vLLM engine. Start as many as you like, at any time.",
    "trainer": "The trainer; under torchrun, one of its ranks.",
}


def add_to(app: typer.Typer) -> None:
    for name, help_text in SERVICES.items():
        app.command(name=name, help=help_text)(_command(name))


def _command(name: str) -> Callable[..., None]:
    def command(config: ConfigOption, overrides: Overrides = None) -> None:
        loaded = load(config, overrides or ())
        if loaded.run.id is None:
            raise ConfigError("run.id is not set: give run.id=NAME (`headrace up` makes one by itself)")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        service = plugins.find("headrace.services", name, extra=name)
        if name == "trainer" and os.environ.get("RANK", "0") == "0":
            runs.keep(loaded, config)
        try:
            service(loaded)
        except ReplayUnavailable as error:
            say_error(error)
            raise typer.Exit(EXIT_TRY_AGAIN) from error

    return command
