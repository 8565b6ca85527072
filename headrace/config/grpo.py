"""`grpo`: group-relative policy optimization, and the estimators that need no value model. Keys are those of NeMo RL."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headrace.config.algorithm import AdvEstimatorConfig, AlgorithmConfig, AsyncConfig
from headrace.config.marks import MayChange, ReadPath
from headrace.config.section import Bounded


class GRPOAdvEstimatorConfig(AdvEstimatorConfig):
    """The estimator, which turns rewards into advantages; formulae in `services/trainer/learning/algorithms/`."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "opd"] = Field(
        "grpo",
        description="grpo: rewards relative to the group; gdpo: each reward component relative to the group, then a weighted sum; "
        "reinforce_plus_plus: rewards whitened over the batch; opd: the teacher's log-probability minus the policy's",
    )
    normalize_rewards: bool | None = Field(None, description="grpo and gdpo; null: grpo.normalize_rewards")
    use_leave_one_out_baseline: bool | None = Field(
        None, description="grpo and gdpo; null: grpo.use_leave_one_out_baseline"
    )
    teacher_model_name: ReadPath[str | None] = Field(
        None, description="opd: directory or name of the teacher, a causal language model with the policy's vocabulary"
    )
    minus_baseline: bool = Field(True, description="reinforce_plus_plus: subtract the group's mean reward")
    reward_weights: list[Bounded] | None = Field(
        None,
        description="gdpo: weights of the reward components, in alphabetical order of their names; null: all equal",
    )
    kl_to_go: bool = Field(
        False,
        description="reinforce_plus_plus with loss_fn.use_kl_in_reward: a token pays for the divergence from itself to the end, as in "
        "the paper, not only for its own",
    )

    @model_validator(mode="after")
    def _keys_are_of_this_estimator(self) -> GRPOAdvEstimatorConfig:
        if self.reward_weights is not None and self.name != "gdpo":
            raise ValueError(
                f"reward_weights {self.reward_weights} with name {self.name}: only gdpo weighs components; leave it out, or "
                "set name: gdpo"
            )
        for key, given in (("minus_baseline", not self.minus_baseline), ("kl_to_go", self.kl_to_go)):
            if given and self.name != "reinforce_plus_plus":
                raise ValueError(
                    f"{key} {str(getattr(self, key)).lower()} with name {self.name}: only reinforce_plus_plus uses it; "
                    "leave it out, or set name: reinforce_plus_plus"
                )
        return self

    @property
    def has_group_baseline(self) -> bool:
        return super().has_group_baseline or (self.name == "reinforce_plus_plus" and self.minus_baseline)


class GRPOConfig(AlgorithmConfig):
    """Group-relative policy optimization: no value model, advantages from the other trajectories of a prompt."""

    name: ClassVar[str] = "grpo"

    normalize_rewards: MayChange[bool] = Field(True, description="divide advantages by the group's standard deviation")
    use_leave_one_out_baseline: MayChange[bool] = Field(
        True,
        description="baseline and deviation from the group's other trajectories; where these have almost equal rewards, the deviation is "
        "almost 0 and the advantage large",
    )
    adv_estimator: MayChange[GRPOAdvEstimatorConfig] = GRPOAdvEstimatorConfig()
    async_grpo: AsyncConfig = AsyncConfig()

    @property
    def asynchrony(self) -> AsyncConfig:
        return self.async_grpo

    @property
    def normalizes(self) -> bool:
        """Whether the estimators `grpo` and `gdpo` divide by the group's standard deviation."""
        own = self.adv_estimator.normalize_rewards
        return self.normalize_rewards if own is None else own

    @property
    def leaves_one_out(self) -> bool:
        """Whether the estimators `grpo` and `gdpo` compare a trajectory with only the others of its group."""
        own = self.adv_estimator.use_leave_one_out_baseline
        return self.use_leave_one_out_baseline if own is None else own
