"""`logger`: what is logged of a run beside `metrics.jsonl`. Keys are those of NeMo RL."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from pydantic import Field

from headrace.config.marks import AnyPath
from headrace.config.section import Section

_LIBRARIES = {"tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}


class WandbConfig(Section):
    """Weights & Biases. Its own variables apply too: `WANDB_API_KEY`, `WANDB_BASE_URL`, and `WANDB_MODE=offline` for no network at all."""

    project: str = Field("headrace", min_length=1)
    name: str | None = Field(None, description="name of the run there; null: run.id")
    entity: str | None = Field(None, description="user or team; null: the one you are logged in as")


class TensorboardConfig(Section):
    log_dir: str | None = Field(None, description="folder of the event files; null: <log_dir>/tensorboard")


class MLflowConfig(Section):
    experiment_name: str = Field("headrace", min_length=1)
    run_name: str | None = Field(None, description="name of the run there; null: run.id")
    run_id: str | None = Field(None, description="continue this MLflow run; null creates one and remembers it")
    tracking_uri: str | None = Field(
        None, description="server or store; null: MLFLOW_TRACKING_URI, else a SQLite file <log_dir>/mlflow.db"
    )
    artifact_location: str | None = Field(
        None,
        description="where a new experiment stores its files; null: beside that SQLite file, or where the server stores them",
    )

    @property
    def server(self) -> str | None:
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")


class GPUMonitoringConfig(Section):
    collection_interval: float = Field(10.0, gt=0, description="seconds between two measurements of the trainer's GPUs")


class TrainInferenceAlarmConfig(Section):
    """Limits beyond which trainer and inference engine are reported to disagree about the log-probabilities of the trained tokens; null:
    never. They apply to data of the current weights, and are never narrower than what the newest refit accepts in the mean. Older data has
    another rule (docs/metrics.md)."""

    token_mult_prob_error: float | None = Field(1.05, gt=1)
    gen_kl_error: float | None = Field(0.01, gt=0)


class LoggerConfig(Section):
    """`metrics.jsonl` in the run's folder is always written, and first. What is enabled here follows it."""

    log_dir: AnyPath[str | None] = Field(
        None,
        description="folder in which each run's logs get a folder with its name; null: <run folder>/logs",
    )
    wandb_enabled: bool = Field(False, description="needs `pip install 'headrace[wandb]'`")
    tensorboard_enabled: bool = Field(False, description="needs `pip install 'headrace[tensorboard]'`")
    mlflow_enabled: bool = Field(False, description="needs `pip install 'headrace[mlflow]'`")
    wandb: WandbConfig = WandbConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    mlflow: MLflowConfig = MLflowConfig()
    monitor_gpus: bool = Field(True, description="metrics of the trainer's GPUs: use and memory")
    gpu_monitoring: GPUMonitoringConfig = GPUMonitoringConfig()
    num_val_samples_to_print: int = Field(
        0, ge=0, description="trajectories printed after a validation: half of them the best, half the worst"
    )
    keep_step_data: int | None = Field(
        20,
        ge=0,
        description="steps whose trajectories are kept, token by token, in train_data_step<N>.jsonl.gz, and as many validations, in "
        "val_data_step<N>.jsonl.gz, with their failures in val_failed_data_step<N>.jsonl.gz; 0 writes none of them, nor the completions "
        "of failed training groups (failed_data.jsonl); null keeps all",
    )
    keep_step_data_bytes: int | None = Field(
        10 * 1024**3,
        ge=0,
        description="bytes that the files of keep_step_data may have together. Beyond them the oldest go first; the newest step and the "
        "newest validation stay, however large they are. A step of 512 trajectories of 32,768 tokens has about 0.7 GB. null: no bound",
    )
    train_inference_alarm: TrainInferenceAlarmConfig = TrainInferenceAlarmConfig()

    def missing_libraries(self) -> Iterator[tuple[str, str]]:
        """Yield the key of each enabled tracker whose library is not installed here, and what to do."""
        for tracker, modules in _LIBRARIES.items():
            key = f"{tracker}_enabled"
            missing = [module for module in modules if importlib.util.find_spec(module) is None]
            if missing and getattr(self, key):
                yield (
                    key,
                    f"logger.{key} is true, but {', '.join(missing)} is not installed: pip install 'headrace[{tracker}]', or set "
                    f"logger.{key}=false",
                )
