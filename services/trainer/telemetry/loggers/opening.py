"""Which trackers a configuration asks for."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from headrace.config import Config
from headrace.errors import ServiceError
from services.trainer.telemetry import alarm
from services.trainer.telemetry.journal import Line
from services.trainer.telemetry.loggers.follower import Follower, Make
from services.trainer.telemetry.loggers.tracker import Entry, Tracker, parameters
from services.trainer.telemetry.samples import SampleFiles, as_markdown, choose, shown


def followers(config: Config, journal: Path, samples: SampleFiles) -> list[Follower]:
    """One of each tracker that is switched on, not started yet. Raises `ServiceError` naming the extra of a library that is missing."""

    def adorn(line: Line, entry: Entry) -> Entry:
        """The trajectories of a validation and the picture of an alarm, where their files are (still) there."""
        if line.kind == "validation" and (count := config.logger.num_val_samples_to_print):
            records = samples.read("val", line.step)
            chosen = [shown(records[place]) for place in choose([record["rewards"] for record in records], count)]
            if chosen:
                return dataclasses.replace(entry, texts={"validation/samples": as_markdown(chosen)})
        picture = alarm.picture_path(config.log_folder, line.step)
        if line.metrics.get("train_inference_alarm") and picture.exists():
            return dataclasses.replace(entry, pictures={"train/disagreement": picture})
        return entry

    return [Follower(name, make, adorn, journal, config.log_folder) for name, make in _makers(config)]


def _makers(config: Config) -> Iterator[tuple[str, Make]]:
    """Each library is imported when its tracker is opened: on the tracker's thread, and not at all without one."""
    settings, folder, name = config.logger, config.log_folder, config.run_folder.name
    if settings.tensorboard_enabled:
        _need("tensorboard", "tensorboard")
        own = settings.tensorboard.log_dir

        def tensorboard(run_id: str | None) -> Tracker:
            from services.trainer.telemetry.loggers.tensorboard import TensorBoard

            return TensorBoard(Path(own) if own else folder / "tensorboard", parameters(config))

        yield "tensorboard", tensorboard
    if settings.wandb_enabled:
        _need("wandb", "wandb")

        def wandb(run_id: str | None) -> Tracker:
            from services.trainer.telemetry.loggers.weights_and_biases import WeightsAndBiases

            return WeightsAndBiases(settings.wandb, name, folder, run_id, parameters(config))

        yield "wandb", wandb
    if settings.mlflow_enabled:
        _need("mlflow", "mlflow", "sqlalchemy", "alembic")

        def mlflow(run_id: str | None) -> Tracker:
            from services.trainer.telemetry.loggers.mlflow_run import MLflowRun

            return MLflowRun(settings.mlflow, name, folder, run_id, parameters(config))

        yield "mlflow", mlflow


def _need(tracker: str, *modules: str) -> None:
    missing = [module for module in modules or (tracker,) if importlib.util.find_spec(module) is None]
    if missing:
        raise ServiceError(
            f"logger.{tracker}_enabled is true, but {', '.join(missing)} is not installed: pip install 'headrace[{tracker}]', or set "
            f"logger.{tracker}_enabled=false"
        )
