"""`headrace export`: write a checkpoint as one folder that transformers, vLLM and other tools load."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import yaml

from headrace.base.errors import ConfigError, ServiceError
from headrace.base.files import fsync
from headrace.base.scratch import scratch_folder
from headrace.cli import weights
from headrace.cli.weights import NamedModel, RunCheckpoint, WeightsArgument
from headrace.config import Config
from headrace.run import checkpoints

CARD = "README.md"
# the sections that decide which weights a run makes; addresses, periods and secrets don't
_TRAINING = {"grpo", "ppo", "loss_fn", "value_loss_fn", "policy", "value", "data", "env"}

_ON_THE_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def export(
    model: WeightsArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A new folder, or an empty one.")],
) -> None:
    """Write a model to its own folder: weights, tokenizer, chat template, and a model card that states its origin."""
    found = weights.find_local(model)
    _refuse_patchwork(found)
    copy(found, output)
    typer.echo(f"{found.name} in {output}")


def _refuse_patchwork(found: NamedModel) -> None:
    """Raise `ConfigError` for an initial model that the run's configuration changes."""
    policy = found.run.config.policy if found.run is not None and found.run.step == 0 else None
    for key, value in (
        ("policy.tokenizer.name", policy and policy.tokenizer.name),
        ("policy.hf_config_overrides", policy and policy.hf_config_overrides),
    ):
        if value:
            raise ConfigError(
                f"{found.name}: the run did not start from the initial model alone ({key} {value!r}); export a later step, which includes "
                "this"
            )


def copy(found: NamedModel, output: Path) -> None:
    """Copy a model to `output`, which then has all of it or does not exist, and add a card if it has none. Raises `ConfigError` for a
    folder that is not empty, `ServiceError` if the disk can't take the model."""
    source = Path(found.model)
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"--output {output}: the folder is not empty; give a new or an empty folder")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file; give a new or an empty folder")
    if output.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"--output {output} is inside the model's own folder; give another")
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with _unfinished(output) as folder:
            made = [*_copy(source, folder), folder / CARD]
            if not (folder / CARD).exists():
                (folder / CARD).write_text(card(found), encoding="utf-8")
            for path in [*made, folder]:
                fsync(path)
            folder.rename(output)
            fsync(output.absolute().parent)
    except OSError as error:
        raise ServiceError(
            f"can't export {found.name} to {output} ({error}); nothing was left there. Free space, or give another folder"
        ) from error


@contextlib.contextmanager
def _unfinished(output: Path) -> Iterator[Path]:
    """Yield a folder beside `output` that is removed at the end unless it was renamed."""
    with scratch_folder(f".{output.name}.unfinished-", output.absolute().parent) as outer:
        # an inner folder, with the umask's mode: others may not enter the outer one
        folder = outer / output.name
        folder.mkdir()
        yield folder


def _copy(source: Path, target: Path) -> Iterator[Path]:
    """Copy the content of `source`, following links, with the modes of new files. Yields every file and folder made."""
    for path in sorted(source.iterdir()):
        made = target / path.name
        if path.is_dir():
            made.mkdir()
            yield made
            yield from _copy(path, made)
        else:
            shutil.copyfile(path, made)
            yield made


def card(found: NamedModel) -> str:
    """Return the model card: YAML for the Hugging Face Hub, and a table that describes the model."""
    head: dict[str, object] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["headrace", "reinforcement-learning"],
    }
    base = found.run.config.policy.model_name if found.run is not None else None
    if base is not None and _ON_THE_HUB.fullmatch(base) and not Path(base).is_dir():  # the Hub accepts no paths
        head["base_model"] = base
    rows = {"model": found.name} if found.run is None else _origin(found.run)
    table = "".join(f"| {name} | `{str(value).replace('|', '/')}` |\n" for name, value in rows.items())
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {found.name}\n\nMade with Headrace.\n\n| | |\n| --- | --- |\n{table}"


def _origin(run: RunCheckpoint) -> dict[str, object]:
    rows: dict[str, object] = {
        "run": run.config.run_folder.name,
        "step": run.step,
        "base model": run.config.policy.model_name,
        "algorithm": run.config.algorithm.name,
        "configuration (SHA-256)": digest(run.config),
    }
    if run.step:
        metrics = checkpoints.read_metrics(run.config.checkpoint_folder, run.step)
        telling = ("train:reward", run.config.checkpointing.metric_name)
        rows |= {name: f"{metrics[name]:.6g}" for name in telling if name in metrics}
    return rows


def digest(config: Config) -> str:
    """Return the SHA-256 of the sections that decide which weights a run makes, as canonical JSON."""
    values = config.model_dump(mode="json", include=_TRAINING)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
