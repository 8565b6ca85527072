"""`headrace config show|check`: the configuration that a run would use, before anything starts."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.base.errors import ConfigError, MissingPackage, Problems, ServiceError
from headrace.base.model_name import TOKENIZER
from headrace.base.printable import printable
from headrace.cli.common import MOST_GIB, MOST_GPUS, ConfigArgument, Overrides
from headrace.config import Config
from headrace.config.in_yaml import without_password
from headrace.config.loading import Loaded, examine
from headrace.config.yaml_text import dump
from headrace.launch import device_plan, environment_processes, ports, preflight
from headrace.launch.entry_points import load_entry_point

app = typer.Typer(help="Show or check a configuration.", no_args_is_help=True)


@app.command()
def show(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Print the complete configuration as YAML, resolved from defaults, file, HEADRACE_* variables and overrides."""
    examined = examine(config, overrides or ())
    typer.echo(f"# {age_bound(examined.config)}")
    typer.echo(f"# {optimizer_steps(examined.config)}")
    if examined.nemo_rl:
        typer.echo(f"# {examined.nemo_rl.summary}")
    written = dump(examined.config)
    if (shown := without_password(written)) != written:
        typer.echo(
            "# *** is a password that the configuration itself holds; ${oc.env:NAME} would leave it in the environment"
        )
    typer.echo(shown, nl=False)


@app.command()
def check(
    config: ConfigArgument,
    overrides: Overrides = None,
    size: Annotated[
        float | None,
        typer.Option("--gpu-memory", min=1, max=MOST_GIB, help="Memory in GiB of a GPU of the machines for this run."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=1, max=MOST_GPUS, help="Number of GPUs for this run; without it, as many as it takes."
        ),
    ] = None,
    per_host: Annotated[
        int | None, typer.Option("--gpus-per-host", min=1, help="Number of GPUs in a host; without it, 8.")
    ] = None,
) -> None:
    """Check that the configuration is valid and that everything it names exists; else print all that is wrong and fail. Counts and measures
    the prompts. For a NeMo RL file, also print how it was translated. Without the trainer's packages, check the configuration alone.

    With --gpu-memory, also check that the run fits on such GPUs; without it, on those of this machine if it has any."""
    examined = preflight.examine(config, overrides or ())
    translated = [*examined.nemo_rl.lines()] if examined.nemo_rl else []
    with preflight.hiding(examined.config) as hide:
        problems, warnings, lines = Problems(), list[str](), list[str]()
        with problems.gathered():
            environment_processes.check(examined.config)
        with problems.gathered():
            environment_processes.check_loading(examined.config)
        with problems.gathered():
            warnings, lines = _check_data_and_models(examined)
            warnings += _check_memory(examined.config, size, gpus, per_host)
        try:
            problems.tell()
        except ConfigError:
            for line in translated:  # the translation itself succeeded
                typer.echo(line)
            raise
        for warning in [*warnings, *ports.list_busy(examined.config)]:
            typer.echo(f"warning: {printable(hide(warning))}", err=True)
        typer.echo(f"{config}: valid; {age_bound(examined.config)}; {optimizer_steps(examined.config)}")
        for line in (*lines, *environment_processes.describe(examined.config), *translated):
            typer.echo(hide(line))


def _check_memory(config: Config, size: float | None, gpus: int | None, per_host: int | None) -> list[str]:
    """Return warnings about the memory of the GPUs that the run takes. Raises `ServiceError` if it needs more than they have."""
    try:
        if size is not None:
            verdict = device_plan.compare(config, device_plan.assume(config, gpus, per_host or 8, int(size * 2**30)))
            if verdict.problem is not None:
                raise ServiceError(verdict.problem)
            return list(verdict.warnings)
        for option, given in (("--gpus", gpus), ("--gpus-per-host", per_host)):
            if given is not None:
                raise ConfigError(
                    f"{option} {given} says how many GPUs there are, but not their memory; give --gpu-memory too"
                )
        try:
            plan = device_plan.of(config)
        except ServiceError as error:
            return [f"on this machine: {error}. --gpu-memory checks the run for others"]
        return [] if plan is None else device_plan.fit(config, plan)[1]
    except MissingPackage:
        if size is not None:
            raise
        return []  # reported with the data and the model


def _check_data_and_models(examined: Loaded) -> tuple[list[str], list[str]]:
    """Return warnings and lines to print about the data and models that the configuration names. Raises `ConfigError`."""
    try:
        warnings = preflight.look(examined)
    except MissingPackage:
        lacking = "data, model and memory were not checked: pip install 'headrace[trainer]'"
        return list(examined.config.warnings), [lacking]
    if not TOKENIZER.is_here(*examined.config.tokenizer):
        return warnings, []
    count = load_entry_point("headrace.tools", "count-prompts", extra="trainer")
    lines, of_prompts = count(examined.config, lambda line: typer.echo(line, err=True))
    return warnings + of_prompts, lines


def age_bound(config: Config) -> str:
    """Describe in one line what the age policy guarantees."""
    algorithm = config.algorithm
    age, policy = algorithm.max_age, algorithm.asynchrony.staleness_policy
    ahead = f"at most {(algorithm.ahead_steps + 1) * algorithm.num_prompts_per_step} groups ahead of the trainer"
    bound = f"a trajectory trained at step t has no token older than weights t - {age}"
    if policy == "drop":
        return (
            f"drop: {bound}; {ahead}, trained as they become ready; a group that is over age by then is generated again"
        )
    if policy == "mask":
        return (
            f"mask: tokens older than weights t - {age} leave the policy loss of step t, and their trajectory stays; {ahead}, "
            "trained as they become ready; a trajectory without a younger token is generated again"
        )
    if age == 0:
        return f"strictly on-policy: step t trains on trajectories of weights t alone; {ahead}"
    return f"ordered: {bound}; {ahead}, none dropped"


def optimizer_steps(config: Config) -> str:
    """Describe in one line the optimizer steps of a trainer step."""
    algorithm = config.algorithm
    batch = f"{algorithm.num_prompts_per_step} x {algorithm.num_generations_per_prompt} trajectories"

    def steps(size: int, epochs: int) -> str:
        each = algorithm.batch_size // size
        passes = f" in each of {epochs} passes" if epochs > 1 else ""
        return f"{each} optimizer step{'s' if each > 1 else ''}{passes}"

    start = algorithm.first_policy_step
    line = f"{algorithm.name}: {batch} a step, {steps(config.policy_batch, algorithm.policy_epochs(start))}"
    if not algorithm.value_epochs:
        return line
    line += " of the policy"
    if start:
        line += f" from step {start} on"
    if not algorithm.adv_estimator.has_value_model:
        return f"{line}, no value model"
    return f"{line}, {steps(config.value_batch, algorithm.value_epochs)} of the value model"
