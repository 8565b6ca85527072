"""`headrace env check`: find an environment's faults before a run relies on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.base.addresses import target_is_local
from headrace.base.errors import ConfigError, ServiceError
from headrace.cli.common import cell, plain_table, say
from headrace.env import environment_file
from headrace.env.attachment import DialOptions
from headrace.env.kit import conformance
from headrace.env.kit.conformance import Finding, Verdict
from headrace.env.kit.example_samples import GoldenSample, read_samples
from headrace.launch.served_file import environment_at, served_file
from headrace.net import rpc
from headrace.net.credentials import Credentials

_STYLES: dict[Verdict, str] = {"right": "green", "note": "yellow", "wrong": "bold red", "skipped": "dim"}

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|FILE.py[:NAME]",
        help="The host:port of a served environment, in any language; or a file with a subclass of headrace.Environment, or a reward "
        "function.",
    ),
]


def check(
    target: TargetArgument,
    samples: Annotated[
        Path | None,
        typer.Option(
            "--samples",
            metavar="FILE.jsonl",
            help="Your samples and their expected results, one per line: completion, extra_env_info, prompt, reward, components, status.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Timeout of one call in seconds, like env.NAME.timeout_s.")
    ] = conformance.TIMEOUT_S,
    token_file: Annotated[Path | None, typer.Option(help="A file with a line `environment NAME TOKEN`.")] = None,
    name: Annotated[str, typer.Option(help="With --token-file: the NAME.")] = "",
    tls_ca: Annotated[str | None, typer.Option(help="PEM file of the authority that signed its certificate.")] = None,
    insecure: Annotated[bool, typer.Option(help="Connect to another machine without TLS.")] = False,
) -> None:
    """Call an environment in all the ways that a run does, and print what is right, what is wrong, and how to fix it.

    It scores 100 to 300 samples. Exits with 1 if anything is wrong.
    """
    golden = [] if samples is None else read_samples(samples)
    options = _options(target, token_file, name, tls_ca, insecure)
    findings = asyncio.run(_examine(target, golden, timeout, options))
    console = Console()
    console.print(table(findings))
    wrong = [each for each in findings if each.verdict == "wrong"]
    for each in wrong:
        say(console, f"to fix {each.check}: {each.remedy}")
    skipped = sum(each.verdict == "skipped" for each in findings)
    total = f"{len(wrong)} of {len(findings)} wrong" if wrong else "nothing is wrong"
    say(console, f"{target}: {total}" + (f", {skipped} skipped" if skipped else ""))
    raise typer.Exit(1 if wrong or skipped else 0)


def table(findings: Sequence[Finding]) -> Table:
    """Return a table with a row for each finding."""
    made = plain_table("verdict", "check", show_header=False)
    made.add_column("said", overflow="fold")
    for each in findings:
        made.add_row(cell(each.verdict, _STYLES[each.verdict]), cell(each.check), cell(each.said))
    return made


def _options(target: str, token_file: Path | None, name: str, tls_ca: str | None, insecure: bool) -> DialOptions:
    """Return how to dial the environment. Raises `ConfigError`."""
    if token_file is not None and not name:
        raise ConfigError(
            f"--token-file {token_file} without --name; give --name NAME to choose the line `environment NAME TOKEN`"
        )
    tls = tls_ca is not None or not (insecure or environment_file.is_file(target) or target_is_local(target))
    if token_file is None:
        return DialOptions(tls, tls_ca)
    token = Credentials(token_file).token(f"environment {name}")
    return DialOptions(tls, tls_ca, lambda: token)


async def _examine(
    target: str, samples: Sequence[GoldenSample], timeout_s: float, options: DialOptions
) -> list[Finding]:
    async with contextlib.AsyncExitStack() as stack:
        environment = environment_at(target)
        address, renew = environment.address, None
        if environment.is_started:
            served = await stack.enter_async_context(served_file(environment.target))
            address, renew = served.address, served.renew
        channel = await stack.enter_async_context(
            rpc.channel(str(address), security=options, token=options.token, proxied=True)
        )
        metadata = [] if options.token is None else [rpc.bearer(options.token())]
        try:
            return await conformance.examine(channel, samples, timeout_s, renew, metadata)
        except ServiceError as error:
            raise ServiceError(f"{target}: {error}") from error
