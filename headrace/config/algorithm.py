"""The base of `grpo` and `ppo`: batches, validation, asynchrony, and how rewards are scaled and shaped.

Keys, meanings and defaults are those of NeMo RL.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator

from headrace.config.in_yaml import in_yaml
from headrace.config.marks import Fixed, MayChange
from headrace.config.section import Bounded, Section
from headrace.records.score import LARGEST_REWARD

# the estimators of each algorithm
ESTIMATORS = {"grpo": ("grpo", "gdpo", "reinforce_plus_plus", "opd"), "ppo": ("gae", "raw_reward")}


class AsyncConfig(Section):
    """The limits on how far generation may run ahead of training."""

    enabled: Fixed[bool] = Field(False, description="false is strict on-policy: age 0")
    max_trajectory_age_steps: Fixed[int] = Field(
        1, ge=0, description="law 2: a trajectory trained at step t has no token older than t minus this"
    )
    staleness_policy: Fixed[Literal["ordered", "drop", "mask"]] = Field(
        "ordered",
        description="how the bound is kept: by the order of generation (nothing dropped), by dropping groups over age, or by "
        "masking tokens over age",
    )
    ahead_steps: MayChange[int | None] = Field(
        None,
        ge=0,
        description="under drop and mask: how many steps generation may run ahead, at least the bound; null: as many as the bound",
    )
    in_flight_weight_updates: MayChange[bool] = Field(
        False, description="refit without waiting for running generations: pause, receive, resume"
    )
    recompute_kv_cache_after_weight_updates: MayChange[bool] = Field(
        False, description="after an in-flight refit, recompute the KV cache of running requests with the new weights"
    )

    @model_validator(mode="after")
    def _keys_agree(self) -> AsyncConfig:
        if self.ahead_steps is not None and self.staleness_policy == "ordered":
            raise ValueError(
                f"ahead_steps {self.ahead_steps} with staleness_policy ordered, which never runs further ahead than "
                "max_trajectory_age_steps; leave it out, or choose drop or mask"
            )
        if self.ahead_steps is not None and self.ahead_steps < self.max_age:
            raise ValueError(
                f"ahead_steps {self.ahead_steps} is below max_trajectory_age_steps {self.max_age}; raise it"
            )
        return self

    @property
    def max_age(self) -> int:
        """A: the age bound in force, in trainer steps."""
        return self.max_trajectory_age_steps if self.enabled else 0


class RewardScalingConfig(Section):
    """`target_min + (clamp(r, source_min, source_max) - source_min) / (source_max - source_min) * (target_max - target_min)`"""

    enabled: bool = False
    source_min: Bounded = 0.0
    source_max: Bounded = 1.0
    target_min: Bounded = 0.0
    target_max: Bounded = 1.0

    @model_validator(mode="after")
    def _ranges(self) -> RewardScalingConfig:
        if self.source_min >= self.source_max:
            raise ValueError(f"source_min {self.source_min} is not below source_max {self.source_max}")
        if self.target_min == self.target_max:
            raise ValueError(f"target_min and target_max are both {self.target_min}: every reward would be the same")
        return self


class RewardShapingConfig(Section):
    """Penalties on long or truncated completions, applied after `reward_scaling`; formulae in `services/trainer/learning/rewards.py`."""

    enabled: bool = False
    overlong_buffer_length: int = Field(
        128, ge=1, description="tokens before max_response_length over which the penalty grows from 0 to its full size"
    )
    overlong_buffer_penalty: float = Field(
        1.0, ge=0, le=LARGEST_REWARD, description="full penalty, for a completion of max_response_length or more tokens"
    )
    max_response_length: int | None = Field(
        None, ge=1, description="in tokens that the policy wrote; null: policy.max_total_sequence_length"
    )
    stop_properly_penalty_coef: float | None = Field(
        None,
        ge=0,
        le=1,
        description="factor on the reward of a completion that was cut off; the overlong keys then have no effect",
    )

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys that are set but have no effect, because `stop_properly_penalty_coef` replaces them."""
        if not self.enabled or self.stop_properly_penalty_coef is None:
            return ()
        overlong = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
        return tuple(key for key in overlong if getattr(self, key) != type(self).model_fields[key].default)


class AdvEstimatorConfig(Section):
    """The estimator, which turns rewards into advantages."""

    name: str

    @field_validator("name", mode="before")
    @classmethod
    def _of_this_algorithm(cls, name: Any) -> Any:
        own = get_args(cls.model_fields["name"].annotation)
        for algorithm, names in ESTIMATORS.items():
            if name in names and name not in own:
                raise ValueError(
                    f"{name} is an estimator of {algorithm}; write a `{algorithm}` section, or choose {', '.join(own)}"
                )
        return name

    @property
    def takes_kl(self) -> bool:
        """Whether tokens have their own rewards, from which a KL penalty can be taken (`loss_fn.use_kl_in_reward`)."""
        return self.name in ("reinforce_plus_plus", "gae")

    @property
    def has_group_baseline(self) -> bool:
        """Whether an advantage is measured against the rewards of the trajectory's group."""
        return self.name in ("grpo", "gdpo")

    @property
    def weighs_components(self) -> bool:
        """Whether the estimator reads the components of a reward, not only the reward."""
        return self.name == "gdpo"

    @property
    def has_teacher(self) -> bool:
        return self.name == "opd"

    @property
    def has_value_model(self) -> bool:
        return self.name == "gae"


class AlgorithmConfig(Section):
    """The keys that `grpo` and `ppo` share: which batches a step trains on, and when the run validates and ends."""

    name: ClassVar[str]  # the section's

    num_prompts_per_step: Fixed[int] = Field(32, ge=1, description="P: groups in a trainer step")
    num_generations_per_prompt: Fixed[int] = Field(16, ge=1, description="n: trajectories in a group")
    max_num_epochs: MayChange[int] = Field(1, ge=1, description="passes over the training prompts")
    max_num_steps: MayChange[int] = Field(1_000_000, ge=1, description="stop after this many trainer steps")
    val_period: MayChange[int] = Field(10, ge=0, description="steps from one validation to the next; 0: never validate")
    val_at_start: MayChange[bool | None] = Field(
        None,
        description="validate the initial model, before the first step; null: if val_period is above 0. What a run has gained is measured "
        "from there, and the best weights may be these",
    )
    val_at_end: MayChange[bool] = Field(False, description="validate after the last step")
    val_start_at: MayChange[int] = Field(-1, description="val_period takes effect after this many steps")
    max_val_samples: MayChange[int] = Field(
        256, ge=1, description="held-out prompts in a validation, the first of data.validation"
    )
    val_num_generations_per_prompt: MayChange[int] = Field(
        1,
        ge=1,
        description="completions of each held-out prompt; with several, pass_k is the share of prompts that any of them solves",
    )
    stop_at_validation_metric: MayChange[str | None] = Field(
        None,
        pattern=r"^(val:)?(accuracy(/.+)?|pass_k)$",
        description="the run ends, with a checkpoint, once this metric is at least stop_at_validation_threshold",
    )
    stop_at_validation_threshold: MayChange[float | None] = Field(None, description="for stop_at_validation_metric")
    use_dynamic_sampling: Fixed[bool] = Field(
        False,
        description="filter groups whose scaled rewards are all equal but for rounding, and train on others in their place",
    )
    dynamic_sampling_max_gen_batches: MayChange[int] = Field(
        10,
        ge=1,
        description="generated batches that may be scored for one step before the run ends with an error",
    )
    batch_multiplier: Fixed[float] = Field(
        1.0, gt=0, description="with dynamic sampling: a generated batch is this times num_prompts_per_step groups"
    )
    reward_scaling: Fixed[RewardScalingConfig] = RewardScalingConfig()
    reward_shaping: MayChange[RewardShapingConfig] = RewardShapingConfig()
    adv_estimator: AdvEstimatorConfig
    overlong_filtering: MayChange[bool] = Field(
        False,
        description="completions that were cut off at the length limit are left out of the loss, but not out of the baseline",
    )
    advantage_clip_low: MayChange[float | None] = Field(None, le=0, description="lower limit of advantages")
    advantage_clip_high: MayChange[float | None] = Field(None, ge=0, description="upper limit of advantages")
    seq_logprob_error_threshold: MayChange[float | None] = Field(
        None,
        ge=1,
        description="trajectories whose mean of exp |generation - training log-probability| is above this are left out of the loss",
    )
    skip_reference_policy_logprobs_calculation: MayChange[bool] = Field(
        False, description="load no reference policy; it is never loaded if nothing uses it"
    )
    seed: Fixed[int] = Field(
        42,
        ge=0,
        description="order of prompts, initial states, calls of episodes; single completions are not repeatable",
    )

    @model_validator(mode="after")
    def _dynamic_sampling_agrees(self) -> AlgorithmConfig:
        if self.batch_multiplier != 1 and not self.use_dynamic_sampling:
            raise ValueError(
                f"batch_multiplier {self.batch_multiplier} without use_dynamic_sampling; set it to 1, or turn "
                "dynamic sampling on"
            )
        return self

    @model_validator(mode="after")
    def _stop_is_whole(self) -> AlgorithmConfig:
        metric, threshold = self.stop_at_validation_metric, self.stop_at_validation_threshold
        if (metric is None) != (threshold is None):
            raise ValueError(
                f"stop_at_validation_metric {'null' if metric is None else metric} with stop_at_validation_threshold "
                f"{in_yaml(threshold)}: give both, or neither"
            )
        if metric is not None and metric.endswith("pass_k") and self.val_num_generations_per_prompt == 1:
            raise ValueError(
                "stop_at_validation_metric pass_k with val_num_generations_per_prompt 1, which gives no pass_k; use 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _clips_agree(self) -> AlgorithmConfig:
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"advantage_clip_low {low} is not below advantage_clip_high {high}: every advantage would be the same"
            )
        return self

    @property
    @abc.abstractmethod
    def asynchrony(self) -> AsyncConfig:
        """The limits on how far generation may run ahead."""

    @property
    def batch_size(self) -> int:
        """Trajectories in a trainer step: P times n."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def validates_at_start(self) -> bool:
        """Whether the initial model is validated before the first step."""
        return self.val_period > 0 if self.val_at_start is None else self.val_at_start

    @property
    def first_policy_step(self) -> int:
        """The first trainer step that trains the policy; earlier ones train the value model alone."""
        return 0

    def policy_epochs(self, step: int) -> int:
        """Passes of the policy over the batch of trainer step `step`; 0 while a value model is trained alone."""
        return 1

    @property
    def value_epochs(self) -> int:
        """Passes of the value model over each batch; 0 for an algorithm that never has one."""
        return 0

    @property
    def schedule_counts_epochs(self) -> bool:
        """Whether learning rate schedules advance after each epoch rather than each trainer step."""
        return False

    @property
    def generation_batch(self) -> float:
        """Groups that dynamic sampling counts as one generated batch."""
        return self.num_prompts_per_step * self.batch_multiplier

    @property
    def ahead_steps(self) -> int:
        """The number of steps that generation may run ahead of training."""
        ahead = self.asynchrony.ahead_steps
        return self.max_age if ahead is None else ahead

    @property
    def max_age(self) -> int:
        """A: the age bound in force, in trainer steps."""
        return self.asynchrony.max_age
