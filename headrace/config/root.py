"""The whole configuration, and what must hold between sections."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from headrace.config.algorithm import GRPO, LossFn
from headrace.config.base import Section
from headrace.config.data import Data, Env
from headrace.config.policy import Policy
from headrace.config.services import Checkpointing, Replay, Reward, Rollout, Run, Trainer, WeightChannel


class Config(Section):
    run: Run = Run()
    grpo: GRPO = GRPO()
    loss_fn: LossFn = LossFn()
    policy: Policy = Policy()
    data: Data = Data()
    env: dict[str, Env] = Field({}, description="environments, by the name that data sets call them")
    replay: Replay = Replay()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    trainer: Trainer = Trainer()
    weight_channel: WeightChannel = WeightChannel()
    checkpointing: Checkpointing = Checkpointing()

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if self.loss_fn.use_importance_sampling_correction and self.loss_fn.prev_logprobs_source == "generation":
            raise ValueError(
                "loss_fn.use_importance_sampling_correction true with loss_fn.prev_logprobs_source generation: "
                "the ratio already corrects for the behaviour policy; choose one"
            )
        if self.grpo.num_generations_per_prompt < 2 and self.grpo.use_leave_one_out_baseline:
            raise ValueError(
                "grpo.num_generations_per_prompt 1 with grpo.use_leave_one_out_baseline true: "
                "a group of one has no others to take a baseline from; use 2 or more"
            )
        for source in (*self.data.train, *self.data.validation):
            if source.env_name is None or source.env_name not in self.env:
                known = ", ".join(sorted(self.env)) or "none"
                raise ValueError(
                    f"data: env_name {source.env_name!r} is not one of the environments under env ({known})"
                )
        for name, env in self.env.items():
            if env.target is None and env.type is None and name not in ("math", "reasoning_gym"):
                raise ValueError(
                    f"env.{name}: give `type` (math, reasoning_gym) or `target` (host:port of your environment)"
                )
        return self

    @property
    def run_folder(self) -> Path:
        """Folder of this run. Raises if the run has no id yet (`headrace up` makes one before it starts anything)."""
        if self.run.id is None:
            raise ValueError("run.id is not set")
        return Path(self.run.dir) / self.run.id

    @property
    def redis_url(self) -> str:
        """Where the buffer's server is: `replay.redis_url`, or the embedded server."""
        return self.replay.redis_url or f"redis://{self.replay.redis_host}:{self.replay.redis_port}/0"

    @property
    def checkpoint_folder(self) -> Path:
        folder = self.checkpointing.checkpoint_dir
        return Path(folder) if folder else self.run_folder / "checkpoints"
