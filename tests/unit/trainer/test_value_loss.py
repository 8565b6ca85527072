"""The value model's loss against its formula in float64, in numbers worked out by hand, and at its ends."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.config import ValueLossConfig
from headrace_services.trainer.learning.batch import GlobalCounts, MicroBatch
from headrace_services.trainer.learning.losses import LossParts, explained_variance, value_loss
from tests.unit.trainer import loss_cases
from tests.unit.trainer.loss_cases import Case

torch.set_num_threads(1)


def run(
    config: ValueLossConfig,
    values: list[float],
    old: list[float],
    returns: list[float],
    mask: list[float] | None = None,
) -> tuple[LossParts, list[float]]:
    """Loss and gradient of one trajectory."""
    n = len(values)
    mask = mask or [1.0] * n
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    tokens = MicroBatch(
        trajectory=torch.zeros(n, dtype=torch.int64),
        mask=torch.tensor(mask),
        ages=torch.zeros(n),
        multipliers=torch.ones(1),
        rewards=torch.ones(1),
        advantages=torch.zeros(n),
        rollout_logprobs=torch.zeros(n),
        values=torch.tensor(old, dtype=torch.float64),
        returns=torch.tensor(returns, dtype=torch.float64),
    )
    parts = value_loss(config, leaf, tokens, GlobalCounts(sum(mask), 1, 0))
    parts.loss.backward()
    assert leaf.grad is not None
    assert not any(value.requires_grad for value in parts.sums.values())
    assert not parts.columns
    return parts, leaf.grad.tolist()


def test_half_the_squared_error_over_tokens_times_the_scale() -> None:
    parts, gradient = run(ValueLossConfig(scale=0.4, cliprange=None), [1.0, 3.0], [0.0, 0.0], [0.0, 1.0])
    assert float(parts.loss.detach()) == pytest.approx(0.5 * 0.4 * (1 + 4) / 2)
    assert gradient == pytest.approx([0.4 * 1 / 2, 0.4 * 2 / 2])
    assert float(parts.sums["vf_clipfrac"]) == 0


def test_the_clip_takes_the_larger_error_and_then_pushes_nothing() -> None:
    # clipped to 0.2, an error of 0.8 in place of 0.1; to 0.2, 1.2 against 2, the larger one stays; within
    parts, gradient = run(ValueLossConfig(scale=1.0, cliprange=0.2), [0.9, 1.0, 0.1], [0.0, 0.0, 0.0], [1.0, -1.0, 1.0])
    assert float(parts.loss.detach()) == pytest.approx(0.5 * (0.64 + 4 + 0.81) / 3)
    assert gradient == pytest.approx([0, 2 / 3, -0.9 / 3])
    assert float(parts.sums["vf_clipfrac"]) == pytest.approx(1 / 3)


def test_tokens_that_do_not_count_are_never_looked_at() -> None:
    parts, gradient = run(
        ValueLossConfig(), [1.0, math.nan, math.inf], [1.0, math.nan, -math.inf], [0.0, math.nan, 1e30], [1, 0, 0]
    )
    assert gradient[1:] == [0, 0]
    assert all(math.isfinite(x) for x in (*parts.sums.values(), *parts.minima.values(), *parts.maxima.values()))
    assert float(parts.maxima["values_max"]) == 1


def test_a_value_that_is_not_a_number_makes_the_loss_none() -> None:
    assert math.isnan(run(ValueLossConfig(), [math.nan, 1.0], [0.0, 0.0], [0.0, 0.0])[0].loss.detach())


def test_no_tokens_leave_a_loss_of_0_with_a_gradient() -> None:
    parts, gradient = run(ValueLossConfig(), [], [], [])
    assert float(parts.loss.detach()) == 0
    assert gradient == []
    assert (float(parts.minima["values_min"]), float(parts.maxima["values_max"])) == (math.inf, -math.inf)


def written(config: ValueLossConfig, case: Case, values: Tensor, old: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and share clipped, padded [B, S]."""
    total = max(case.counts.tokens, loss_cases.SMALLEST_COUNT)
    error = (values - returns) ** 2
    clipped = torch.zeros_like(error)
    if config.cliprange is not None:
        bounded = torch.min(torch.max(values, old - config.cliprange), old + config.cliprange)
        clipped = (((bounded - returns) ** 2) > error).double()
        error = torch.max(error, (bounded - returns) ** 2)
    return 0.5 * config.scale * (error * case.counted).sum() / total, (clipped * case.counted).sum() / total


configs = st.builds(
    ValueLossConfig, scale=st.sampled_from([0.4, 1.0]), cliprange=st.sampled_from([None, 0.05, 0.2, 1.0])
)


@given(config=configs, case=loss_cases.cases, seed=st.integers(0, 2**32 - 1), cut=st.integers(0, 4))
def test_loss_gradient_and_metrics_follow_the_formula_in_any_split(
    config: ValueLossConfig, case: Case, seed: int, cut: int
) -> None:
    rng = np.random.default_rng(seed)
    values, old, returns = (torch.from_numpy(rng.normal(size=case.logprobs.shape)) for _ in range(3))
    values.requires_grad_()
    loss, clipped = written(config, case, values, old, returns)
    loss.backward()
    places = list(range(len(case.rewards)))
    parts, gradients = [], []
    for sequences in (places[:cut], places[cut:]):
        part = case.of(sequences)
        leaf, before, targets = (part.flat(x.detach()[sequences]) for x in (values, old, returns))
        leaf.requires_grad_()
        tokens = dataclasses.replace(part.tokens(), values=before, returns=targets)
        parts.append(value_loss(config, leaf, tokens, case.counts, columns=True))
        parts[-1].loss.backward()
        shares = parts[-1].columns["token_value_losses"]
        assert not shares.requires_grad
        assert float(shares.sum()) == pytest.approx(float(parts[-1].loss.detach()), rel=1e-9, abs=1e-12)
        assert bool((shares[part.flat(part.counted) == 0] == 0).all())
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert values.grad is not None
    close = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(torch.cat(gradients), case.flat(values.grad), **close)
    sums = {name: parts[0].sums[name] + parts[1].sums[name] for name in parts[0].sums}
    m, total, fixed = case.counted, max(case.counts.tokens, loss_cases.SMALLEST_COUNT), values.detach()
    expected = {
        "loss": loss.detach(),
        "vf_clipfrac": clipped.detach(),
        "returns_mean": (returns * m).sum() / total,
        "values_mean": (fixed * m).sum() / total,
        "returns_sq_mean": (returns**2 * m).sum() / total,
        "residual_sq_mean": ((returns - fixed) ** 2 * m).sum() / total,
    }
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(sums[name], value, **close)
    assert all(p.minima.keys() == {"values_min"} and p.maxima.keys() == {"values_max"} for p in parts)
    if bool((m > 0).any()):
        assert min(float(p.minima["values_min"]) for p in parts) == float(fixed[m > 0].min())
        assert max(float(p.maxima["values_max"]) for p in parts) == float(fixed[m > 0].max())


def test_explained_variance() -> None:
    returns = [0.0, 1.0, 2.0, 5.0]

    def of(values: list[float]) -> float:
        return explained_variance(
            {k: float(v) for k, v in run(ValueLossConfig(), values, values, returns)[0].sums.items()}
        )

    assert of(returns) == pytest.approx(1, abs=1e-6)
    assert of([2.0] * 4) == pytest.approx(0, abs=1e-6)
    values = [0.5, 0.5, 2.5, 3.0]
    residual = np.subtract(returns, values)
    assert of(values) == pytest.approx(1 - residual.var() / np.var(returns), abs=1e-6)
    # a constant error explains all variance
    assert of([x + 7 for x in returns]) == pytest.approx(1, abs=1e-6)
    # a mean that all returns share takes no part in it
    returns = [4000 + x for x in returns]
    assert of([4000 + x for x in values]) == pytest.approx(1 - residual.var() / np.var(returns), abs=1e-6)
    assert of(values) == pytest.approx(1 - residual.var() / np.var(returns), abs=1e-6)
    constant = dict.fromkeys(("returns_mean", "returns_sq_mean", "values_mean"), 1.0)
    assert explained_variance({**constant, "residual_sq_mean": 1e-8}) == pytest.approx(0)


@given(pairs=st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2))
def test_explained_variance_is_one_less_the_share_of_variance_left(pairs: list[tuple[float, float]]) -> None:
    returns, values = np.array(pairs).T
    found = explained_variance(
        {
            "returns_mean": returns.mean(),
            "returns_sq_mean": (returns**2).mean(),
            "residual_sq_mean": ((returns - values) ** 2).mean(),
            "values_mean": values.mean(),
        }
    )
    if returns.var() > 1e-3:
        assert found == pytest.approx(1 - (returns - values).var() / returns.var(), abs=1e-6)
