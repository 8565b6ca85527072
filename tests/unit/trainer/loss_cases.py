"""Micro-batches to take losses of, and the losses as they are written down: padded [B, S] in float64, term by term.

Nothing here calls the losses under test. `written` is for log-probabilities whose exponentials are finite in float64.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from headrace.config import LossConfig
from headrace_services.trainer.learning.batch import GlobalCounts, MicroBatch
from headrace_services.trainer.network.policy_model import PolicyOutput

SMALLEST_COUNT = 1e-8
FLOAT32 = float(np.log(np.finfo(np.float32).max))  # exponents above overflow there


@dataclasses.dataclass(frozen=True)
class Case:
    """B trajectories of at most S tokens: columns [B, S], but `multipliers` and `rewards` [B]."""

    present: Tensor
    mask: Tensor
    ages: Tensor
    advantages: Tensor
    multipliers: Tensor
    rewards: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor

    @property
    def counted(self) -> Tensor:
        """M."""
        return self.mask * self.present * self.multipliers[:, None]

    @property
    def counts(self) -> GlobalCounts:
        positive = self.counted[self.rewards > 0]
        sequences = self.multipliers[self.present.any(1)]
        return GlobalCounts(float(self.counted.sum()), float(sequences.sum()), float(positive.sum()))

    def under(self, config: LossConfig) -> Case:
        """The case as a learner would make it: one that forces the ratio to 1 takes one optimizer step a batch."""
        return dataclasses.replace(self, old_logprobs=self.logprobs) if config.force_on_policy_ratio else self

    def prev(self, config: LossConfig) -> Tensor:
        return self.rollout_logprobs if config.prev_logprobs_source == "generation" else self.old_logprobs

    def flat(self, values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        return values[self.present.bool()].to(dtype)

    def output(self, dtype: torch.dtype = torch.float64) -> PolicyOutput:
        return PolicyOutput(self.flat(self.logprobs, dtype).requires_grad_(), entropy=self.flat(self.entropy, dtype))

    def tokens(self, dtype: torch.dtype = torch.float64) -> MicroBatch:
        rows = torch.arange(len(self.rewards))[:, None].expand(self.present.shape)
        return MicroBatch(
            trajectory=rows[self.present.bool()],
            mask=self.flat(self.mask, dtype),
            ages=self.flat(self.ages, dtype),
            multipliers=self.multipliers.to(dtype),
            rewards=self.rewards.to(dtype),
            advantages=self.flat(self.advantages, dtype),
            rollout_logprobs=self.flat(self.rollout_logprobs, dtype),
            old_logprobs=self.flat(self.old_logprobs, dtype),
            ref_logprobs=self.flat(self.ref_logprobs, dtype),
        )

    def of(self, sequences: list[int]) -> Case:
        """The same with these sequences alone, in this order."""
        return Case(**{f.name: getattr(self, f.name)[sequences] for f in dataclasses.fields(self)})


def made(lengths: list[int], seed: int, spread: float = 1.0, young: float = 0.8) -> Case:
    """Sequences of these lengths; log-probabilities differ by about `spread`, and a share `young` of the tokens counts."""
    draw = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths, default=0))
    old = -draw.exponential(2.0, shape)

    def near() -> np.ndarray:
        return np.minimum(old + spread * draw.normal(size=shape), -1e-6)

    columns = {
        "present": np.arange(shape[1])[None, :] < np.array(lengths, dtype=int)[:, None],
        "mask": draw.random(shape) < young,
        "ages": draw.integers(0, 5, shape),
        "advantages": draw.normal(size=shape) * (draw.random(shape) < 0.9),
        "multipliers": draw.choice([0.0, 0.5, 1.0, 1.0, 1.0], shape[0]),
        "rewards": draw.normal(size=shape[0]),
        "logprobs": near(),
        "old_logprobs": old,
        "rollout_logprobs": near(),
        "ref_logprobs": near(),
        "entropy": draw.exponential(1.0, shape),
    }
    return Case(**{name: torch.from_numpy(values.astype(np.float64)) for name, values in columns.items()})


cases = st.builds(
    made,
    lengths=st.lists(st.integers(0, 4), max_size=4),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.05, 0.5, 3.0]),
    young=st.sampled_from([0.0, 0.7, 1.0]),
)


@st.composite
def configs(draw: st.DrawFn, **fixed: object) -> LossConfig:
    """Any configuration that is accepted."""
    keys: dict[str, object] = {
        "reference_policy_kl_penalty": draw(st.sampled_from([0.0, 0.01, 0.5])),
        "reference_policy_kl_type": draw(st.sampled_from(["k1", "k2", "k3"])),
        "kl_input_clamp_value": draw(st.sampled_from([None, 0.4, 20.0])),
        "kl_output_clamp_value": draw(st.sampled_from([None, 0.1, 10.0])),
        "use_on_policy_kl_approximation": draw(st.booleans()),
        "use_kl_in_reward": draw(st.sampled_from([False, False, True])),
        "positive_example_nll_weight": draw(st.sampled_from([0.0, 0.1])),
        "probability_difference_mask": draw(st.sampled_from([None, None, 0.05])),
        "sequence_is_aggregation": draw(st.sampled_from(["mean", "sum"])),
    }
    form = draw(st.sampled_from(["clip", "dual", "sequence", "cispo", "reinforce", "forced"]))
    reduction = "sequence" if form == "sequence" else draw(st.sampled_from(["token", "constant", "sequence"]))
    if form == "cispo" and reduction == "sequence":
        reduction = "constant"
    clipped = form not in ("reinforce", "forced")
    if clipped:
        keys["ratio_clip_min"] = draw(st.sampled_from([0.0, 0.2, 1.0]))
        keys["ratio_clip_max"] = draw(st.sampled_from([0.0, 0.28, 5.0, float("inf")]))
    keys |= {"ratio_clip_c": 1.5} if form == "dual" else {}
    keys |= {"sequence_level_importance_ratios": True} if form == "sequence" else {}
    keys |= {"use_cispo": True} if form == "cispo" else {}
    keys |= {"disable_ppo_ratio": True} if form == "reinforce" else {}
    keys |= {"force_on_policy_ratio": True} if form == "forced" else {}
    keys |= {"token_level_loss": False} if reduction == "sequence" else {}
    keys |= {"constant_length": 7} if reduction == "constant" else {}
    ratios = ["plain", "corrected"] + ([] if form == "forced" else ["generation"])
    ratios += ["recompute", "interpolate"] if clipped else []
    ratio = draw(st.sampled_from(ratios))
    keys |= {"prev_logprobs_source": "generation"} if ratio == "generation" else {}
    keys |= {"proximal": ratio} if ratio in ("recompute", "interpolate") else {}
    keys |= {"use_importance_sampling_correction": True} if ratio == "corrected" else {}
    if ratio not in ("plain", "generation"):
        kinds = [None, "tis", "icepop"] + ([] if form == "sequence" else ["seq-mask-tis"])
        kind = draw(st.sampled_from(kinds))
        low = draw(st.sampled_from([0.0, 0.5, 0.999] + ([None] if kind == "tis" else [])))
        keys |= truncation(kind, low, draw(st.sampled_from([1.002, 2.0])))
    return LossConfig(**{**keys, **fixed})


def truncation(kind: str | None, low: float | None, high: float) -> dict[str, object]:
    if kind is None:
        return {}
    return {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


def k(kind: str, d: Tensor) -> Tensor:
    return {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - 1 - d}[kind]


def exponential(exponent: Tensor, largest: float) -> Tensor:
    """exp, 0 where the exponent is above `largest`."""
    return torch.where(exponent > largest, 0.0, torch.exp(torch.where(exponent > largest, 0.0, exponent)))


def reduced(c: LossConfig, case: Case, x: Tensor) -> Tensor:
    m, s, z = case.mask * case.present, case.multipliers, case.counts
    if c.constant_length is not None:
        return (x * case.counted).sum() / max(z.sequences * c.constant_length, SMALLEST_COUNT)
    if c.token_level_loss:
        return (x * case.counted).sum() / max(z.tokens, SMALLEST_COUNT)
    return ((x * m).sum(1) / m.sum(1).clamp(min=SMALLEST_COUNT) * s).sum() / max(z.sequences, SMALLEST_COUNT)


def sequence_mean(case: Case, x: Tensor) -> Tensor:
    """[B, 1]"""
    return ((x * case.present).sum(1) / case.present.sum(1).clamp(min=SMALLEST_COUNT))[:, None]


@dataclasses.dataclass(frozen=True)
class Written:
    loss: Tensor
    sums: dict[str, Tensor]
    ratio: Tensor
    clamped: Tensor


def written(c: LossConfig, case: Case, logprobs: Tensor, largest: float = 1e9) -> Written:
    """Loss and metrics of the formulae; `logprobs` [B, S] carries the gradient, weights with an exponent above `largest` are 0."""
    rollout, advantages, fixed = case.rollout_logprobs, case.advantages, logprobs.detach()
    prev = case.prev(c)
    if c.proximal == "interpolate":
        prev = rollout + (fixed - rollout) * case.ages / (case.ages + 1)
    if c.force_on_policy_ratio:
        prev = fixed
    low, high = 1 - c.ratio_clip_min, 1 + c.ratio_clip_max
    clips = True
    if c.force_on_policy_ratio:
        r = r_c = torch.exp(logprobs - fixed)
        clips = False
    elif c.disable_ppo_ratio:
        r = r_c = logprobs
        clips = False
    else:
        log_ratio = logprobs - prev
        if c.sequence_level_importance_ratios:
            log_ratio = sequence_mean(case, log_ratio).expand_as(logprobs)
        r = torch.exp(log_ratio)
        r_c = r.clamp(low, high)
    l = -advantages * r_c.detach() * logprobs if c.use_cispo else torch.max(-advantages * r, -advantages * r_c)  # noqa: E741
    if c.ratio_clip_c is not None:
        l = torch.where(advantages < 0, torch.min(l, -advantages * c.ratio_clip_c), l)  # noqa: E741
    weighs = c.use_importance_sampling_correction or c.proximal is not None
    difference = (prev if weighs else case.old_logprobs) - rollout
    raw, truncated, oob = importance(c, case, difference, largest)
    weight = truncated if weighs else torch.ones_like(rollout)
    dropped = torch.zeros_like(rollout)
    if c.probability_difference_mask is not None:
        gap = torch.exp(fixed) - torch.exp(rollout)
        over, under = gap > c.probability_difference_mask, -gap > c.probability_difference_mask
        dropped = ((over & (advantages > 0)) | (under & (advantages < 0))).double()
    loss = reduced(c, case, weight * (1 - dropped) * l)
    penalty = kl_penalty(c, case, logprobs, largest)
    positive = case.counted * (case.rewards > 0)[:, None]
    nll = (-logprobs * positive).sum() / positive.sum().clamp(min=SMALLEST_COUNT) * (c.positive_example_nll_weight > 0)
    loss = loss + c.reference_policy_kl_penalty * penalty + c.positive_example_nll_weight * nll
    per_token = {
        **divergences(c, case),
        "approx_entropy": -torch.exp(fixed - rollout) * fixed,
        "probs_ratio": r,
        "probs_ratio_clamped": r_c,
        "clip_fraction_low": clips * (r < low) * (c.use_cispo | (advantages < 0)),
        "clip_fraction_high": clips * (r > high) * (c.use_cispo | (advantages > 0)),
    }
    if c.probability_difference_mask is not None:
        per_token["probability_difference_masked"] = dropped
    means = {"sampling_importance_ratio": raw}
    if c.truncated_importance_sampling_type is not None:
        means |= {"sampling_importance_ratio_truncated": truncated, "is_oob_ratio": oob}
    sequences = {"is_oob_ratio"} if c.truncated_importance_sampling_type == "seq-mask-tis" else set()
    if c.sequence_level_importance_ratios:
        sequences = {"sampling_importance_ratio", "sampling_importance_ratio_truncated"}
    sums = {
        "loss": loss,
        "kl_penalty": penalty,
        "positive_nll_loss": nll,
        "num_valid_samples": torch.tensor(case.counts.sequences, dtype=torch.float64),
        "entropy": over_tokens(case, case.entropy),
        **{n: over_tokens(case, x) for n, x in {**per_token, **means}.items() if n not in sequences},
        **{n: over_sequences(case, x) for n, x in means.items() if n in sequences},
    }
    return Written(loss, {name: value.detach() for name, value in sums.items()}, r.detach(), r_c.detach())


def importance(c: LossConfig, case: Case, difference: Tensor, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [B, S] before and after truncation, and where they are out of bounds."""
    exponent = difference
    if c.sequence_level_importance_ratios:
        total = (difference * case.present).sum(1, keepdim=True)
        exponent = (total if c.sequence_is_aggregation == "sum" else sequence_mean(case, difference)).expand_as(
            difference
        )
    w = exponential(exponent, largest)
    low, high = c.truncated_importance_sampling_ratio_min or 0.0, c.truncated_importance_sampling_ratio
    kind = c.truncated_importance_sampling_type
    if kind is None or high is None:
        return w, w, torch.zeros_like(w)
    if kind == "tis":
        return w, w.clamp(low, high), ((w < low) | (w > high)).double()
    compared = w if kind == "icepop" else torch.exp(sequence_mean(case, difference)).expand_as(w)
    kept = ((low <= compared) & (compared <= high)).double()
    return w, w * kept, 1 - kept


def kl_penalty(c: LossConfig, case: Case, logprobs: Tensor, largest: float) -> Tensor:
    if c.use_kl_in_reward or c.reference_policy_kl_penalty == 0:
        return logprobs.sum() * 0
    d = case.ref_logprobs - logprobs
    u = exponential(
        logprobs - (case.rollout_logprobs if c.use_on_policy_kl_approximation else logprobs.detach()), largest
    )
    if c.kl_input_clamp_value is not None:
        u = torch.where(d.abs() > c.kl_input_clamp_value, u.detach(), u)
        d = d.clamp(-c.kl_input_clamp_value, c.kl_input_clamp_value)
    kl = u * k(c.reference_policy_kl_type, d)
    if c.kl_output_clamp_value is not None:
        kl = kl.clamp(-c.kl_output_clamp_value, c.kl_output_clamp_value)
    return reduced(c, case, kl)


def divergences(c: LossConfig, case: Case) -> dict[str, Tensor]:
    old, rollout = case.old_logprobs, case.rollout_logprobs
    middle = torch.log(0.5 * torch.exp(old) + 0.5 * torch.exp(rollout))
    return {
        "token_mult_prob_error": torch.exp((rollout - old).abs() * case.counted),
        "gen_kl_error": k(c.reference_policy_kl_type, old - rollout),
        "policy_kl_error": k(c.reference_policy_kl_type, rollout - old),
        "js_divergence_error": 0.5 * k("k3", old - middle) + 0.5 * k("k3", rollout - middle),
    }


def over_tokens(case: Case, x: Tensor) -> Tensor:
    return (x * case.counted).sum() / max(case.counts.tokens, SMALLEST_COUNT)


def over_sequences(case: Case, x: Tensor) -> Tensor:
    """`x` [B, S] is one number a sequence; sequences without a token have none."""
    if x.shape[1] == 0:
        return x.sum()
    return (x[:, 0] * case.multipliers * case.present.any(1)).sum() / max(case.counts.sequences, SMALLEST_COUNT)
