"""`headrace plan`: the GPU memory that a run needs, computed without GPUs, and how many replicas keep its trainer busy."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from headrace.base.devices import DeviceMemory, Site
from headrace.base.errors import ConfigError
from headrace.cli.common import MOST_GIB, WIDTH, App, ConfigArgument, Overrides, plain_table, say
from headrace.config import Config, load
from headrace.config.yaml_text import parse
from headrace.launch import runs
from headrace.launch.entry_points import load_entry_point
from headrace.run import history, now
from headrace.run.balance import Balance, Workload, advise, spread
from headrace.run.findings import Window
from headrace.run.measured import MOST_SHARED, change, configured, measure

app = App(help="Tell whether a run fits its GPUs, and which side of it holds up the other.", no_args_is_help=True)

GIB = 2**30


@app.command()
def memory(
    config: ConfigArgument,
    overrides: Overrides = None,
    gpus: Annotated[str, typer.Option("--gpus", help="Numbers of the trainer's GPUs to compare.")] = "1,4,8,16",
    per_host: Annotated[int, typer.Option("--gpus-per-host", min=1, help="Number of GPUs in a host.")] = 8,
    size: Annotated[float, typer.Option("--gpu-memory", min=1, max=MOST_GIB, help="Memory of a GPU in GiB.")] = 80,
) -> None:
    """Print the memory that the trainer needs on each of its GPUs at its peak, and a replica on each of its own, part by part in GiB.

    Nothing is started and no weights are read. The model's config.json is enough, or the name of a model that Headrace knows.
    """
    loaded, plan = load(config, overrides or ()), load_entry_point("headrace.tools", "plan-memory", extra="trainer")
    device = DeviceMemory(f"a GPU of {size:g} GiB", int(size * GIB), int(size * GIB))
    counts = _counts(gpus, per_host, loaded.trainer.shard_within_host)
    found = [plan(loaded, Site(device, device, count, per_host), count) for count in counts]
    console = Console(width=WIDTH)
    table = plain_table("trainer, GiB on each GPU", *(f"{count} GPU{'s' * (count > 1)}" for count in counts))
    peaks = [each.peak for each in found]
    for part in dict.fromkeys(part for _, parts in peaks for part in parts):
        table.add_row(part, *(f"{parts[part] / GIB:.1f}" if part in parts else "-" for _, parts in peaks))
    mine = size * (loaded.trainer.gpu_memory_fraction or 1)
    table.add_row(f"together, of {mine:g}", *(_total(parts, mine) for _, parts in peaks))
    table.add_row("most in the phase", *(phase for phase, _ in peaks))
    console.print(table)
    replica, remarks = found[0].replica, found[0].remarks
    parts = ", ".join(f"{part} {of / GIB:.1f}" for part, of in replica.items())
    say(console, f"a replica, on each of its GPUs: {parts}; together {_total(replica, size)}")
    for remark in remarks:
        say(console, remark)


def _total(parts: Mapping[str, int], size: float) -> str:
    total = sum(parts.values()) / GIB
    return f"{total:.1f}" if total <= size else f"{total:.1f} !"


def _counts(text: str, per_host: int, whole_hosts: bool) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise ConfigError(f"--gpus {text}: give numbers of GPUs, for example 1,4,8,16")
    if whole_hosts and any(count > per_host and count % per_host for count in counts):
        raise ConfigError(
            f"--gpus {text}: trainer.shard_within_host needs whole hosts, of {per_host} GPUs (--gpus-per-host); give multiples of "
            f"{per_host}, or set it to false"
        )
    return counts


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of an hour, in any currency: of a device of a replica, of a device of the trainer (a GPU, or on CPUs a process), and of the
    CPU of a reward worker or a runner."""

    rollout_device: float
    trainer_device: float
    cpu: float = 0.0

    def an_hour(self, config: Config, work: Workload) -> float:
        devices = work.replicas * config.policy.generation.vllm_cfg.tensor_parallel_size
        cpus = config.reward.workers + (work.runners or 0)
        return devices * self.rollout_device + config.trainer.num_processes * self.trainer_device + cpus * self.cpu


# How each line of the table is written. What is missing has no line.
_ROWS: Mapping[str, str] = {
    "replicas": "d",
    "runners": "d",
    "scoring_places": "d",
    "age_bound": "d",
    "seconds_a_step": ".3g",
    "steps_an_hour": ".3g",
    "trainer_busy": ".0%",
    "replicas_generate": ".0%",
    "groups_generated_again": ".0%",
    "price_an_hour": ".4g",
    "price_of_a_million_trained_tokens": ".4g",
}


def _before_first(help: str, **given: Any) -> Any:
    return typer.Option(help=f"Before the first run: {help}", **given)


@app.command()
def balance(
    run: Annotated[str, typer.Argument(metavar="RUN|CONFIG", help="The run's folder or id, or a run's YAML.")],
    overrides: Overrides = None,
    window: Annotated[
        Window, typer.Option(help="The steps of the run that are measured: the last, the last 10, or all.")
    ] = "10",
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="YAML with the price of an hour of a rollout_device, a trainer_device and a cpu."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    tokens_per_second: Annotated[float | None, _before_first("what a replica makes with all its places taken.")] = None,
    sequence_tokens_per_second: Annotated[
        float | None, _before_first("what a completion gets that is alone in a replica.")
    ] = None,
    mean_tokens: Annotated[float | None, _before_first("mean tokens of a completion.")] = None,
    training_seconds: Annotated[float | None, _before_first("from a batch to its new weights.")] = None,
    length_spread: Annotated[
        float | None, _before_first("standard deviation of the logarithm of a completion's tokens (0.6).", min=0, max=3)
    ] = None,
    scoring_seconds: Annotated[float | None, _before_first("of an environment for a completion.", min=0)] = None,
    scoring_places: Annotated[
        int | None, _before_first("completions that the environments score at a time.", min=1)
    ] = None,
) -> None:
    """Print which side is the bottleneck of a run, and how many replicas keep its trainer busy.

    The rates are measured in the files of a run, which may be over. Of a configuration that has not run they have to be given.
    """
    rates = {
        "--tokens-per-second": tokens_per_second,
        "--sequence-tokens-per-second": sequence_tokens_per_second,
        "--mean-tokens": mean_tokens,
        "--training-seconds": training_seconds,
    }
    others = {
        "--length-spread": length_spread,
        "--scoring-seconds": scoring_seconds,
        "--scoring-places": scoring_places,
    }
    known = None if prices is None else _read_prices(prices)
    columns: dict[str, tuple[Workload, Balance]] = {}
    if Path(run).is_file():
        config = load(Path(run), overrides or ())
        work = _assume(config, rates, 0.6 if length_spread is None else length_spread)
        work = dataclasses.replace(work, scoring_s=scoring_seconds or 0.0, scoring_places=scoring_places)
        trained_tokens = work.tokens_a_step
    else:
        if given := [option for option, value in (rates | others).items() if value is not None]:
            raise ConfigError(f"{', '.join(given)}: the rates of run {run} are measured; give them with a run's YAML")
        config = runs.find(run)
        found = measure(config.run_folder, config, history.read(config).lines, window, now.read(config.run_folder))
        work, trained_tokens = found.workload, found.trained_tokens
        if overrides:
            config, before = runs.find(run, overrides), config
            work = change(found.workload, before, config)
            trained_tokens *= work.prompts / found.workload.prompts
        else:
            columns["measured"] = work, found.balance
    advice = advise(work)
    columns |= {"computed": advice.now, "proposed": advice.proposed}
    if advice.wider is not None:
        columns["wider age bound"] = advice.wider
    told = {name: _describe(config, *column, trained_tokens, known) for name, column in columns.items()}
    if as_json:
        typer.echo(json.dumps({"bottleneck": advice.side, "advice": str(advice), **told}, indent=2))
        return
    console, table = Console(width=WIDTH), plain_table("", *told)
    for row, spec in _ROWS.items():
        if any(row in column for column in told.values()):
            cells = (format(column[row], spec) if row in column else "-" for column in told.values())
            table.add_row(row.replace("_", " "), *cells)
    console.print(table)
    say(console, str(advice))


def _assume(config: Config, rates: Mapping[str, float | None], sigma: float) -> Workload:
    """Return the workload of a configuration with given rates. Raises `ConfigError` without one of them."""
    if missing := [option for option, rate in rates.items() if rate is None or not 0 < rate < math.inf]:
        raise ConfigError(f"{', '.join(missing)}: give a rate above 0 for each, or a run whose rates can be measured")
    replica, alone, tokens, training_s = (rate or 0.0 for rate in rates.values())
    given = configured(config)
    n = config.algorithm.num_generations_per_prompt
    full = min(given["sequences"] or math.inf, given["places"] * n)
    if full * alone < replica:
        raise ConfigError(
            f"--tokens-per-second {replica:g} is more than {full:g} completions with {alone:g} tokens a second each make; raise "
            "--sequence-tokens-per-second, policy.generation.vllm_cfg.max_num_seqs or rollout.max_concurrent_groups"
        )
    if replica < alone:
        raise ConfigError(
            f"--tokens-per-second {replica:g}: a full replica makes no less than a completion that is alone, {alone:g} "
            "(--sequence-tokens-per-second)"
        )
    # a token takes token_s + per_sequence_s alone, and token_s + full * per_sequence_s in a full replica
    per_sequence_s = min((full / replica - 1 / alone) / (full - 1), MOST_SHARED / alone) if full > 1 else 0.0
    return Workload(
        **given,
        lengths=spread(tokens, sigma, n),
        training_s=training_s,
        token_s=1 / alone - per_sequence_s,
        per_sequence_s=per_sequence_s,
    )


def _describe(
    config: Config, work: Workload, balance: Balance, trained_tokens: float, prices: Prices | None
) -> dict[str, float]:
    """Return a column of the table by the names of its rows."""
    found: dict[str, float | None] = {
        "replicas": work.replicas,
        "runners": work.runners,
        "scoring_places": work.scoring_places,
        "age_bound": work.age,
        "seconds_a_step": balance.step_s,
        "steps_an_hour": 3600 / balance.step_s,
        "trainer_busy": balance.busy,
        "replicas_generate": balance.generating,
        "groups_generated_again": balance.repeated or None,
    }
    if prices is not None:
        an_hour = prices.an_hour(config, work)
        found["price_an_hour"] = an_hour
        found["price_of_a_million_trained_tokens"] = an_hour * balance.step_s / 3600 / trained_tokens * 1e6
    return {name: value for name, value in found.items() if value is not None}


def _read_prices(path: Path) -> Prices:
    try:
        return msgspec.convert(parse(path.read_text(encoding="utf-8"), str(path)), Prices)
    except (OSError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{path}: {error}; give rollout_device, trainer_device and cpu, the price of an hour each"
        ) from error
