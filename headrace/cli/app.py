"""The `headrace` command: its subcommands, and the exit code of a failure.

A command is imported only when it is called: a service that `headrace up` starts needs none of the others.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.base.errors import HeadraceError, StoppedByAlarm
from headrace.cli.commands import SECTIONS
from headrace.cli.common import App, print_error
from headrace.launch.shell import open_standard_streams
from headrace.net.service import EXIT_ALARM, EXIT_INTERNAL_ERROR, EXIT_USER_ERROR, importing

_PLACES = {name: (section, place) for section, places in SECTIONS.items() for name, place in places.items()}


class _Imported(Mapping[str, Any]):
    """The commands by name, each imported when it is first looked up."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)


@functools.cache
def _command(name: str) -> Any:
    section, place = _PLACES[name]
    module, _, attribute = place.partition(":")
    with importing():
        found = getattr(import_module(f"headrace.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        command: Any = typer.main.get_group(found)
    else:
        alone = App(add_completion=False)
        alone.command()(found)
        command = typer.main.get_command(alone)
    command.name, command.rich_help_panel = name, section
    _unwrap(command)
    return command


def _unwrap(command: Any) -> None:
    """Make each paragraph of the help one line, which a terminal breaks at its own width, and the first what lists of commands say."""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help or "")
    command.short_help = command.help.partition("\n")[0]  # or else lists of commands have its first words
    for inner in getattr(command, "commands", {}).values():
        _unwrap(inner)


class _Commands(TyperGroup):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.commands = _Imported()  # type: ignore[assignment]  # it is only read


app = typer.Typer(
    name="headrace",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {importlib.metadata.version('headrace')}")
        raise typer.Exit


@app.callback()
def headrace(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training for language models as a pipeline of independent services."""
    # Threads that wait for each other must not occupy cores that other processes need. torch reads this when it is imported. With
    # active waiting, a training step with two threads on two busy cores took four times the CPU time of one thread.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main() -> None:
    """Run the command line. Exits with 1 for an error that the user must fix, with 3 if an alarm ended the run, and with 70 and a traceback
    for an unexpected error."""
    open_standard_streams()
    try:
        app()
    except HeadraceError as error:
        print_error(error)
        sys.exit(EXIT_ALARM if isinstance(error, StoppedByAlarm) else EXIT_USER_ERROR)
    except Exception:  # noqa: BLE001 - the traceback is printed, and the exit code lets a supervisor restart the service
        traceback.print_exc()
        sys.exit(EXIT_INTERNAL_ERROR)


def run() -> None:
    """`main`, as the life of a process. What an interpreter frees as it shuts down goes with its process anyway: for that alone, a command
    would take a sixth of a second, and a trainer more than one."""
    try:
        main()
        code: Any = 0
    except SystemExit as left:
        code = left.code
    if isinstance(code, int):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter does
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):  # the interpreter says what it can't write
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None: the shell has closed it
                stream.flush()
            os._exit(code)
    sys.exit(code)
