"""The whole configuration, and what must hold between sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from headrace.config.algorithm import GRPO, Algorithm
from headrace.config.base import Section
from headrace.config.data import Data, Env
from headrace.config.loss import LossFn, ValueLossFn
from headrace.config.policy import Policy
from headrace.config.ppo import PPO
from headrace.config.services import Checkpointing, Replay, Reward, Rollout, Run, Trainer, WeightChannel
from headrace.config.value import Value


class Config(Section):
    run: Run = Run()
    grpo: GRPO | None = None
    ppo: PPO | None = None
    loss_fn: LossFn = LossFn()
    value_loss_fn: ValueLossFn = ValueLossFn()
    policy: Policy = Policy()
    value: Value = Value()
    data: Data = Data()
    env: dict[str, Env] = Field({}, description="environments, by the name that data sets call them")
    replay: Replay = Replay()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    trainer: Trainer = Trainer()
    weight_channel: WeightChannel = WeightChannel()
    checkpointing: Checkpointing = Checkpointing()

    @model_validator(mode="before")
    @classmethod
    def _grpo_unless_ppo(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("grpo") is None and values.get("ppo") is None:
            return {**values, "grpo": {}}
        return values

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        _check_one_algorithm(self)
        _check_batches(self)
        grpo = self.grpo
        if grpo is not None and grpo.num_generations_per_prompt < 2 and grpo.use_leave_one_out_baseline:
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
    def algorithm(self) -> Algorithm:
        """`grpo` or `ppo`, whichever is in force."""
        algorithm = self.ppo or self.grpo
        assert algorithm is not None
        return algorithm

    @property
    def policy_batch(self) -> int:
        """Trajectories in an optimizer step of the policy."""
        return self.policy.train_global_batch_size or self.algorithm.batch_size

    @property
    def value_batch(self) -> int:
        """Trajectories in an optimizer step of the value model."""
        return self.value.train_global_batch_size or self.policy_batch

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


def _check_one_algorithm(config: Config) -> None:
    if config.grpo is not None and config.ppo is not None:
        raise ValueError(
            "grpo and ppo are both given: a run has one of them; leave the other out (on the command line, grpo=null)"
        )


def _check_batches(config: Config) -> None:
    """Every optimizer step takes equally many whole trajectories of the batch."""
    algorithm = config.algorithm
    for section, size in (
        ("policy", config.policy.train_global_batch_size),
        ("value", config.value.train_global_batch_size),
    ):
        if size is not None and algorithm.batch_size % size:
            raise ValueError(
                f"{section}.train_global_batch_size {size} does not divide the {algorithm.batch_size} trajectories of a batch "
                f"({algorithm.name}.num_prompts_per_step {algorithm.num_prompts_per_step} x num_generations_per_prompt "
                f"{algorithm.num_generations_per_prompt}); give a divisor, or null for one optimizer step a batch"
            )
