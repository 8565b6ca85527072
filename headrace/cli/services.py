"""`headrace replay`, `reward`, `rollout`, `agents`, `trainer`: run one service as its own process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import typer

from headrace.base.errors import ConfigError, ReplayUnavailable, Restartable
from headrace.base.files import is_locked
from headrace.cli import common
from headrace.cli.common import ConfigOption, Overrides
from headrace.config import Config
from headrace.config.loading import examine
from headrace.launch import exposure, shell
from headrace.launch.entry_points import load_entry_point
from headrace.net import tracing
from headrace.net.service import EXIT_BUFFER_UNAVAILABLE, EXIT_INTERNAL_ERROR, ending_recorded
from headrace.run import history, start

_log = logging.getLogger("headrace.security")


def replay(config: ConfigOption, overrides: Overrides = None) -> None:
    """Run the replay buffer: its state machine in Redis, the scorer and the HTTP API."""
    _run("replay", config, overrides)


def reward(config: ConfigOption, overrides: Overrides = None) -> None:
    """Run the gRPC hub of reward environments."""
    _run("reward", config, overrides)


def rollout(config: ConfigOption, overrides: Overrides = None) -> None:
    """Run one generation replica: a vLLM engine. Start as many as you like, at any time."""
    _run("rollout", config, overrides)


def agents(config: ConfigOption, overrides: Overrides = None) -> None:
    """Run a runner of episodes, with the gateway that their programs call. Start as many as you like, at any time."""
    _run("agents", config, overrides)


def trainer(config: ConfigOption, overrides: Overrides = None) -> None:
    """Run the trainer; under torchrun, one of its ranks."""
    _run("trainer", config, overrides)


def _run(name: str, file: Path, overrides: Sequence[str] | None) -> None:
    try:
        with ending_recorded():
            _serve(name, file, overrides)
    except ReplayUnavailable as error:
        common.print_error(error)
        raise typer.Exit(EXIT_BUFFER_UNAVAILABLE) from error
    except Restartable as error:
        common.print_error(error)
        raise typer.Exit(EXIT_INTERNAL_ERROR) from error


def _serve(name: str, file: Path, overrides: Sequence[str] | None) -> None:
    shell.check()
    examined = examine(file, overrides or ())
    config = examined.config
    if config.run.id is None:
        raise ConfigError("run.id is not set; give run.id=NAME (`headrace up` makes one automatically)")
    common.log_lines()
    exposure.check(config, name)
    if config.security.credentials is None:
        _log.warning("security.credentials is not set: everybody who can reach this service may use it")
    service = load_entry_point("headrace.services", name, extra=name)
    leads = name == "trainer" and os.environ.get("RANK", "0") == "0"
    # `up` itself records how its run ends
    unsupervised = leads and not is_locked(config.run_folder / history.RUN_LOCK)
    with _record_end(config, file) if unsupervised else contextlib.nullcontext():
        if unsupervised:
            start.record(config.run_folder, config, examined.origin)
        with tracing.exporting(config.telemetry, name, config.run.id):
            service(config)


def _record_end(config: Config, file: Path) -> contextlib.AbstractContextManager[None]:
    from headrace.launch import runs  # the other services don't need it

    return runs.unsupervised(config, file)
