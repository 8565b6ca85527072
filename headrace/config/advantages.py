"""How rewards become advantages: `reward_scaling`, `reward_shaping` and `adv_estimator` of `grpo` and `ppo`.

Keys, meanings and defaults are those that users of NeMo RL know.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config.base import Section

OF_GRPO = ("grpo", "gdpo", "reinforce_plus_plus", "opd")
OF_PPO = ("gae", "raw_reward")
# of both, those that give tokens rewards of their own, from which a KL penalty can be taken
KL_IN_REWARD = ("reinforce_plus_plus", "gae")


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
            raise ValueError(f"source_min {self.source_min} is not below source_max {self.source_max}")
        if self.target_min == self.target_max:
            raise ValueError(f"target_min and target_max are both {self.target_min}: every reward would be the same")
        return self


class RewardShaping(Section):
    """Penalties on long or truncated completions, applied after `reward_scaling`; formulae in `services/trainer/learning/rewards.py`."""

    enabled: bool = False
    overlong_buffer_length: int = Field(
        128, ge=1, description="tokens before max_response_length over which the penalty grows from 0 to the whole"
    )
    overlong_buffer_penalty: float = Field(
        1.0, ge=0, description="subtracted from the reward of a completion of max_response_length or more tokens"
    )
    max_response_length: int | None = Field(
        None, ge=1, description="in tokens that the policy wrote; null takes policy.max_total_sequence_length"
    )
    stop_properly_penalty_coef: float | None = Field(
        None,
        ge=0,
        le=1,
        description="the reward of a completion that was cut off is multiplied by this; the overlong keys then do nothing",
    )

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys with a value of their own that do nothing, because `stop_properly_penalty_coef` takes their place."""
        if not self.enabled or self.stop_properly_penalty_coef is None:
            return ()
        overlong = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
        return tuple(key for key in overlong if getattr(self, key) != type(self).model_fields[key].default)


class AdvEstimator(Section):
    """How rewards become advantages; formulae in `services/trainer/learning/algorithms/`."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "opd"] = Field(
        "grpo",
        description="grpo: relative to the group; gdpo: each reward component relative to the group, then their weighted sum; "
        "reinforce_plus_plus: whitened over the batch; opd: the teacher's log-probability minus the policy's",
    )
    normalize_rewards: bool | None = Field(None, description="grpo and gdpo; null takes grpo.normalize_rewards")
    use_leave_one_out_baseline: bool | None = Field(
        None, description="grpo and gdpo; null takes grpo.use_leave_one_out_baseline"
    )
    teacher_model_name: str | None = Field(
        None, description="opd: directory or name of the teacher, a causal language model of the policy's vocabulary"
    )
    minus_baseline: bool = Field(True, description="reinforce_plus_plus: subtract the group's mean reward")
    reward_weights: list[float] | None = Field(
        None,
        description="gdpo: one weight per reward component, in alphabetical order of their names; null weights all alike",
    )
    kl_to_go: bool = Field(
        False,
        description="reinforce_plus_plus with loss_fn.use_kl_in_reward: penalize a token by the divergence from itself to the end, as in "
        "the paper, not only by its own",
    )

    @field_validator("name", mode="before")
    @classmethod
    def _of_grpo(cls, name: Any) -> Any:
        if name in OF_PPO:
            raise ValueError(f"{name} is an estimator of ppo; write a `ppo` section, or choose {', '.join(OF_GRPO)}")
        return name

    @model_validator(mode="after")
    def _keys_are_of_this_estimator(self) -> AdvEstimator:
        if self.reward_weights is not None and self.name != "gdpo":
            raise ValueError(
                f"reward_weights {self.reward_weights} with name {self.name}: only gdpo weighs components; leave it out, or "
                "set name: gdpo"
            )
        if not all(map(math.isfinite, self.reward_weights or ())):
            raise ValueError(f"reward_weights {self.reward_weights} are not all finite numbers")
        for key, given in (("minus_baseline", not self.minus_baseline), ("kl_to_go", self.kl_to_go)):
            if given and self.name != "reinforce_plus_plus":
                raise ValueError(
                    f"{key} {str(getattr(self, key)).lower()} with name {self.name}: it is of reinforce_plus_plus alone; "
                    "leave it out, or set name: reinforce_plus_plus"
                )
        return self


class PPOAdvEstimator(Section):
    """How rewards become advantages; formulae in `services/trainer/learning/algorithms/ppo.py`."""

    name: Literal["gae", "raw_reward"] = Field(
        "gae",
        description="gae: generalized advantage estimation with a value model; raw_reward: the reward itself, and no value model",
    )
    gae_lambda: float = Field(0.95, ge=0, le=1)
    gae_gamma: float = Field(1.0, ge=0, le=1, description="discount of a token's future")
    normalize_advantages: bool = Field(True, description="whiten over the tokens of the batch")
    gae_lambda_value: float | None = Field(
        None, ge=0, le=1, description="lambda of the value model's returns; null takes gae_lambda"
    )
    gae_lambda_policy: float | None = Field(
        None, ge=0, le=1, description="lambda of the policy's advantages; null takes gae_lambda"
    )
    length_adaptive_alpha: float = Field(
        0.0,
        ge=0,
        description="above 0, the policy's lambda is 1 - 1 / (this times the length), whatever gae_lambda_policy says (VAPO)",
    )

    @field_validator("name", mode="before")
    @classmethod
    def _of_ppo(cls, name: Any) -> Any:
        if name in OF_GRPO:
            raise ValueError(f"{name} is an estimator of grpo; write a `grpo` section, or choose {', '.join(OF_PPO)}")
        return name

    @model_validator(mode="after")
    def _raw_rewards_take_no_lambda(self) -> PPOAdvEstimator:
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
