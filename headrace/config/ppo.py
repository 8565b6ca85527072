"""`ppo`: proximal policy optimization with a value model, instead of `grpo`. Keys are those of NeMo RL."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headrace.config.algorithm import AdvEstimatorConfig, AlgorithmConfig, AsyncConfig
from headrace.config.marks import Fixed, MayChange


class PPOAdvEstimatorConfig(AdvEstimatorConfig):
    """The estimator, which turns rewards into advantages; formulae in `services/trainer/learning/algorithms/ppo.py`."""

    name: Literal["gae", "raw_reward"] = Field(
        "gae",
        description="gae: generalized advantage estimation with a value model; raw_reward: the reward itself, and no value model",
    )
    gae_lambda: float = Field(0.95, ge=0, le=1)
    gae_gamma: float = Field(1.0, ge=0, le=1, description="discount of a token's future")
    normalize_advantages: bool = Field(True, description="whiten over the tokens of the batch")
    gae_lambda_value: float | None = Field(
        None, ge=0, le=1, description="lambda of the value model's returns; null: gae_lambda"
    )
    gae_lambda_policy: float | None = Field(
        None, ge=0, le=1, description="lambda of the policy's advantages; null: gae_lambda"
    )
    length_adaptive_alpha: float = Field(
        0.0,
        ge=0,
        description="if above 0, the policy's lambda is 1 - 1 / (this times the length), whatever gae_lambda_policy is (VAPO)",
    )

    @model_validator(mode="after")
    def _raw_rewards_take_no_lambda(self) -> PPOAdvEstimatorConfig:
        given = {
            "gae_lambda_value": self.gae_lambda_value,
            "gae_lambda_policy": self.gae_lambda_policy,
            "length_adaptive_alpha": self.length_adaptive_alpha or None,
        }
        for key, value in given.items():
            if self.name == "raw_reward" and value is not None:
                raise ValueError(
                    f"{key} {value} with name raw_reward, which takes no lambda; leave it out, or set name: gae"
                )
        return self


class PPOConfig(AlgorithmConfig):
    """PPO with a value model, instead of `grpo`: a configuration has one of the two sections."""

    name: ClassVar[str] = "ppo"

    max_num_epochs: MayChange[int] = Field(100_000, ge=1, description="passes over the training prompts")
    max_num_steps: MayChange[int] = Field(100_000, ge=1, description="stop after this many trainer steps")
    val_period: MayChange[int] = Field(20, ge=0, description="steps from one validation to the next; 0: never validate")
    ppo_epochs: MayChange[int] = Field(4, ge=1, description="passes of the policy over each batch")
    critic_ppo_epochs: MayChange[int | None] = Field(
        None, ge=1, description="passes of the value model over each batch; null: ppo_epochs"
    )
    policy_training_start_step: MayChange[int] = Field(
        0, ge=0, description="the first step that trains the policy; earlier steps train only the value model"
    )
    scheduler_counts: Fixed[Literal["steps", "epochs"]] = Field(
        "steps",
        description="what policy.scheduler and value.scheduler count: trainer steps, or passes over a batch; a step has ppo_epochs "
        "(critic_ppo_epochs) passes",
    )
    adv_estimator: MayChange[PPOAdvEstimatorConfig] = PPOAdvEstimatorConfig()
    async_ppo: AsyncConfig = AsyncConfig()

    @model_validator(mode="after")
    def _the_policy_is_trained(self) -> PPOConfig:
        if self.policy_training_start_step >= self.max_num_steps:
            raise ValueError(
                f"policy_training_start_step {self.policy_training_start_step} is not below max_num_steps "
                f"{self.max_num_steps}: the policy would never be trained"
            )
        return self

    @property
    def asynchrony(self) -> AsyncConfig:
        return self.async_ppo

    @property
    def first_policy_step(self) -> int:
        return self.policy_training_start_step

    def policy_epochs(self, step: int) -> int:
        return self.ppo_epochs if step >= self.first_policy_step else 0

    @property
    def value_epochs(self) -> int:
        return self.critic_ppo_epochs or self.ppo_epochs

    @property
    def schedule_counts_epochs(self) -> bool:
        return self.scheduler_counts == "epochs"
