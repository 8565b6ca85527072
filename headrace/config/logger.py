"""`logger`: what is kept and shown of a run beside `metrics.jsonl`, by the keys that users of NeMo RL know."""

from __future__ import annotations

from pydantic import Field

from headrace.config.base import Section


class WandbConfig(Section):
    """Weights & Biases. Its own variables hold too: `WANDB_API_KEY`, `WANDB_BASE_URL`, and `WANDB_MODE=offline` for no network at all."""

    project: str = Field("headrace", min_length=1)
    name: str | None = Field(None, description="name of the run there; null takes run.id")
    entity: str | None = Field(None, description="user or team; null takes the one that you are logged in as")


class TensorboardConfig(Section):
    log_dir: str | None = Field(None, description="folder of the event files; null takes <log_dir>/tensorboard")


class MLflowConfig(Section):
    experiment_name: str = Field("headrace", min_length=1)
    run_name: str | None = Field(None, description="name of the run there; null takes run.id")
    run_id: str | None = Field(None, description="go on with this run of MLflow's; null makes one and remembers it")
    tracking_uri: str | None = Field(
        None, description="server or store; null takes MLFLOW_TRACKING_URI, else a SQLite file <log_dir>/mlflow.db"
    )
    artifact_location: str | None = Field(
        None,
        description="where a new experiment keeps files; null: beside that SQLite file, or where the server keeps them",
    )


class GPUMonitoringConfig(Section):
    collection_interval: float = Field(10.0, gt=0, description="seconds between two looks at the trainer's GPUs")


class TrainInferenceAlarmConfig(Section):
    """Limits past which trainer and inference engine are said to disagree on how likely the trained tokens are; null never does. They hold
    for data of the current weights, and are never narrower than `weight_channel.verify_mean_tolerance`; for older data there
    is another rule (docs/metrics.md)."""

    token_mult_prob_error: float | None = Field(1.05, gt=1)
    gen_kl_error: float | None = Field(0.01, gt=0)


class LoggerConfig(Section):
    """`metrics.jsonl` in the run's folder is always written, and first; what is switched on here follows it."""

    log_dir: str | None = Field(
        None,
        description="holds a folder named like the run, with what is logged of it; null takes <run folder>/logs",
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
        0, ge=0, description="trajectories shown after a validation: half of them the best, half the worst"
    )
    keep_step_data: int | None = Field(
        20,
        ge=0,
        description="steps whose trajectories stay, token by token, in train_data_step<N>.jsonl.gz (and as many validations, in "
        "val_data_step<N>.jsonl.gz, with what failed there in val_failed_data_step<N>.jsonl.gz); 0 writes none, nor the completions that "
        "training groups failed with (failed_data.jsonl); null keeps all",
    )
    train_inference_alarm: TrainInferenceAlarmConfig = TrainInferenceAlarmConfig()
