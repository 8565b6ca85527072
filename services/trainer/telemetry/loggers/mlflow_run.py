"""MLflow: one run there a run here, in a server's store or in a SQLite file beside the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param
from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

from headrace.config.logger import MLflow
from services.trainer.telemetry.loggers.tracker import Entry, flat


class MLflowRun:
    """`config` names experiment, run and store; `run_id` None makes a new run, unless the configuration names one.

    Parameters there can't be changed, so they are those of the first start; the configuration of every start is kept as a file
    (`config/<time>.json`). Of a step that was trained again after a rewind both values are kept, and the newest is shown.
    """

    def __init__(
        self, config: MLflow, name: str, folder: Path, run_id: str | None, parameters: Mapping[str, Any]
    ) -> None:
        folder = folder.absolute()
        store = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        files = config.artifact_location
        if store is None:
            folder.mkdir(parents=True, exist_ok=True)
            store, files = f"sqlite:///{folder}/mlflow.db", files or str(folder / "mlflow")
        # the registry of models is not used, and the small package has none for a database
        self._client = mlflow.MlflowClient(store, registry_uri=store if store.startswith("http") else folder.as_uri())
        known = run_id or config.run_id
        if known is None:
            experiment = self._client.get_experiment_by_name(config.experiment_name)
            place = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(config.experiment_name, files)
            )
            run = self._client.create_run(place, run_name=config.run_name or name)
            self._log_parameters(run.info.run_id, parameters)
            self.run_id = run.info.run_id
        else:
            self.run_id = known
            self._client.set_terminated(known, "RUNNING")
        now = int(time.time())
        self._client.log_dict(self.run_id, dict(parameters), f"config/{now}.json")

    def rewind(self, step: int) -> None:
        """What was sent can't be taken back there."""

    def write(self, entry: Entry) -> None:
        now = int(entry.time * 1000)
        metrics = [Metric(_allowed(name), value, now, entry.step) for name, value in entry.metrics.items()]
        for first in range(0, len(metrics), MAX_METRICS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + MAX_METRICS_PER_BATCH])
        for name, text in entry.texts.items():
            self._client.log_text(self.run_id, text, f"{name}/step_{entry.step}.md")
        for name, path in entry.pictures.items():
            self._client.log_artifact(self.run_id, str(path), name)

    def flush(self) -> None:
        """Every call has written what it was given."""

    def close(self) -> None:
        self._client.set_terminated(self.run_id)

    def _log_parameters(self, run_id: str, parameters: Mapping[str, Any]) -> None:
        plain = [
            Param(_allowed(key), (value if isinstance(value, str) else json.dumps(value))[:MAX_PARAM_VAL_LENGTH])
            for key, value in flat(parameters).items()
        ]
        for first in range(0, len(plain), MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(run_id, params=plain[first : first + MAX_PARAMS_TAGS_PER_BATCH])


def _allowed(name: str) -> str:
    """A name of a task or of an environment may have characters that MLflow does not take."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)
