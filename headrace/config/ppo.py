"""`ppo`: proximal policy optimisation with a value model, in the place of `grpo`; keys as users of NeMo RL know them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headrace.config.advantages import PPOAdvEstimator
from headrace.config.algorithm import Algorithm, Asynchrony


class PPO(Algorithm):
    """PPO with a value model, in place of `grpo`: a configuration has one of the two sections."""

    name: ClassVar[str] = "ppo"

    max_num_epochs: int = Field(100_000, ge=1, description="passes over the training prompts")
    max_num_steps: int = Field(100_000, ge=1, description="stop after this many trainer steps")
    val_period: int = Field(20, ge=0, description="validate every this many steps; 0 never does")
    val_at_start: bool = Field(True, description="validate before the first step")
    ppo_epochs: int = Field(4, ge=1, description="passes of the policy over each batch")
    critic_ppo_epochs: int | None = Field(
        None, ge=1, description="passes of the value model over each batch; null takes ppo_epochs"
    )
    policy_training_start_step: int = Field(
        0, ge=0, description="the first step that trains the policy; those before it train the value model alone"
    )
    scheduler_counts: Literal["steps", "epochs"] = Field(
        "steps",
        description="what policy.scheduler and value.scheduler count: trainer steps, or passes over a batch, of which a step has "
        "ppo_epochs (critic_ppo_epochs)",
    )
    adv_estimator: PPOAdvEstimator = PPOAdvEstimator()
    async_ppo: Asynchrony = Asynchrony()

    @model_validator(mode="after")
    def _the_policy_is_trained(self) -> PPO:
        if self.policy_training_start_step >= self.max_num_steps:
            raise ValueError(
                f"policy_training_start_step {self.policy_training_start_step} is not below max_num_steps "
                f"{self.max_num_steps}: the policy would never be trained"
            )
        return self

    @property
    def asynchrony(self) -> Asynchrony:
        return self.async_ppo

    def policy_epochs(self, step: int) -> int:
        return self.ppo_epochs if step >= self.policy_training_start_step else 0

    @property
    def value_epochs(self) -> int:
        return self.critic_ppo_epochs or self.ppo_epochs

    @property
    def schedule_counts_epochs(self) -> bool:
        return self.scheduler_counts == "epochs"
