"""Advantages of tokens against float64 references written from the formulae, over random batches and their extremes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.grpo import GRPOAdvEstimatorConfig
from headrace.config.loss import LossConfig
from headrace.config.ppo import PPOAdvEstimatorConfig
from headrace.records.score import Score
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.learning.algorithms.statistics import ROUNDING, token_metrics, whiten
from headrace_services.trainer.learning.batch import Batch, Float64
from tests.support.trainer import batch, trajectory
from tests.unit.trainer.advantage_cases import (
    KL,
    NO_KL,
    OPD,
    batches,
    by_trajectory,
    configured,
    estimates,
    grouped,
    made,
)

LOSSES = pytest.mark.parametrize("loss_fn", [NO_KL, *KL.values()], ids=["no-kl", *KL])
Tokens = list[list[float]]


def doubles(batch: Batch, column: str) -> list[Float64]:
    return by_trajectory(batch, getattr(batch, column).astype(np.float64))


def size_of_groups(batch: Batch) -> int:
    return len(grouped(batch, batch.places.tolist())[0])


def lengths(batch: Batch) -> list[int]:
    return [int(t.loss_mask.sum()) for t in batch.trajectories]


def kl(policy: float, ref: float, kind: str) -> float:
    d = min(max(ref - policy, -20.0), 20.0)
    value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[kind]
    return min(max(value, -10.0), 10.0)


def penalties(batch: Batch, loss_fn: LossConfig) -> Tokens:
    """beta times the divergence of every token, 0 where rewards do not pay for it."""
    beta = loss_fn.reference_policy_kl_penalty if loss_fn.use_kl_in_reward else 0.0
    return [
        [beta * kl(p, r, loss_fn.reference_policy_kl_type) for p, r in zip(old, ref, strict=True)]
        for old, ref in zip(doubles(batch, "old_logprobs"), doubles(batch, "ref_logprobs"), strict=True)
    ]


def whitened(batch: Batch, tokens: Tokens, scale: Callable[[float, int], float]) -> Tokens:
    """Each token minus the weighted mean, times `scale(biased variance, tokens that weigh anything)`."""
    weighed = [(x, float(w)) for xs, w in zip(tokens, batch.multipliers, strict=True) for x in xs if w > 0]
    if not weighed:
        return tokens
    total = math.fsum(w for _, w in weighed)
    mean = math.fsum(x * w for x, w in weighed) / total
    variance = math.fsum(w * (x - mean) ** 2 for x, w in weighed) / total
    return [[(x - mean) * scale(variance, len(weighed)) for x in xs] for xs in tokens]


def biased(variance: float, count: int) -> float:
    return 1 / math.sqrt(max(variance, 1e-8))


def unbiased(variance: float, count: int) -> float:
    return 1 / math.sqrt(variance * (count / (count - 1) if count > 1 else 1) + 1e-8)


def check(found: Sequence[Float64], expected: Tokens) -> None:
    assert [len(x) for x in found] == [len(x) for x in expected]
    flat = np.array([x for xs in expected for x in xs])
    np.testing.assert_allclose(np.concatenate([np.empty(0), *found]), flat, rtol=1e-6, atol=1e-6)


def against_group(values: Sequence[float], i: int, leave_one_out: bool, normalize: bool) -> float:
    peers = [x for j, x in enumerate(values) if j != i or not leave_one_out]
    baseline = math.fsum(peers) / len(peers) if len(set(peers)) > 1 else peers[0]
    advantage = values[i] - baseline
    if normalize and len(set(peers)) > 1:
        std = math.sqrt(math.fsum((x - baseline) ** 2 for x in peers) / (len(peers) - 1))
        advantage /= std + 1e-6
    return advantage


@given(batch=batches(least=2), leave_one_out=st.booleans(), normalize=st.booleans())
def test_grpo_gives_every_token_its_trajectory_s_advantage(batch: Batch, leave_one_out: bool, normalize: bool) -> None:
    how = {"use_leave_one_out_baseline": leave_one_out, "normalize_rewards": normalize}
    found = estimates(batch, configured(GRPOAdvEstimatorConfig(), n=size_of_groups(batch), **how))
    of_trajectory = [
        against_group(group, i, leave_one_out, normalize)
        for group in grouped(batch, [score.reward for score in batch.scores])
        for i in range(len(group))
    ]
    check(found.advantages, [[x] * length for x, length in zip(of_trajectory, lengths(batch), strict=True)])
    assert found.returns is None


@given(batch=batches(least=2), leave_one_out=st.booleans(), normalize=st.booleans(), weighed=st.booleans())
def test_gdpo_weighs_components_and_normalises_over_the_batch(
    batch: Batch, leave_one_out: bool, normalize: bool, weighed: bool
) -> None:
    weights = [2.0, -0.5] if weighed else None
    estimator = GRPOAdvEstimatorConfig(name="gdpo", reward_weights=weights)
    totals, largest = [], 0.0
    for group in grouped(batch, [score.components for score in batch.scores]):
        for i in range(len(group)):
            parts = [
                weight * against_group([components[name] for components in group], i, leave_one_out, normalize)
                for name, weight in zip(("correct", "format"), weights or (1.0, 1.0), strict=True)
            ]
            totals.append(math.fsum(parts))
            largest = max(largest, *map(abs, parts))
    mean = math.fsum(totals) / len(totals)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in totals) / (len(totals) - 1))
    how = {"use_leave_one_out_baseline": leave_one_out, "normalize_rewards": normalize}
    found = estimates(batch, configured(estimator, n=size_of_groups(batch), **how))
    if std > 2 * ROUNDING * largest and std > 1e-9:  # else components have cancelled
        expected = [[(x - mean) / std] * length for x, length in zip(totals, lengths(batch), strict=True)]
        check(found.advantages, expected)


def test_gdpo_gives_no_advantage_where_components_are_equal() -> None:
    batch = made([0.0] * 6, n=3, components={"correct": 0.1, "format": 0.7})
    found = estimates(batch, configured(GRPOAdvEstimatorConfig(name="gdpo"), n=3))
    np.testing.assert_array_equal(np.concatenate(found.advantages), np.zeros(18))


def test_gdpo_gives_no_advantage_where_components_cancel() -> None:
    values = [0.1, 0.7, 0.35, 0.2, 0.9, 0.3]
    components = [{"correct": value, "format": 1 - value} for value in values]
    whole = dataclasses.replace(
        made(values, n=3), scores=[Score("SCORED", 0.0, components=each) for each in components]
    )
    found = estimates(whole, configured(GRPOAdvEstimatorConfig(name="gdpo"), n=3))
    assert np.abs(np.concatenate(found.advantages)).max() < 1e-6


@LOSSES
@given(batch=batches(), minus_baseline=st.booleans(), kl_to_go=st.booleans())
def test_reinforce_plus_plus_is_the_reward_less_divergence_whitened(
    loss_fn: LossConfig, batch: Batch, minus_baseline: bool, kl_to_go: bool
) -> None:
    kl_to_go = kl_to_go and loss_fn.kl_in_reward  # without it the configuration is refused
    minus_baseline = minus_baseline and size_of_groups(batch) > 1  # and so is a group of one
    estimator = GRPOAdvEstimatorConfig(name="reinforce_plus_plus", minus_baseline=minus_baseline, kl_to_go=kl_to_go)
    rewards = [score.reward for score in batch.scores]
    groups = grouped(batch, rewards)
    raw = []
    for group, reward, paid in zip(batch.groups, rewards, penalties(batch, loss_fn), strict=True):
        base = math.fsum(groups[group]) / len(groups[group]) if minus_baseline else 0.0
        raw.append([reward - base - (math.fsum(paid[t:]) if kl_to_go else paid[t]) for t in range(len(paid))])
    found = estimates(batch, configured(estimator, loss_fn, size_of_groups(batch)))
    check(found.advantages, whitened(batch, raw, biased))


@pytest.mark.parametrize("normalize", [False, True])
@given(batch=batches())
def test_raw_reward_is_the_reward_whitened(normalize: bool, batch: Batch) -> None:
    raw = [[score.reward] * length for score, length in zip(batch.scores, lengths(batch), strict=True)]
    estimator = PPOAdvEstimatorConfig(name="raw_reward", normalize_advantages=normalize)
    found = estimates(batch, configured(estimator, n=size_of_groups(batch)))
    check(found.advantages, whitened(batch, raw, biased) if normalize else raw)
    assert found.returns is None


def discounted_differences(rewards: list[float], values: Float64, gamma: float, lam: float) -> list[float]:
    """`sum over l of (gamma lam)^l delta_{t+l}`, term by term."""
    length = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
    return [math.fsum((gamma * lam) ** (i - t) * deltas[i] for i in range(t, length)) for t in range(length)]


@LOSSES
@given(
    batch=batches(),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([0.95, 0.0, 1.0]),
    of_value=st.sampled_from([None, 1.0]),
    of_policy=st.sampled_from([None, 0.3]),
    alpha=st.sampled_from([0.0, 0.05, 0.7]),
    normalize=st.booleans(),
)
def test_gae_is_the_sum_of_discounted_differences(
    loss_fn: LossConfig,
    batch: Batch,
    gamma: float,
    lam: float,
    of_value: float | None,
    of_policy: float | None,
    alpha: float,
    normalize: bool,
) -> None:
    estimator = PPOAdvEstimatorConfig(
        gae_gamma=gamma,
        gae_lambda=lam,
        gae_lambda_value=of_value,
        gae_lambda_policy=of_policy,
        length_adaptive_alpha=alpha,
        normalize_advantages=normalize,
    )
    raw, returns = [], []
    for score, values, paid in zip(batch.scores, doubles(batch, "values"), penalties(batch, loss_fn), strict=True):
        rewards = [-p for p in paid]
        if rewards:
            rewards[-1] += score.reward
        adaptive = 1 - 1 / max(alpha * len(rewards), 1)
        for_policy = adaptive if alpha > 0 else lam if of_policy is None else of_policy
        raw.append(discounted_differences(rewards, values, gamma, for_policy))
        for_value = discounted_differences(rewards, values, gamma, lam if of_value is None else of_value)
        returns.append([a + v for a, v in zip(for_value, values, strict=True)])
    expected = whitened(batch, raw, unbiased) if normalize else raw
    expected = [[a if w > 0 else 0.0 for a in x] for x, w in zip(expected, batch.multipliers, strict=True)]
    found = estimates(batch, configured(estimator, loss_fn, size_of_groups(batch)))
    check(found.advantages, expected)
    check(found.returns or (), returns)


def test_what_hardly_varies_is_not_blown_up() -> None:
    """Of ±1e-4: raw rewards take max(var, 1e-8) of the biased variance 1e-8, gae adds 1e-8 to the unbiased one."""
    batch, tiny = (made([reward, -reward], length=1, values=np.zeros(2)) for reward in (1e-4, 1e-6))
    for estimator, found in (
        (PPOAdvEstimatorConfig(name="raw_reward"), 1.0),
        (PPOAdvEstimatorConfig(), 1 / math.sqrt(3)),
    ):
        check(estimates(batch, configured(estimator)).advantages, [[found], [-found]])
    for name in ("raw_reward", "gae"):
        check(estimates(tiny, configured(PPOAdvEstimatorConfig(name=name))).advantages, [[0.01], [-0.01]])


def test_trajectories_that_do_not_count_are_not_whitened_with() -> None:
    """Whatever their tokens are."""
    three = [trajectory([1], [2, 3], group=str(place)) for place in range(3)]
    tokens = np.array([1.0, 2.0, 3.0, 4.0, np.nan, np.inf])
    found = whiten(batch(three, multipliers=[1.0, 1.0, 0.0]), tokens, Ranks(), unbiased=True)
    expected = whiten(batch(three[:2]), tokens[:4], Ranks(), unbiased=True)
    assert expected.std(ddof=1) == pytest.approx(1)
    np.testing.assert_array_equal(found[:4], expected)


@pytest.mark.parametrize(("tokens", "std"), [([], 0.0), ([3.0], 0.0), ([3.0, 5.0], math.sqrt(2))])
def test_a_single_token_has_no_deviation(tokens: list[float], std: float) -> None:
    given = batch([trajectory([1], [2] * len(tokens))] if tokens else [])
    found = token_metrics(given, "a", np.array(tokens), Ranks())
    mean, least, most = (float(np.mean(tokens)), min(tokens), max(tokens)) if tokens else (0.0, 0.0, 0.0)
    assert found == pytest.approx({"a/mean": mean, "a/std": std, "a/min": least, "a/max": most})


def test_gae_without_discount_is_the_reward_less_the_value() -> None:
    values = np.array([0.5, -1.0, 2.0])
    estimator = PPOAdvEstimatorConfig(gae_lambda=1.0, normalize_advantages=False)
    found = estimates(made([3.0], values=values), configured(estimator))
    np.testing.assert_allclose(found.advantages[0], 3.0 - values)
    np.testing.assert_allclose((found.returns or ())[0], [3.0, 3.0, 3.0])


@given(batch=batches())
def test_opd_is_the_teacher_s_log_probability_less_the_policy_s(batch: Batch) -> None:
    found = estimates(batch, configured(OPD, n=size_of_groups(batch), use_leave_one_out_baseline=False))
    expected = [
        [t - s for t, s in zip(teacher, old, strict=True)]
        for teacher, old in zip(doubles(batch, "teacher_logprobs"), doubles(batch, "old_logprobs"), strict=True)
    ]
    check(found.advantages, expected)
    flat = [x for xs in expected for x in xs]
    gap = found.metrics["on_policy_distillation/teacher_student_logprob_gap_mean"]
    assert gap == pytest.approx(math.fsum(flat) / len(flat) if flat else 0.0)
