"""`headrace data show`: the first prompts of a run, as the model will see them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from headrace.base.errors import ConfigError
from headrace.base.printable import printable
from headrace.cli.common import WIDTH, ConfigArgument, Overrides, cell, plain_table, say
from headrace.config import Config, load
from headrace.launch.entry_points import load_entry_point
from headrace.records.trajectory import Group
from headrace.run.token_texts import TokenTexts

app = typer.Typer(help="Show a run's prompts as the model will see them.", no_args_is_help=True)


@app.callback()
def prompts() -> None:
    """Show a run's prompts as the model will see them."""


@app.command()
def show(
    config: ConfigArgument,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("-n", min=1, help="Number of prompts.")] = 3,
    split: Annotated[
        Literal["train", "validation"], typer.Option("--split", help="Training or validation prompts.")
    ] = "train",
    tokens: Annotated[bool, typer.Option("--tokens", help="Print each token on its own line.")] = False,
) -> None:
    """Print the first prompts in the order of the run, as the model will see them, and what the environment gets with each.

    Nothing is started. Every data set is read, so a prompt or a line of a file that can't be used is reported as in a run.
    """
    loaded = load(config, overrides or ())
    tokenizer, found = read_prompts(loaded)
    groups: list[Group] = found.train(range(min(count, found.total))) if split == "train" else found.validation(0)
    if not groups:
        raise ConfigError(f"{config}: data.{split} has no prompts to show; name a data set there")
    console = Console(width=WIDTH)
    for group in groups[:count]:
        _show(console, group, tokenizer, tokens=tokens)
    for line in found.counts.lines(loaded):
        say(console, line)


def read_prompts(config: Config) -> tuple[Any, Any]:
    """Return the tokenizer and the prompts of a run. Raises `ConfigError` if either can't be loaded, or a prompt can't be used."""
    tokenizer = load_entry_point("headrace.tools", "tokenizer", extra="trainer")(config)
    return tokenizer, load_entry_point("headrace.tools", "prompts", extra="trainer")(config, tokenizer)


def _show(console: Console, group: Group, tokenizer: Any, *, tokens: bool) -> None:
    ids = group.prompt_token_ids.tolist()
    say(
        console,
        f"── {group.order}: {group.id}, {group.task_name}, scored by {group.env_name}, {len(ids)} tokens, "
        f"at most {group.sampling.max_new_tokens} to answer",
    )
    if tokens:
        table = plain_table("place", "id", "token", header_style="dim")
        for place, (token, text) in enumerate(zip(ids, TokenTexts(tokenizer)(ids), strict=True)):
            table.add_row(str(place), str(token), cell(text))
        console.print(table)
    else:
        say(console, str(tokenizer.decode(ids)), keep="\n\t")
    typer.echo(f"environment: {printable(json.dumps(group.extra_env_info, ensure_ascii=False))}\n")
