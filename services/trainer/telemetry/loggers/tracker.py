"""What a tracker is, and what it is told."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from headrace.config import Config
from services.trainer.telemetry.journal import Line
from services.trainer.telemetry.metric_names import tracked_name


@dataclasses.dataclass(frozen=True)
class Entry:
    """A `train` or `validation` line for a tracker: `number` is its place in `metrics.jsonl`, from 0; `metrics` are named as trackers
    name them (`train/loss`). `texts` (Markdown) and `pictures` (PNG files), by their names, belong to the step."""

    number: int
    step: int
    time: float
    metrics: Mapping[str, float]
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pictures: Mapping[str, Path] = dataclasses.field(default_factory=dict)


class Tracker(Protocol):
    """One run in a tracker. Every method may raise whatever the library raises; the tracker is then made anew."""

    run_id: str

    def rewind(self, step: int) -> None:
        """The run goes on from the weights of version `step`: what was written of that step and later ones is void."""

    def write(self, entry: Entry) -> None: ...

    def flush(self) -> None:
        """What was written until now outlives this process."""

    def close(self) -> None: ...


def entry_of(number: int, line: Line) -> Entry:
    metrics = {tracked_name(line.kind, name): value for name, value in line.metrics.items()}
    return Entry(number, line.step, line.time, metrics)


def parameters(config: Config) -> dict[str, Any]:
    """The whole configuration, without the passwords in addresses."""
    plain: dict[str, Any] = _without_passwords(config.model_dump(mode="json"))
    return plain


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists with dotted keys (`data.train.0.seed`)."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inner, Mapping) and inner:
            found |= flat({str(k): v for k, v in inner.items()}, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _without_passwords(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_passwords(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_passwords(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(://[^/@\s:]*):[^/@\s]*@", r"\1:***@", value)
    return value
