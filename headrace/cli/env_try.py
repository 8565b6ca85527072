"""`headrace env try`: see what a model writes, and how an environment scores it, before any training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace.base.errors import ConfigError, ServiceError
from headrace.base.scratch import scratch_folder
from headrace.cli import evaluate, weights
from headrace.cli.common import OverridesOption, say
from headrace.cli.data import read_prompts
from headrace.cli.env_check import TargetArgument
from headrace.cli.samples import draw_group
from headrace.config import Config
from headrace.config.environments import EnvConfig
from headrace.env.kit.rescoring import rewards
from headrace.launch.entry_points import load_entry_point
from headrace.launch.pipeline import check
from headrace.launch.served_file import environment_at
from headrace.run.sample_files import SampleFiles
from headrace.run.samples import SampleGroup, by_group

# The environment's name in the configuration.
_NAME = "tried"


def try_(
    target: TargetArgument,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE.jsonl",
            help="Problems, one per line: `input` is the prompt, `output` the answer, and all other fields are for the environment. "
            "Other names: --set data.default.input_key=NAME and data.default.output_key=NAME.",
        ),
    ],
    model: Annotated[
        str, typer.Option(metavar="RUN[@STEP]|DIR|MODEL", help="The model that writes, as for headrace eval.")
    ],
    samples: Annotated[int, typer.Option("-n", min=1, help="Completions of each prompt.")] = 8,
    first: Annotated[int, typer.Option(min=1, help="Number of prompts, from the first line on.")] = 8,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="A YAML with the sampling and the sizes to use; by default the run's own."),
    ] = None,
    overrides: OverridesOption = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write them as an HTML page.")
    ] = None,
) -> None:
    """Sample a few completions of some prompts, and show their rewards, components and spread, and how many groups would teach nothing.

    Every service starts as for `headrace eval`, and stops at the end or on Ctrl-C.
    """
    found = weights.find(model)
    if page is not None and not page.absolute().parent.is_dir():
        raise ConfigError(f"--html {page}: the folder {page.absolute().parent} does not exist")
    environment = environment_at(target)
    with scratch_folder("headrace-prompts-") as folder:
        asked = folder / "prompts.jsonl"
        asked.write_text(_first(prompts, first), encoding="utf-8")
        if config is None and found.run is None:
            config = folder / "config.yaml"
            config.write_text("{}\n", encoding="utf-8")  # all defaults
        given, place = evaluate.configuration(found, config, overrides or ())
        with evaluate.new_folder(place, found) as own:
            made = evaluation(given, found, environment, asked, samples, overrides or (), own)
            check(made)
            try:
                read_prompts(made)  # before anything starts
            except ConfigError as error:
                raise ConfigError(str(error).replace(str(asked), str(prompts))) from error
            evaluate.ask(made, found)
    files = SampleFiles.of(made)
    groups = by_group(files.samples("val", 0))
    facts = [*summary(groups), *failures(files.read("val_failed", 0))]
    console = Console()
    for group in groups:
        console.print(draw_group(group, target, console.width))
    for fact in facts:
        say(console, fact)
    if page is not None:
        write = load_entry_point("headrace.tools", "groups-page", extra="trainer")
        write(page, f"{target} on what {found.name} writes", facts, groups)
    if not groups:
        raise ServiceError(f"no prompt got rewards; {made.run_folder} holds the logs")


def summary(groups: Sequence[SampleGroup]) -> Iterator[str]:
    """Yield the lines that sum up the rewards of these groups."""
    each = [[sample.reward for sample in group.samples if sample.reward is not None] for group in groups]
    found = rewards([group for group in each if group])
    if found is None:
        return
    yield (
        f"{len(groups)} prompts, {sum(map(len, each))} completions: mean reward {found.mean:.3f}, deviation {found.deviation:.3f}, "
        f"spread in a group {found.spread:.3f}"
    )
    flat = sum(group.spread == 0 for group in groups)
    yield f"{flat} of {len(groups)} groups ({found.flat:.0%}) would teach nothing: all their rewards are equal"
    truncated = [sample.truncated for group in groups for sample in group.samples]
    if any(truncated):
        yield f"{sum(truncated)} of {len(truncated)} completions were cut off (policy.generation.max_new_tokens)"


def failures(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each prompt that failed."""
    for record in records:
        yield f"{record['group']} failed: {record['reason']}"


def _first(prompts: Path, count: int) -> str:
    """Return the lines of a file of JSON lines up to its first `count` problems, which keep their line numbers. Raises `ConfigError` if it
    has no problems."""
    found, problems = [], 0
    try:
        # not `splitlines`: other characters that it splits at may occur in a JSON text
        with prompts.open(encoding="utf-8-sig") as file:
            for line in file:
                found.append(line)
                problems += bool(line.strip())
                if problems == count:
                    break
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--prompts {prompts}: can't be read ({error}); give a file of JSON lines") from error
    if not problems:
        raise ConfigError(f"--prompts {prompts} has no problems; give one per line, as JSON")
    return "".join(found)


def evaluation(
    given: Config,
    found: weights.NamedModel,
    environment: EnvConfig,
    prompts: Path,
    samples: int,
    overrides: Sequence[str],
    folder: Path,
) -> Config:
    """Return the configuration of a run in `folder` that asks these prompts, with this environment alone. Raises `ConfigError`."""
    sets = evaluate.data_sets([str(prompts)], given, overrides)
    alone = given.change(data={"train": [], "validation": []}).model_copy(update={"env": {_NAME: environment}})
    if found.run is not None:  # the run's own credentials have no token for this environment
        alone = alone.change(security={"credentials": None})
    made = evaluate.evaluation_config(
        alone,
        found,
        {name: {**(source or {}), "env_name": _NAME} for name, source in sets.items()},
        samples=samples,
        temperature=given.policy.generation.temperature,  # as in training
        folder=folder,
    )
    evaluate.refuse_ignored(overrides, alone, made)
    return made
