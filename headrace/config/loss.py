"""`loss_fn` and `value_loss_fn`: keys, meanings and defaults are those of NeMo RL.

The formulae are in `services/trainer/learning/losses/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from headrace.config.in_yaml import in_yaml
from headrace.config.section import Section


class Clip(NamedTuple):
    """The bounds that a ratio is clipped to."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class ClippedRatio:
    """PPO and GRPO; GSPO with ratios `of_sequences`. `dual_clip` bounds the ratio where the advantage is negative."""

    clip: Clip
    dual_clip: float | None
    of_sequences: bool


@dataclasses.dataclass(frozen=True)
class ClippedWeight:
    """CISPO: the clipped ratio weights the log-probability, without a gradient."""

    clip: Clip


@dataclasses.dataclass(frozen=True)
class OnPolicyRatio:
    """The ratio is 1, with its gradient."""

    clip: None = None


@dataclasses.dataclass(frozen=True)
class NoRatio:
    """REINFORCE and RLOO: the log-probability itself."""

    clip: None = None


PolicyTerm = ClippedRatio | ClippedWeight | OnPolicyRatio | NoRatio

CLIP_KEYS = ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
# The keys that choose a form of the policy term other than the clipped ratio: what the form is, and the keys that it does not read.
_FORMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "force_on_policy_ratio": ("its ratio is 1", (*CLIP_KEYS, "proximal", "prev_logprobs_source")),
    "disable_ppo_ratio": ("it has no ratio", (*CLIP_KEYS, "proximal")),
    "use_cispo": (
        "CISPO weights log-probabilities by each token's clipped ratio",
        ("ratio_clip_c", "sequence_level_importance_ratios"),
    ),
}


class LossConfig(Section):
    """The policy's loss; formulae in `services/trainer/learning/losses/`."""

    # what the loss is averaged over
    token_level_loss: bool = Field(
        True,
        description="mean over all tokens (DAPO); false: mean over sequences of each sequence's mean (GRPO's paper, GSPO)",
    )
    constant_length: int | None = Field(
        None, ge=1, description="sum over tokens, divided by sequences times this constant (Dr. GRPO); null: not used"
    )

    # the ratio between the policy and the one before the update
    prev_logprobs_source: Literal["recompute", "generation"] = Field(
        "recompute",
        description="the ratio's denominator: the trainer's log-probabilities at the start of the step, or the behaviour policy's",
    )
    proximal: Literal["recompute", "interpolate"] | None = Field(
        None,
        description="decoupled PPO: clip against a proximal policy and weight tokens by exp(proximal - behaviour log-probability); "
        "the proximal policy is the trainer's at the start of the step (recompute), or is interpolated by age without a pass for it "
        "(interpolate)",
    )
    sequence_level_importance_ratios: bool = Field(
        False, description="ratios and importance weights of whole sequences (GSPO); needs token_level_loss false"
    )
    force_on_policy_ratio: bool = Field(
        False, description="ratio 1, with its gradient and without a clip; needs one optimizer step per batch"
    )
    disable_ppo_ratio: bool = Field(
        False, description="log-probabilities instead of ratios, and no clip (REINFORCE, RLOO)"
    )
    use_cispo: bool = Field(
        False, description="the clipped ratio weights the log-probability, without a gradient (CISPO)"
    )
    ratio_clip_min: float = Field(0.2, ge=0, le=1, description="the ratio is clipped below at 1 - this")
    ratio_clip_max: float = Field(
        0.2, ge=0, allow_inf_nan=True, description="the ratio is clipped above at 1 + this; .inf: not at all"
    )
    ratio_clip_c: float | None = Field(
        None, gt=1, description="dual clip: bound on the ratio where the advantage is negative; null: none"
    )
    probability_difference_mask: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="drop the policy term of a token whose probability is already further than this from the behaviour policy's, in "
        "the direction that the advantage pushes (DPPO). This adds to the clip of the ratio, which ratio_clip_min 1 and a large "
        "ratio_clip_max disable; null drops none",
    )

    # correction for the behaviour policy
    use_importance_sampling_correction: bool = Field(
        False, description="weight each token by exp(prev - behaviour log-probability)"
    )
    sequence_is_aggregation: Literal["mean", "sum"] = Field(
        "mean", description="a sequence's importance weight is exp of the mean, or of the sum, over its tokens"
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        None,
        description="importance weights outside the bounds are clamped (tis), set to 0 (icepop), or set to 0 in sequences whose "
        "geometric mean is outside the bounds (seq-mask-tis)",
    )
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0, description="upper bound; needs a type")
    truncated_importance_sampling_ratio_min: float | None = Field(
        None, ge=0, description="lower bound; needs a type; null is 0 for tis"
    )

    # the penalty that keeps the policy near the reference policy
    reference_policy_kl_penalty: float = Field(0.01, ge=0, description="beta; 0 loads no reference policy")
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="estimator of KL(policy || reference): -d, d²/2 or exp(d) - 1 - d, with d = reference - policy",
    )
    kl_input_clamp_value: float | None = Field(20.0, gt=0, description="bound on |d| inside the KL term")
    kl_output_clamp_value: float | None = Field(10.0, gt=0, description="bound on a token's KL term")
    use_on_policy_kl_approximation: bool = Field(
        False, description="weight the KL term by exp(policy - behaviour log-probability)"
    )
    use_kl_in_reward: bool = Field(
        False,
        description="subtract the KL penalty from the rewards of tokens (Reinforce++, PPO) instead of adding it to the loss",
    )

    positive_example_nll_weight: float = Field(
        0.0, ge=0, description="mu: negative log-likelihood of sequences with a reward above 0 (VAPO)"
    )

    @model_validator(mode="after")
    def _keys_agree(self) -> LossConfig:
        if problems := [*self._ratio_problems(), *self._importance_problems()]:
            raise ValueError("; ".join(problems))
        return self

    def _ratio_problems(self) -> Iterator[str]:
        if self.constant_length is not None and not self.token_level_loss:
            yield (
                f"constant_length {self.constant_length} with token_level_loss false, which divides by each sequence's own "
                "length; leave one of them out"
            )
        if self.sequence_level_importance_ratios and self.token_level_loss:
            yield "sequence_level_importance_ratios true with token_level_loss true; set token_level_loss false"
        chosen = [key for key in _FORMS if getattr(self, key)]
        for key in chosen[1:]:
            yield f"{key} true with {chosen[0]} true: each is another form of the policy term; leave one of them out"
        for form in chosen:
            why, unread = _FORMS[form]
            for key in unread:
                default = type(self).model_fields[key].default
                if (value := getattr(self, key)) != default:
                    yield (
                        f"{key} {in_yaml(value)} with {form} true: {why}; leave one of them out, or set {key} to its default, "
                        f"{in_yaml(default)}"
                    )
            if self.sequence_level_importance_ratios and form != "use_cispo" and not self.weighs_by_importance:
                yield (
                    f"sequence_level_importance_ratios true with {form} true: {why}, and no importance weights are enabled; leave one of "
                    "them out, or set use_importance_sampling_correction true"
                )
        if self.use_cispo and not self.token_level_loss:
            yield "use_cispo true with token_level_loss false; set token_level_loss true"
        if self.prev_logprobs_source == "generation" and self.proximal:
            yield (
                f"prev_logprobs_source generation with proximal {self.proximal}: each names another denominator of the ratio; leave one of "
                "them out"
            )

    def _importance_problems(self) -> Iterator[str]:
        if self.use_importance_sampling_correction and self.prev_logprobs_source == "generation":
            yield (
                "use_importance_sampling_correction true with prev_logprobs_source generation: the ratio already corrects for "
                "the behaviour policy; choose one"
            )
        kind = self.truncated_importance_sampling_type
        high, low = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        if kind is None:
            for suffix, bound in (("ratio", high), ("ratio_min", low)):
                if bound is not None:
                    yield (
                        f"truncated_importance_sampling_{suffix} {bound} without truncated_importance_sampling_type; set a type "
                        "(tis, icepop, seq-mask-tis), or leave the bound out"
                    )
            return
        name = f"truncated_importance_sampling_type {kind}"
        if not self.weighs_by_importance:
            yield f"{name} without importance weights; set use_importance_sampling_correction true"
        if high is None:
            yield f"{name} without truncated_importance_sampling_ratio, its upper bound; give one"
        if low is None and kind != "tis":
            yield f"{name} without truncated_importance_sampling_ratio_min, its lower bound; give one"
        if high is not None and low is not None and low > high:
            yield (
                f"truncated_importance_sampling_ratio_min {low} is above truncated_importance_sampling_ratio {high}; swap them"
            )
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            yield (
                f"{name} with sequence_level_importance_ratios true: it masks sequences by the weights of their tokens; choose "
                "tis or icepop"
            )

    @property
    def policy_term(self) -> PolicyTerm:
        """The form of the policy term, with the values of the keys that it reads."""
        if self.force_on_policy_ratio:
            return OnPolicyRatio()
        if self.disable_ppo_ratio:
            return NoRatio()
        clip = Clip(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)
        if self.use_cispo:
            return ClippedWeight(clip)
        return ClippedRatio(clip, self.ratio_clip_c, self.sequence_level_importance_ratios)

    @property
    def weighs_by_importance(self) -> bool:
        """Whether importance weights multiply the policy term, because they are enabled or a part of decoupled PPO."""
        return self.use_importance_sampling_correction or self.proximal is not None

    @property
    def corrects_for_sampling(self) -> bool:
        """Whether the policy term takes into account which policy sampled a token: an older one, or one computed otherwise."""
        clips = self.prev_logprobs_source == "generation" and self.policy_term.clip is not None
        return clips or self.weighs_by_importance or self.probability_difference_mask is not None

    @property
    def kl_in_reward(self) -> bool:
        """Whether advantage estimators subtract a KL penalty from the rewards, and so need a reference policy."""
        return self.reference_policy_kl_penalty > 0 and self.use_kl_in_reward

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term, and so needs a reference policy."""
        return self.reference_policy_kl_penalty > 0 and not self.use_kl_in_reward


class ValueLossConfig(Section):
    """The value model's loss: half the squared error, clipped as in PPO; formula in `services/trainer/learning/losses/value_loss.py`."""

    scale: float = Field(0.4, gt=0, description="factor of the whole loss")
    cliprange: float | None = Field(
        0.2,
        gt=0,
        description="values are clipped to this distance from those at the start of the step; null: no clip",
    )
