"""`headrace credentials`: tokens for a run with services on several machines, one file per service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.common import ConfigArgument, Overrides
from headrace.config import Config, load
from headrace.net.credentials import FILE, Credentials, complete, list_roles, write


def credentials(
    config: ConfigArgument,
    overrides: Overrides = None,
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where to write them.")] = ...,  # type: ignore[assignment]
) -> None:
    """Write DIR/credentials with all tokens of the run, and beside it a file for each service with the tokens that it needs.

    Existing tokens in DIR/credentials are kept. After changing that file, run this again and copy the files.
    """
    loaded = load(config, overrides or ())
    whole = directory / FILE
    complete(whole, list_roles(loaded, redis=True))
    known = Credentials(whole)
    for service, names in assign_roles(loaded).items():
        lines = [f"{name} {token}\n" for name in names for token in known.tokens(name)]
        write(directory / f"{service}.{FILE}", "".join(lines))
        typer.echo(f"{directory / f'{service}.{FILE}'}")


def assign_roles(config: Config) -> dict[str, list[str]]:
    """Return the roles whose tokens each service accepts or presents, and those of each environment in its own process."""
    known = list_roles(config, redis=False)
    served = [name for name in known if name.startswith("environment ")]
    runners, pullers = ([name for name in known if name == role] for role in ("agents", "rollout"))
    people = ["operator", "reader"]
    return {
        "replay": [*people, "scorer", "redis replay"],
        "reward": [*people, "scorer", *runners, *served],
        "rollout": [*people, *runners, *pullers, "redis rollout"],
        **({"agents": [*people, *runners, "redis agents"]} if runners else {}),
        "trainer": [*people, "redis trainer", "redis reader"],
        "page": people,
        **{name.replace(" ", "-").replace("/", "-"): [name] for name in served},
    }
