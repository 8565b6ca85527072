"""`headrace config show|check`: what a run would be given, before anything starts."""

from __future__ import annotations

import typer

from headrace.cli.options import ConfigArgument, Overrides
from headrace.config import Config, load
from headrace.config.text import dump

app = typer.Typer(help="Show or check a configuration.", no_args_is_help=True)


@app.command()
def show(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Print the resolved whole as YAML: defaults, file, HEADRACE_* variables and overrides."""
    loaded = load(config, overrides or ())
    typer.echo(f"# {age_bound(loaded)}")
    typer.echo(dump(loaded), nl=False)


@app.command()
def check(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Exit with 0 if the configuration can be used, else say what is wrong with it."""
    loaded = load(config, overrides or ())
    typer.echo(f"{config}: valid; {age_bound(loaded)}")


def age_bound(config: Config) -> str:
    """What the age policy promises, in one line."""
    age, groups = config.grpo.max_age, config.grpo.num_prompts_per_step
    ahead = (age + 1) * groups
    if age == 0:
        return f"strictly on-policy: step t trains on trajectories of weights t alone; at most {ahead} groups in flight"
    return (
        f"{config.grpo.async_grpo.staleness_policy}: a trajectory trained at step t has no token older than weights t - {age}; "
        f"at most {ahead} groups ahead of the trainer, none dropped"
    )
