"""Weights & Biases: one run there a run here, gone on with after every restart; `WANDB_MODE=offline` writes to files alone."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from headrace.config.logger import Wandb
from services.trainer.telemetry.loggers.tracker import Entry

STEP = "step"


class WeightsAndBiases:
    """`config` names the run and where it belongs; `run_id` None makes a new one.

    Steps of a run there never go back, so each entry is one of its own, and curves are drawn over the metric `step`. A step that
    was trained again after a rewind stands in it twice, the later beside the earlier: the newest is the one that counts.
    """

    def __init__(
        self, config: Wandb, name: str, folder: Path, run_id: str | None, parameters: Mapping[str, Any]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run_id = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or name,
            id=self.run_id,
            resume="allow",
            dir=str(folder),
            config=dict(parameters),
            # what the trainer prints and runs is not the tracker's
            settings=wandb.Settings(console="off", silent=True, reinit="create_new"),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def rewind(self, step: int) -> None:
        """What was sent can't be taken back there."""

    def write(self, entry: Entry) -> None:
        texts = {name: wandb.Html(f"<pre>{_escaped(text)}</pre>") for name, text in entry.texts.items()}
        pictures = {name: wandb.Image(str(path)) for name, path in entry.pictures.items()}
        self._run.log({**entry.metrics, **texts, **pictures, STEP: entry.step}, step=entry.number)

    def flush(self) -> None:
        """Its own process has what was logged, and outlives this one until it has written it."""

    def close(self) -> None:
        self._run.finish()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
