"""The commands in one place, and how a failure leaves the process: `error: …` and exit 1, or a traceback for what nobody foresaw."""

from __future__ import annotations

import sys
import traceback

import typer

from headrace.cli import acl, config, groups, model, options, replay_step, rewind, service, status, up
from headrace.cli.lifecycle import EXIT_FAULT, EXIT_MUST_BE_MENDED
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Reinforcement-learning post-training for language models as a pipeline of independent services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(name="up")(up.up)
app.command(name="status")(status.status)
app.command(name="rewind")(rewind.rewind)
service.add_to(app)
app.add_typer(config.app, name="config")
app.add_typer(groups.app, name="groups")
app.command(name="replay-step")(replay_step.replay_step)
app.command(name="model")(model.make)
app.command(name="acl")(acl.acl)


def main() -> None:
    """Run the command line. Exit codes: 1, a person must mend something; 70, a fault of ours, with its traceback."""
    try:
        app()
    except HeadraceError as error:
        options.say_error(error)
        sys.exit(EXIT_MUST_BE_MENDED)
    except Exception:  # noqa: BLE001 - the traceback is shown, and the code tells a supervisor that starting again may help
        traceback.print_exc()
        sys.exit(EXIT_FAULT)
