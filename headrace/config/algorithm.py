"""`grpo` and `loss_fn`: keys, meanings and defaults as users of NeMo RL know them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.base import Section


class AsyncGRPO(Section):
    """How far generation may run ahead of training."""

    enabled: bool = Field(False, description="false is strict on-policy: age 0")
    max_trajectory_age_steps: int = Field(
        1, ge=0, description="law 2: a trajectory trained at step t has no token older than t minus this"
    )
    in_flight_weight_updates: bool = Field(
        False, description="refit without waiting for running generations: pause, receive, resume"
    )
    recompute_kv_cache_after_weight_updates: bool = Field(
        False, description="after an in-flight refit, recompute the KV cache of running requests with the new weights"
    )


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
    seed: int = Field(42, ge=0, description="order of prompts, initial states, sampling")
    async_grpo: AsyncGRPO = AsyncGRPO()

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
