"""`headrace eval`: evaluate a model on data sets, in the pipeline that trained it, with the same sampling, environments and retries."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from headrace.base.addresses import LOOPBACK
from headrace.base.errors import ConfigError, ServiceError
from headrace.base.files import atomic_write
from headrace.base.printable import printable
from headrace.cli import weights
from headrace.cli.common import WIDTH, OverridesOption, cell, check_engine, plain_table, say
from headrace.cli.display import RunConsole, open_display
from headrace.cli.weights import NamedModel
from headrace.config import Config, load
from headrace.config.compare import diff
from headrace.config.data import OWN, DataSourceConfig, HubName
from headrace.config.explain import explain
from headrace.launch import device_plan, runs, shell
from headrace.launch.pipeline import Pipeline, StoppedBySignal, check, settle
from headrace.run.evaluation import THRESHOLD, DataSetReport, report
from headrace.run.sample_files import SampleFiles

FOLDER = "evals"  # in the run's folder
# keys that a data set on the command line inherits from those of the run
_SHARED = (
    "env_name",
    "input_key",
    "output_key",
    "info_keys",
    "prompt_file",
    "system_prompt",
    "system_prompt_file",
    "processor",
)
_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]|DIR|MODEL",
            help="A run and one of its checkpoints: `latest` (the default), `best`, a number, or 0 for the initial model. Or, with "
            "--config, a model's directory or its name on the Hugging Face Hub.",
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA]…",
            help="`validation` (the default) and `train` of the run, JSONL and Parquet files, folders, data sets on the Hugging Face Hub "
            "(gsm8k, owner/name).",
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Completions of each prompt.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 is greedy; by default policy.generation.val_temperature of the run."),
    ] = None,
    threshold: Annotated[float, typer.Option(help="The lowest reward with which a completion passes.")] = THRESHOLD,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="The YAML with the environments and the sampling to use; by default the run's own."
        ),
    ] = None,
    overrides: OverridesOption = None,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results to FILE.")
    ] = None,
) -> None:
    """Evaluate a model: pass@k, rewards and lengths on data sets, scored by the run's own environments.

    Every service starts as for a run, with its own folder under the run's `evals/`, and stops at the end or on Ctrl-C.
    """
    check_engine("eval")
    shell.check()
    found = weights.find(model)
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"--json {output}: the folder {output.absolute().parent} does not exist")
    asked, place = configuration(found, config, overrides or ())
    named = data_sets(data or [OWN[0]], asked, overrides or ())
    with new_folder(place, found) as folder:
        evaluation = evaluation_config(asked, found, named, samples=samples, temperature=temperature, folder=folder)
        refuse_ignored(overrides or (), asked, evaluation)
        check(evaluation)
        ask(evaluation, found)
    files = SampleFiles.of(evaluation)
    reports = report(files.read("val", 0), files.read("val_failed", 0), threshold)
    results = {
        "model": found.name,
        "samples": samples,
        "temperature": validation_temperature(evaluation),
        "threshold": threshold,
        "folder": str(evaluation.run_folder),
        "data_sets": {name: dataclasses.asdict(each) for name, each in reports.items()},
    }
    if output is not None:
        _write(output, results)
    Console(width=WIDTH).print(table(found.name, reports))
    typer.echo(f"completions: {files.path('val', 0)}")
    for line in failures(reports):
        typer.echo(line, err=True)
    empty = [name for name, each in reports.items() if not each.evaluated]
    if empty or not reports:
        raise ServiceError(
            f"no prompt of {', '.join(empty) or 'any data set'} was evaluated; the logs are in {evaluation.run_folder}"
        )


def configuration(found: NamedModel, given: Path | None, overrides: Sequence[str]) -> tuple[Config, Path]:
    """Return the configuration of the evaluation, and the parent of its folder."""
    if found.run is not None:
        folder = found.run.config.run_folder
        asked = load(given, overrides) if given is not None else runs.load_saved(folder / runs.SAVED, overrides)
        return asked, folder / FOLDER
    if given is None:
        raise ConfigError(
            f"{found.name}: no run of this name exists here; to evaluate a model that no run made, give --config FILE, the YAML of a run "
            "with the environments and the sampling to use"
        )
    config = load(given, overrides)
    return config, Path(config.run.dir) / FOLDER


@contextlib.contextmanager
def new_folder(place: Path, found: NamedModel) -> Iterator[Path]:
    """Make a folder for an evaluation under `place`, and yield it. If it is empty at the end, it is removed."""
    with runs.new_folder(place, found.name.rpartition("/")[2], datetime.datetime.now()) as run_id:
        yield place / run_id


# -- what to ask


def data_sets(names: Sequence[str], config: Config, overrides: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Return `data.evaluate` for the data sets that the command line names. Raises `ConfigError` if one does not exist."""
    found: dict[str, dict[str, Any] | None] = {}
    for name in names:
        label, source = _data_set(name, config, overrides)
        numbers = (f"{label}-{number}" for number in range(2, len(names) + 1))
        found[label if label not in found else next(free for free in numbers if free not in found)] = source
    return found


def _data_set(name: str, config: Config, overrides: Sequence[str]) -> tuple[str, dict[str, Any] | None]:
    data = config.data
    if name in OWN:
        held_out = bool(data.validation) or any(source.split_validation_size for source in data.train)
        if not (held_out if name == OWN[0] else data.train):
            raise ConfigError(
                f"{name}: the configuration has no data.{name}; name a file, or a data set on the Hugging Face Hub"
            )
        return name, None
    label = runs.plain(Path(name).stem if Path(name).is_file() else Path(name).name)[:56]
    if Path(name).is_file():
        source: dict[str, Any] = {"data_path": str(Path(name).absolute())}
    elif name in get_args(HubName):
        source = {"dataset_name": name}
    elif Path(name).is_dir():
        source = {"data_path": str(Path(name).absolute())}
    elif _HUB.fullmatch(name) and not name.endswith((".jsonl", ".json", ".parquet")):
        source = {"data_path": name}
    else:
        raise ConfigError(
            f"{name} is not a data set; give {' or '.join(OWN)}, an existing file or folder, or a data set on the Hugging Face Hub: "
            f"{', '.join(get_args(HubName))}, owner/name"
        )
    # the rows of named data sets are known
    keys = [key for key in _SHARED if "data_path" in source or key not in ("processor", "input_key", "output_key")]
    shared = {key: _inherit(name, key, config, overrides) for key in keys}
    # dumped whole, so that `data.default`, which may describe another data set (its generator, its size), adds nothing to it
    return label, DataSourceConfig.model_validate(source | shared).model_dump(mode="json")


def _inherit(name: str, key: str, config: Config, overrides: Sequence[str]) -> Any:
    """Return the value that a data set inherits: `data.default`'s if an override sets it, else the value on which all data sets of the run
    agree."""
    data = config.data
    default = getattr(data.default, key)
    if any(override.partition("=")[0].strip() == f"data.default.{key}" for override in overrides):
        return default
    values = {getattr(source, key) for source in data.validation or data.train} or {default}
    if len(values) > 1:
        raise ConfigError(
            f"{name}: the data sets of the run differ in {key} ({', '.join(sorted(map(repr, values)))}); choose a value with "
            f"--set data.default.{key}=VALUE"
        )
    return values.pop()


def evaluation_config(
    config: Config,
    found: NamedModel,
    evaluate: Mapping[str, dict[str, Any] | None],
    *,
    samples: int,
    temperature: float | None,
    folder: Path,
) -> Config:
    """Return the configuration of the run that asks these data sets. It has the model, sampling, environments and deadlines of `config`. It
    trains nothing, has its own buffer, and uses this machine alone. Raises `ConfigError`."""
    given = config.model_dump(mode="json")
    del given["replay"]["redis_port"]  # a free one is chosen
    here = {"host": LOOPBACK, "port": 0}
    generation = given["policy"]["generation"]
    if temperature is not None:
        generation["val_temperature"] = temperature
    values = {
        "run": given["run"] | {"id": folder.name, "dir": str(folder.parent)},
        "grpo": {
            "seed": config.algorithm.seed,
            "val_num_generations_per_prompt": samples,
            "val_period": 0,
            "val_at_end": True,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0},
        # checkpoints of a run with an adapter have it merged
        "policy": given["policy"]
        | {"model_name": _absolute(found.model), "train_global_batch_size": None, "lora_cfg": {"enabled": False}},
        "data": given["data"]
        | {"evaluate": evaluate, "use_multiple_dataloader": False, "num_prompts_per_dataloader": None},
        "env": given["env"],
        "replay": given["replay"] | here | {"redis_url": None, "redis_host": LOOPBACK},
        "rollout": given["rollout"] | here | {"advertise_host": None},
        "reward": given["reward"] | here | {"http_port": 0, "address": None},
        "agents": given["agents"] | here | {"http_port": 0, "advertised_url": None},
        "trainer": given["trainer"] | here,
        "page": {"port": None},
        "weight_channel": given["weight_channel"] | here,
        "checkpointing": {"enabled": False},
        "security": given["security"],
    }
    try:
        evaluation = Config.model_validate(values).referring(config.references)
    except ValidationError as error:
        raise ConfigError(explain(error, lambda keys: "", references=config.references)) from error
    if samples > 1 and validation_temperature(evaluation) == 0:
        raise ConfigError(
            f"--samples {samples} at temperature 0: all completions of a prompt would be the same; give --temperature, or --samples 1"
        )
    return runs.with_credentials(evaluation)


def refuse_ignored(overrides: Sequence[str], given: Config, evaluation: Config) -> None:
    """Raise `ConfigError` for an override of a key that the evaluation sets itself."""
    changed = diff(given, evaluation)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if any(f"{change.key}.".startswith(f"{key}.") for change in changed):
            raise ConfigError(f"--set {override}: an evaluation sets {key} itself; leave it out")


def validation_temperature(config: Config) -> float:
    generation = config.policy.generation
    return generation.temperature if generation.val_temperature is None else generation.val_temperature


def _absolute(model: str) -> str:
    return str(Path(model).absolute()) if Path(model).is_dir() else model


# -- asking


def ask(config: Config, found: NamedModel) -> None:
    """Run the pipeline until every prompt has ended. Raises `typer.Exit` after a signal."""
    console = RunConsole()
    plan = device_plan.of(config)

    with runs.lock(config), settle(config) as (config, saved, reserved):
        device_plan.record(plan, device_plan.plan_threads(config, plan), config.run_folder)
        say(console, f"evaluating {found.name} in {config.run_folder}")
        if why := device_plan.why_on_cpu(config):
            say(console, f"warning: the trainer uses the CPU: {why}")
        try:
            with open_display(console) as display:
                asyncio.run(Pipeline(config, saved, plan, reserved, display).run())
        except StoppedBySignal as interrupted:
            say(console, "stopped before all prompts were evaluated; there are no results")
            raise typer.Exit(128 + interrupted.signum) from None


# -- the results


def _write(output: Path, results: Mapping[str, Any]) -> None:
    try:
        with atomic_write(output) as unfinished:
            unfinished.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ServiceError(
            f"--json {output}: can't be written ({error.strerror}); the completions are in {results['folder']}"
        ) from error


def table(title: str, reports: Mapping[str, DataSetReport]) -> Table:
    """Return a table with a row for each data set. Of pass@k it shows the powers of two and the largest k; the JSON file has all."""
    largest = max((each.samples for each in reports.values()), default=0)
    shown = [k for k in range(1, largest + 1) if k == largest or k & (k - 1) == 0]
    made = plain_table(title=printable(title), title_justify="left")
    columns = ["prompts", "failed", *(f"pass@{k}" for k in shown), "reward", "length", "truncated", "components"]
    made.add_column("data set")
    for column in columns:
        made.add_column(column, justify="left" if column == "components" else "right")
    for name, each in reports.items():
        error = "" if each.reward_stderr is None else f" ± {each.reward_stderr:.3f}"
        cells = [
            str(each.evaluated),
            str(each.failed),
            *(_number(each.pass_at.get(k), ".3f") for k in shown),
            _number(each.reward, ".3f") + error,
            _number(each.length, ".1f"),
            _number(each.truncated, ".3f"),
            ", ".join(f"{component} {value:.3f}" for component, value in each.components.items()) or "-",
        ]
        made.add_row(*map(cell, (name, *cells)))
    return made


def failures(reports: Mapping[str, DataSetReport]) -> Iterator[str]:
    """Yield a line for each reason why prompts failed."""
    for name, each in reports.items():
        for reason, times in each.failures.items():
            yield printable(
                f"{name}: {times} of {each.evaluated + each.failed} prompts failed and are left out of the results: {reason}"
            )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
