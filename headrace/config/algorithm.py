"""`grpo` and `loss_fn`: keys, meanings and defaults as users of NeMo RL know them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headrace.config.base import Section


class AsyncGRPO(Section):
    """How far generation may run ahead of training."""

    enabled: bool = Field(False, description="false is strict on-policy: age 0")
    max_trajectory_age_steps: int = Field(
        1, ge=0, description="law 2: a trajectory trained at step t has no token older than t minus this"
    )
    staleness_policy: Literal["ordered", "drop", "mask"] = Field(
        "ordered",
        description="how the bound is kept: by the order of generation (nothing dropped), by dropping groups over age, or by "
        "masking tokens over age",
    )
    ahead_steps: int | None = Field(
        None,
        ge=0,
        description="under drop and mask, how many steps generation may run ahead, at least the bound; null takes the bound",
    )
    in_flight_weight_updates: bool = Field(
        False, description="refit without waiting for running generations: pause, receive, resume"
    )
    recompute_kv_cache_after_weight_updates: bool = Field(
        False, description="after an in-flight refit, recompute the KV cache of running requests with the new weights"
    )


class RewardScaling(Section):
    """`target_min + (clamp(r, source_min, source_max) - source_min) / (source_max - source_min) * (target_max - target_min)`"""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0

    @model_validator(mode="after")
    def _ranges(self) -> RewardScaling:
        if self.source_min >= self.source_max:
            raise ValueError(
                f"grpo.reward_scaling.source_min {self.source_min} is not below source_max {self.source_max}"
            )
        if self.target_min == self.target_max:
            raise ValueError(
                f"grpo.reward_scaling.target_min and target_max are both {self.target_min}: every reward would be the same"
            )
        return self


class GRPO(Section):
    num_prompts_per_step: int = Field(32, ge=1, description="P: groups in a trainer step")
    num_generations_per_prompt: int = Field(16, ge=1, description="n: trajectories in a group")
    max_num_epochs: int = Field(1, ge=1, description="passes over the training prompts")
    max_num_steps: int = Field(1_000_000, ge=1, description="stop after this many trainer steps")
    normalize_rewards: bool = Field(True, description="divide advantages by the group's standard deviation")
    use_leave_one_out_baseline: bool = Field(
        True, description="baseline and deviation from the group's other trajectories"
    )
    val_period: int = Field(10, ge=0, description="validate every this many steps; 0 never does")
    val_at_start: bool = Field(False, description="validate before the first step")
    val_at_end: bool = Field(False, description="validate after the last step")
    max_val_samples: int = Field(256, ge=1, description="held-out prompts in a validation")
    use_dynamic_sampling: bool = Field(
        False, description="groups whose scaled rewards are all equal are filtered, and others trained in their place"
    )
    dynamic_sampling_max_gen_batches: int = Field(
        10,
        ge=1,
        description="batches' worth of groups that may be scored for one step before the run ends with an error",
    )
    batch_multiplier: float = Field(
        1.0, gt=0, description="with dynamic sampling: a generated batch is this times num_prompts_per_step groups"
    )
    reward_scaling: RewardScaling = RewardScaling()
    seed: int = Field(42, ge=0, description="order of prompts, initial states, sampling")
    async_grpo: AsyncGRPO = AsyncGRPO()

    @model_validator(mode="after")
    def _keys_agree(self) -> GRPO:
        if self.batch_multiplier != 1 and not self.use_dynamic_sampling:
            raise ValueError(
                f"grpo.batch_multiplier {self.batch_multiplier} without grpo.use_dynamic_sampling: set it to 1, or turn "
                "dynamic sampling on"
            )
        ahead = self.async_grpo.ahead_steps
        if ahead is not None and self.async_grpo.staleness_policy == "ordered":
            raise ValueError(
                f"grpo.async_grpo.ahead_steps {ahead} with staleness_policy ordered, which never runs further ahead than "
                "max_trajectory_age_steps: leave it out, or choose drop or mask"
            )
        if ahead is not None and ahead < self.max_age:
            raise ValueError(
                f"grpo.async_grpo.ahead_steps {ahead} is below max_trajectory_age_steps {self.max_age}; raise it"
            )
        return self

    @property
    def generation_batch(self) -> float:
        """Groups that dynamic sampling counts as one generated batch."""
        return self.num_prompts_per_step * self.batch_multiplier

    @property
    def ahead_steps(self) -> int:
        """How many steps generation may run ahead of training."""
        ahead = self.async_grpo.ahead_steps
        return self.max_age if ahead is None else ahead

    @property
    def max_age(self) -> int:
        """A: the age bound in force, in trainer steps."""
        return self.async_grpo.max_trajectory_age_steps if self.async_grpo.enabled else 0


class LossFn(Section):
    """The clipped policy-gradient loss; formulae in `services/trainer/loss.py`."""

    reference_policy_kl_penalty: float = Field(0.01, ge=0, description="beta; 0 loads no reference policy")
    reference_policy_kl_type: Literal["k3"] = Field("k3", description="estimator of KL(policy || reference)")
    kl_input_clamp_value: float | None = Field(20.0, gt=0, description="bound on |ref - curr| inside the KL term")
    kl_output_clamp_value: float | None = Field(10.0, gt=0, description="bound on a token's KL term")
    ratio_clip_min: float = Field(0.2, ge=0, le=1, description="the ratio is clipped below at 1 - this")
    ratio_clip_max: float = Field(0.2, ge=0, description="the ratio is clipped above at 1 + this")
    use_importance_sampling_correction: bool = Field(
        False, description="weigh each token by exp(prev - behaviour log-probability)"
    )
    prev_logprobs_source: Literal["recompute", "generation"] = Field(
        "recompute",
        description="the ratio's denominator: the trainer's log-probabilities at the start of the step, or the behaviour policy's",
    )
