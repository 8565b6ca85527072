"""`headrace env calibrate`: hold the judges of a configuration against the scores that people gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headrace.base.errors import ConfigError
from headrace.cli.common import ConfigArgument, Overrides, cell, plain_table, say
from headrace.config.environments import LLMJudgeConfig
from headrace.config.loading import load
from headrace.launch.entry_points import load_entry_point
from headrace.launch.exposure import check


def calibrate(
    config: ConfigArgument,
    overrides: Overrides = None,
    count: Annotated[
        int, typer.Option("-n", min=0, help="Show this many of the completions on which judges and people differ most.")
    ] = 10,
) -> None:
    """Let the judges judge the completions that people have scored (env.NAME.calibration), and show how far they agree.

    Exits with 1 if the agreement is below env.NAME.min_agreement. Change the rubric or a judge, and ask again, before a run relies on it.
    """
    loaded = load(config, overrides or ())
    check(loaded, "reward")
    judges = {name: env for name, env in loaded.env.items() if isinstance(env, LLMJudgeConfig) and env.calibration}
    if not judges:
        raise ConfigError(
            f"{config}: no llm_judge has a calibration; give env.NAME.calibration a file of completions that people scored"
        )
    ask = load_entry_point("headrace.tools", "calibrate-judge", "reward")
    refused = False
    console = Console()
    for name, env in judges.items():
        found, refusal = ask(name, env)
        judged = found["judged"]
        console.print(table(name, found["measures"]))
        if found["order"]:
            first, turned = found["order"]["first_wins"], found["order"]["turned"]
            say(
                console,
                f"of two, the one shown first wins {first:.0%}, and in the other order {turned:.0%} of the verdicts are others",
            )
        failed = [each for each in judged if each["reward"] is None]
        say(console, f"{len(judged) - len(failed)} of {len(judged)} completions got a reward")
        for each in failed[:count]:
            say(console, f"{each['status']}: {each['message']}: {each['completion'][:80]}")
        if count and len(failed) < len(judged):
            console.print(differing(judged, count))
        if refusal is not None:
            refused = True
            say(console, f"env.{name}.calibration: {refusal}")
    raise typer.Exit(1 if refused else 0)


def table(name: str, measures: Mapping[str, Mapping[str, float | None]]) -> Table:
    """Return a table of how far the reward and each judge agree with people."""
    columns = list(dict.fromkeys(what for each in measures.values() for what in each))
    made = plain_table(name, *columns)
    for of, each in measures.items():
        numbers = ("-" if (number := each[what]) is None else f"{number:.3f}" for what in columns)
        made.add_row(cell(of), *numbers)
    return made


def differing(judged: Sequence[Mapping[str, Any]], count: int) -> Table:
    """Return a table of the completions on which judges and people differ most, with what the judges said."""
    made = plain_table("people", "judges")
    made.add_column("completion", overflow="ellipsis", no_wrap=True)
    made.add_column("reasons", overflow="fold")
    scored = [each for each in judged if each["reward"] is not None]
    for each in sorted(scored, key=lambda each: -abs(each["reward"] - each["label"]))[:count]:
        reasons = "; ".join(f"{judge}: {_different(said)}" for judge, said in each["reasons"].items())
        made.add_row(f"{each['label']:.2f}", f"{each['reward']:.2f}", cell(each["completion"][:200]), cell(reasons))
    return made


def _different(said: str | Sequence[str]) -> str:
    """Return the reason of a judge's verdict, or those of its verdicts that differ."""
    return said if isinstance(said, str) else " / ".join(dict.fromkeys(said))
