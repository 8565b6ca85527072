"""The loss against numbers worked out by hand, and against autograd in float64 of the formula as it is written down."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.config.loss import LossFn
from services.trainer.loss import EXTREMES, MEANS, LossParts, TokenLogprobs, clipped_policy_loss

torch.set_num_threads(1)


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(
    config: LossFn,
    curr: Tensor,
    prev: Tensor,
    gen: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref: Tensor | None = None,
    tokens: float | None = None,
) -> LossParts:
    total = float(mask.sum()) if tokens is None else tokens
    return clipped_policy_loss(config, TokenLogprobs(curr, prev, gen, ref), advantages, mask, total)


def metrics(parts: LossParts) -> dict[str, float]:
    return dict(zip(MEANS + EXTREMES, [*parts.means.tolist(), *parts.extremes.tolist()], strict=True))


NO_KL = LossFn(reference_policy_kl_penalty=0)


def test_ratio_is_clipped_only_where_that_lowers_the_objective() -> None:
    prev = row(-1, -1, -1, -1)
    curr = prev + row(math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5))
    curr.requires_grad_()
    parts = run(NO_KL, curr, prev, prev, row(2, -2, 2, -2), torch.ones(4))
    # A=2: min(3, 2.4); A=-2: min(-3, -2.4); A=2: min(1, 1.6); A=-2: min(-1, -1.6)
    assert parts.loss.item() == pytest.approx(-(2.4 - 3 + 1 - 1.6) / 4)
    parts.loss.backward()
    # the derivative of -A r is -A r, and 0 where the clip holds
    assert curr.grad is not None
    torch.testing.assert_close(curr.grad, row(0, 3, -1, 0) / 4, atol=1e-7, rtol=0)
    found = metrics(parts)
    assert found["clip_fraction_high"] == pytest.approx(0.25)
    assert found["clip_fraction_low"] == pytest.approx(0.25)
    assert found["probs_ratio"] == pytest.approx(1.0)
    assert found["probs_ratio_clamped"] == pytest.approx(1.0)
    assert (found["probs_ratio_min"], found["probs_ratio_max"]) == pytest.approx((0.5, 1.5))
    assert (found["probs_ratio_clamped_min"], found["probs_ratio_clamped_max"]) == pytest.approx((0.8, 1.2))


def test_asymmetric_clip() -> None:
    config = LossFn(reference_policy_kl_penalty=0, ratio_clip_min=0.1, ratio_clip_max=0.28)
    prev = row(-2, -2)
    parts = run(config, prev + row(1, -1), prev, prev, row(1, -1), torch.ones(2))
    assert parts.loss.item() == pytest.approx((-1.28 + 0.9) / 2)


def test_importance_weight_multiplies_the_policy_term_and_carries_no_gradient() -> None:
    config = LossFn(reference_policy_kl_penalty=0, use_importance_sampling_correction=True)
    curr = row(-1, -2).requires_grad_()
    gen = row(-1.5, -1)
    parts = run(config, curr, curr.detach(), gen, row(1, 3), torch.ones(2))
    weights = row(math.exp(0.5), math.exp(-1))
    assert parts.loss.item() == pytest.approx(float(-(weights * row(1, 3)).sum() / 2))
    parts.loss.backward()
    assert curr.grad is not None
    torch.testing.assert_close(curr.grad, -weights * row(1, 3) / 2, atol=1e-7, rtol=0)
    assert metrics(parts)["sampling_importance_ratio"] == pytest.approx(float(weights.mean()))


def test_an_overflowing_importance_weight_counts_nothing() -> None:
    config = LossFn(reference_policy_kl_penalty=0, use_importance_sampling_correction=True)
    prev = torch.tensor([-1.0, -1.0])
    parts = run(config, prev, prev, torch.tensor([-200.0, -1.0]), torch.ones(2), torch.ones(2))
    assert parts.loss.item() == pytest.approx(-0.5)


def test_kl_penalty_and_its_score_function_gradient() -> None:
    config = LossFn(reference_policy_kl_penalty=0.5)
    curr, ref = row(-1.0).requires_grad_(), row(-1.7)
    parts = run(config, curr, curr.detach(), curr.detach(), row(0), torch.ones(1), ref)
    d = -0.7
    k3 = math.exp(d) - 1 - d
    assert parts.loss.item() == pytest.approx(0.5 * k3)
    assert metrics(parts)["kl_penalty"] == pytest.approx(k3)
    parts.loss.backward()
    # d/dcurr (u k3) = k3 + dk3/dcurr, with dk3/dd = e^d - 1 and dd/dcurr = -1
    assert curr.grad is not None
    assert float(curr.grad) == pytest.approx(0.5 * (k3 + 1 - math.exp(d)))


def test_kl_clamps() -> None:
    config = LossFn(reference_policy_kl_penalty=1, kl_input_clamp_value=2.0, kl_output_clamp_value=3.0)
    curr = row(-1, -5, -9).requires_grad_()
    # d = -4 clamped to -2; d = 4 clamped to 2, its k3 above 3; d = 1 within
    parts = run(config, curr, curr.detach(), curr.detach(), row(0, 0, 0), torch.ones(3), row(-5, -1, -8))
    assert parts.loss.item() == pytest.approx((math.exp(-2) + 1 + 3 + math.e - 2) / 3)
    parts.loss.backward()
    assert curr.grad is not None
    # clamped tokens push nothing, not even through the score function
    torch.testing.assert_close(curr.grad, row(0, 0, (math.e - 2) + (1 - math.e)) / 3, atol=1e-7, rtol=0)


def test_generator_and_trainer_that_disagree() -> None:
    """The worked example of the divergences: log-probabilities -5 (trainer) and -15 (generator), and the other way round."""
    ones = torch.ones(1)
    found = metrics(run(NO_KL, row(-5), row(-5), row(-15), row(1), ones))
    assert found["gen_kl_error"] == pytest.approx(22015.4658, rel=1e-6)
    assert found["policy_kl_error"] == pytest.approx(9.0000454, rel=1e-6)
    assert found["js_divergence_error"] == pytest.approx(4.307, abs=1e-3)
    assert found["token_mult_prob_error"] == pytest.approx(math.exp(10))
    assert found["approx_entropy"] == pytest.approx(5 * math.exp(10))
    found = metrics(run(NO_KL, row(-15), row(-15), row(-5), row(1), ones))
    assert found["gen_kl_error"] == pytest.approx(9.0000454, rel=1e-6)
    assert found["policy_kl_error"] == pytest.approx(22015.4658, rel=1e-6)


def test_masked_tokens_are_never_looked_at() -> None:
    nothing = row(-1, math.nan, -math.inf, -1e30)
    curr = nothing.clone().requires_grad_()
    config = LossFn(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)
    parts = run(config, curr, nothing, nothing, row(1, 1, math.nan, 1), row(1, 0, 0, 0), nothing)
    assert parts.loss.item() == pytest.approx(-1.0)
    assert all(math.isfinite(x) for x in metrics(parts).values())
    parts.loss.backward()
    assert curr.grad is not None
    torch.testing.assert_close(curr.grad, row(-1, 0, 0, 0), atol=1e-7, rtol=0)


def test_no_tokens_at_all() -> None:
    empty = torch.zeros(0, requires_grad=True)
    parts = run(NO_KL, empty, empty.detach(), empty.detach(), empty.detach(), empty.detach())
    assert parts.loss.item() == 0.0
    assert parts.means.tolist() == [0.0] * len(MEANS)
    assert parts.extremes.tolist() == [math.inf, -math.inf] * 2
    parts.loss.backward()


def test_a_non_finite_log_probability_makes_the_loss_not_finite() -> None:
    bad = torch.tensor([math.nan, -1.0])
    assert not math.isfinite(run(NO_KL, bad, bad, torch.tensor([-1.0, -1]), torch.ones(2), torch.ones(2)).loss.item())


logprob = st.floats(-12, -0.001)


@st.composite
def tokens(draw: st.DrawFn) -> dict[str, Tensor]:
    n = draw(st.integers(1, 12))

    def values(each: st.SearchStrategy[float]) -> Tensor:
        return torch.tensor(draw(st.lists(each, min_size=n, max_size=n)), dtype=torch.float64)

    return {
        **{name: values(logprob) for name in ("curr", "prev", "gen", "ref")},
        "advantages": values(st.floats(-5, 5)),
        "mask": values(st.sampled_from([0.0, 1.0, 1.0, 0.5])),
    }


configs = st.builds(
    LossFn,
    reference_policy_kl_penalty=st.sampled_from([0.01, 0.3]),
    ratio_clip_min=st.floats(0, 1),
    ratio_clip_max=st.floats(0, 2),
    kl_input_clamp_value=st.sampled_from([None, 1.0, 20.0]),
    kl_output_clamp_value=st.sampled_from([None, 0.5, 10.0]),
    use_importance_sampling_correction=st.booleans(),
)


def as_written(c: LossFn, t: dict[str, Tensor], curr: Tensor, total: float) -> Tensor:
    """The loss token by token, with plain comparisons for the clamps."""
    loss = curr.sum() * 0
    for i in range(len(curr)):
        m, a = float(t["mask"][i]), float(t["advantages"][i])
        if m == 0:
            continue
        r = torch.exp(curr[i] - t["prev"][i])
        low, high = 1 - c.ratio_clip_min, 1 + c.ratio_clip_max
        clipped = r if low <= float(r.detach()) <= high else r.detach().clamp(low, high)
        policy = -a * r if float(-a * r.detach()) >= float(-a * clipped.detach()) else -a * clipped
        w = math.exp(float(t["prev"][i] - t["gen"][i])) if c.use_importance_sampling_correction else 1.0
        d, u = t["ref"][i] - curr[i], torch.exp(curr[i] - curr[i].detach())
        if c.kl_input_clamp_value is not None and abs(float(d.detach())) > c.kl_input_clamp_value:
            d, u = d.detach().clamp(-c.kl_input_clamp_value, c.kl_input_clamp_value), u.detach()
        kl = u * (torch.exp(d) - 1 - d)
        if c.kl_output_clamp_value is not None and float(kl.detach()) > c.kl_output_clamp_value:
            kl = kl.detach().clamp(max=c.kl_output_clamp_value)
        loss = loss + m * (w * policy + c.reference_policy_kl_penalty * kl)
    return loss / (total + 1e-8)


@settings(deadline=None, max_examples=200)
@given(config=configs, t=tokens())
def test_loss_and_gradient_are_those_of_the_formula(config: LossFn, t: dict[str, Tensor]) -> None:
    ours, theirs = t["curr"].clone().requires_grad_(), t["curr"].clone().requires_grad_()
    total = float(t["mask"].sum())
    parts = run(config, ours, t["prev"], t["gen"], t["advantages"], t["mask"], t["ref"])
    expected = as_written(config, t, theirs, total)
    torch.testing.assert_close(parts.loss, expected, rtol=1e-9, atol=1e-9)
    parts.loss.backward()
    expected.backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=100)
@given(config=configs, t=tokens(), cut=st.integers(0, 12))
def test_parts_add_up_to_the_whole(config: LossFn, t: dict[str, Tensor], cut: int) -> None:
    total = float(t["mask"].sum())
    order = ("curr", "prev", "gen", "advantages", "mask", "ref")
    whole = run(config, *(t[name] for name in order), tokens=total)
    left = run(config, *(t[name][:cut] for name in order), tokens=total)
    right = run(config, *(t[name][cut:] for name in order), tokens=total)
    torch.testing.assert_close(left.loss + right.loss, whole.loss)
    torch.testing.assert_close(left.means + right.means, whole.means)
    torch.testing.assert_close(torch.minimum(left.extremes, right.extremes)[0::2], whole.extremes[0::2])
    torch.testing.assert_close(torch.maximum(left.extremes, right.extremes)[1::2], whole.extremes[1::2])


@settings(deadline=None, max_examples=100)
@given(t=tokens(), scale=st.sampled_from([1.0, 1e3, 1e30]))
def test_extreme_behaviour_log_probabilities_leave_loss_and_gradient_finite(t: dict[str, Tensor], scale: float) -> None:
    """With `prev` recomputed, no behaviour log-probability, however far off, gets past the importance weight."""
    config = LossFn(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)
    curr = t["curr"].float().requires_grad_()
    parts = run(
        config,
        curr,
        curr.detach(),
        t["gen"].float() * scale,
        t["advantages"].float(),
        t["mask"].float(),
        t["ref"].float(),
    )
    parts.loss.backward()
    assert curr.grad is not None
    assert math.isfinite(parts.loss.item())
    assert bool(torch.isfinite(curr.grad).all())


def test_metrics_show_the_trainer_against_the_generator_whatever_the_ratio_is_taken_against() -> None:
    """With `prev` the behaviour policy's, ratio and metrics would else agree with it by definition."""
    config = LossFn(reference_policy_kl_penalty=0.0, prev_logprobs_source="generation")
    gen = torch.tensor([-1.0, -2.0])
    curr = torch.tensor([-1.5, -2.25], requires_grad=True)
    parts = clipped_policy_loss(
        config, TokenLogprobs(curr, gen, gen, start=curr.detach()), torch.ones(2), torch.ones(2), 2.0
    )
    found = dict(zip(MEANS, parts.means.tolist(), strict=True))
    assert found["token_mult_prob_error"] == pytest.approx((math.exp(0.5) + math.exp(0.25)) / 2)
    assert found["sampling_importance_ratio"] == pytest.approx((math.exp(-0.5) + math.exp(-0.25)) / 2)
    assert found["gen_kl_error"] > 0
