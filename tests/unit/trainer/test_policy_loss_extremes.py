"""Float32 at its ends: what overflows is what the formulae say or makes the loss not finite, and no gradient is NaN by accident."""

from __future__ import annotations

import dataclasses
import math

import loss_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Case

from headrace.config import LossFn
from services.trainer.learning.losses import policy_loss
from services.trainer.learning.tokens import GlobalCounts, Logprobs, LossParts, Tokens

torch.set_num_threads(1)

NO_KL = {"reference_policy_kl_penalty": 0.0}
LOGPROBS = (-1e-7, -1.0, -2.5, -20.0, -80.0, -200.0, -600.0)
HUGE = 1e30  # beyond what is compared; float32 ends at 3e38


def run(config: LossFn, case: Case) -> tuple[LossParts, torch.Tensor]:
    logprobs = case.logprobs(config, torch.float32)
    parts = policy_loss(config, case.tokens(torch.float32), logprobs, case.counts)
    parts.loss.backward()
    assert logprobs.curr.grad is not None
    return parts, logprobs.curr.grad


@st.composite
def extreme_cases(draw: st.DrawFn) -> Case:
    """Either the ratio or the importance weight is at the ends: of a product whose factors are 0 and infinite in float32, it
    can't hold the value that float64 has."""
    case = loss_cases.made(draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.integers(0, 2**32 - 1)))
    size = case.curr.numel()

    def values(*among: float) -> torch.Tensor:
        drawn = draw(st.lists(st.sampled_from(among), min_size=size, max_size=size))
        return torch.tensor(drawn, dtype=torch.float64).reshape(case.curr.shape)

    if draw(st.booleans()):
        curr, start, gen = values(*LOGPROBS[:4]), values(*LOGPROBS[:4]), values(*LOGPROBS)
    else:
        curr, start = values(*LOGPROBS), values(*LOGPROBS)
        gen = start + values(-0.5, -1e-3)
    return dataclasses.replace(case, curr=curr, start=start, gen=gen, ref=values(*LOGPROBS))


@settings(max_examples=150)
@given(config=loss_cases.configs(kl_input_clamp_value=20.0), case=extreme_cases())
def test_extremes_are_the_formula_where_float32_can_hold_it(config: LossFn, case: Case) -> None:
    case = case.under(config)
    parts, gradient = run(config, case)
    curr = case.curr.clone().requires_grad_()
    expected = loss_cases.written(config, case, curr, loss_cases.FLOAT32)
    expected.loss.backward()
    assert curr.grad is not None
    largest = max(float(expected.loss.detach().abs()), float(curr.grad.abs().sum()))
    if largest < HUGE:
        tolerance = {"rtol": 1e-3, "atol": 1e-3 * max(largest, 1.0)}
        torch.testing.assert_close(parts.loss.detach(), expected.loss.detach(), **tolerance)
        torch.testing.assert_close(gradient.double(), case.flat(curr.grad), **tolerance)
        assert not any(math.isnan(x) for x in (*parts.sums.values(), *parts.minima.values(), *parts.maxima.values()))
    else:
        assert not float(parts.loss.detach().abs()) < HUGE or not float(gradient.abs().max()) < HUGE


def tokens(advantages: list[float], mask: list[float] | None = None, sequences: list[int] | None = None) -> Tokens:
    n = len(advantages)
    sequence = torch.tensor(sequences or [0] * n)
    return Tokens(
        sequence,
        torch.tensor(advantages),
        torch.tensor(mask or [1.0] * n),
        torch.zeros(n),
        torch.ones(int(sequence.max()) + 1),
        torch.ones(int(sequence.max()) + 1),
    )


def logprobs(curr: list[float], prev: list[float], gen: list[float] | None = None, **more: torch.Tensor) -> Logprobs:
    first, second = (torch.tensor(x, dtype=torch.float32) for x in (curr, prev))
    third = second if gen is None else torch.tensor(gen, dtype=torch.float32)
    return Logprobs(first.requires_grad_(), second, third, second, **more)


def counts(n: float, sequences: float = 1.0) -> GlobalCounts:
    return GlobalCounts(n, sequences, n)


def gradient_of(config: LossFn, batch: Tokens, values: Logprobs, n: float) -> tuple[float, list[float]]:
    parts = policy_loss(config, batch, values, counts(n))
    parts.loss.backward()
    assert values.curr.grad is not None
    return float(parts.loss.detach()), values.curr.grad.tolist()


def test_a_ratio_that_overflows_and_is_clipped_leaves_a_gradient_of_0() -> None:
    loss, gradient = gradient_of(LossFn(**NO_KL), tokens([1.0, 1.0]), logprobs([-1, -1], [-1e30, -1]), 2)
    assert loss == pytest.approx((-1.2 - 1) / 2)
    assert gradient == pytest.approx([0, -0.5])


def test_a_ratio_that_overflows_is_cut_by_the_dual_clip() -> None:
    config = LossFn(**NO_KL, ratio_clip_c=3.0)
    loss, gradient = gradient_of(config, tokens([-1.0, 1.0]), logprobs([-1, -1], [-1e30, -1]), 2)
    assert loss == pytest.approx((3 - 1) / 2)
    assert gradient == pytest.approx([0, -0.5])


def test_a_ratio_that_overflows_and_is_not_clipped_makes_the_loss_infinite() -> None:
    loss, _ = gradient_of(LossFn(**NO_KL), tokens([-1.0]), logprobs([-1], [-1e30]), 1)
    assert loss == math.inf


def test_a_ratio_that_overflows_times_an_advantage_of_0_is_0() -> None:
    loss, gradient = gradient_of(LossFn(**NO_KL), tokens([0.0, 1.0]), logprobs([-1, -1], [-1e30, -1]), 2)
    assert loss == pytest.approx(-0.5)
    assert gradient == pytest.approx([0, -0.5])


@pytest.mark.parametrize("level", ["token", "mean", "sum"])
def test_an_importance_weight_that_overflows_counts_nothing(level: str) -> None:
    """Nor does the ratio it would multiply, be that as large as it may."""
    keys = {} if level == "token" else {"token_level_loss": False, "sequence_level_importance_ratios": True}
    config = LossFn(
        **NO_KL,
        **keys,
        use_importance_sampling_correction=True,
        sequence_is_aggregation="sum" if level == "sum" else "mean",
    )
    batch = tokens([-1.0, 1.0], sequences=[0, 1])
    loss, gradient = gradient_of(config, batch, logprobs([0, -1], [-150, -1], [-300, -1]), 2)
    assert math.isfinite(loss)
    assert gradient[0] == 0
    assert gradient[1] != 0


def test_kl_that_overflows_is_what_the_output_clamp_says() -> None:
    config = LossFn(reference_policy_kl_penalty=1.0, kl_input_clamp_value=None)
    values = logprobs([-1e4, -1], [-1e4, -1], ref=torch.tensor([-1.0, -1.0]))
    loss, gradient = gradient_of(config, tokens([0.0, 0.0]), values, 2)
    assert loss == pytest.approx(5.0)
    assert gradient == pytest.approx([0, 0])


def test_a_kl_weight_that_overflows_counts_nothing() -> None:
    config = LossFn(reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=True)
    values = logprobs([-1, -1], [-1, -1], [-1e4, -1], ref=torch.tensor([-2.0, -2.0]))
    loss, gradient = gradient_of(config, tokens([0.0, 0.0]), values, 2)
    assert loss == pytest.approx(math.exp(-1) / 2)
    assert gradient == pytest.approx([0, 0.5 * (math.exp(-1) + 1 - math.exp(-1))])


@pytest.mark.parametrize("name", ["curr", "prev", "ref"])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("corrected", [False, True])
def test_a_log_probability_that_is_not_a_number_makes_the_loss_none(
    name: str, advantage: float, corrected: bool
) -> None:
    values = {key: torch.tensor([-1.0, -1.0]) for key in ("curr", "prev", "gen", "start", "ref")}
    values[name] = torch.tensor([math.nan, -1.0])
    if name == "prev":
        values["start"] = values["prev"]
    config = LossFn(use_importance_sampling_correction=corrected)
    assert math.isnan(policy_loss(config, tokens([advantage, 1.0]), Logprobs(**values), counts(2)).loss)


def test_minus_infinity_without_top_k_or_top_p_is_a_log_probability_as_any_other() -> None:
    gone = logprobs([-math.inf, -1], [-1, -1])
    assert policy_loss(LossFn(**NO_KL, disable_ppo_ratio=True), tokens([1.0, 1.0]), gone, counts(2)).loss == math.inf
    loss, gradient = gradient_of(LossFn(**NO_KL), tokens([1.0, 1.0]), gone, 2)
    assert loss == pytest.approx(-0.5)
    assert gradient == pytest.approx([0, -0.5])


@pytest.mark.parametrize("left_out", ["curr", "prev", "start"])
@pytest.mark.parametrize("keys", [{}, {"disable_ppo_ratio": True}, {"use_cispo": True}, {"token_level_loss": False}])
def test_a_token_that_top_k_or_top_p_left_out_has_no_policy_term(left_out: str, keys: dict[str, bool]) -> None:
    config = LossFn(**NO_KL, **keys, use_importance_sampling_correction=True)
    values = {key: torch.tensor([-1.0, -2.0]) for key in ("curr", "prev", "gen", "start", "unfiltered")}
    values[left_out] = torch.tensor([-math.inf, -2.0])
    values["curr"].requires_grad_()
    values = {**values, "unfiltered": torch.tensor([-5.0, -2.0])}
    parts = policy_loss(config, tokens([1.0, 1.0]), Logprobs(**values), counts(2))
    alone = {key: value[1:].detach() for key, value in values.items()}
    total = 1 if config.token_level_loss is False else 2
    expected = policy_loss(config, tokens([1.0]), Logprobs(**alone), counts(total)).loss
    assert float(parts.loss.detach()) == pytest.approx(float(expected))
    parts.loss.backward()
    assert values["curr"].grad is not None
    assert values["curr"].grad[0] == 0
    assert bool(values["curr"].grad.isfinite().all())
    assert all(math.isfinite(x) for x in (*parts.sums.values(), *parts.minima.values(), *parts.maxima.values()))


def test_a_token_that_was_left_out_keeps_its_kl_term() -> None:
    config = LossFn(reference_policy_kl_penalty=1.0)
    unfiltered = torch.tensor([-1.0], requires_grad=True)
    values = Logprobs(
        torch.tensor([-math.inf]), *(torch.tensor([-1.0]),) * 3, ref=torch.tensor([-2.0]), unfiltered=unfiltered
    )
    parts = policy_loss(config, tokens([1.0]), values, counts(1))
    assert float(parts.loss.detach()) == pytest.approx(math.exp(-1))
    parts.loss.backward()
    assert unfiltered.grad is not None
    assert float(unfiltered.grad) == pytest.approx(1.0)


NOTHING = (math.nan, math.inf, -math.inf, 1e30)


@pytest.mark.parametrize(
    "keys",
    [{}, {"use_cispo": True}, {"token_level_loss": False, "sequence_level_importance_ratios": True}, {"proximal": "interpolate"},
     {"force_on_policy_ratio": True}],
    ids=lambda keys: "+".join(keys) or "default",
)  # fmt: skip
def test_tokens_of_sequences_that_count_nothing_are_never_looked_at(keys: dict[str, object]) -> None:
    config = LossFn(**keys, positive_example_nll_weight=0.1)
    nothing = torch.tensor([-1.0, *NOTHING])
    values = {key: nothing.clone() for key in ("prev", "gen", "start", "ref")}
    curr = nothing.clone().requires_grad_()
    batch = dataclasses.replace(
        tokens([1.0, math.nan, 1.0, 1.0, 1.0], sequences=[0, 1, 1, 1, 1]), multiplier=torch.tensor([1.0, 0.0])
    )
    parts = policy_loss(config, batch, Logprobs(curr, **values), counts(1))
    alone = Logprobs(*(torch.tensor([-1.0]),) * 5)
    assert float(parts.loss.detach()) == float(policy_loss(config, tokens([1.0]), alone, counts(1)).loss)
    parts.loss.backward()
    assert curr.grad is not None
    assert curr.grad[1:].tolist() == [0.0] * 4
    assert all(math.isfinite(x) for x in (*parts.sums.values(), *parts.minima.values(), *parts.maxima.values()))


def test_masked_tokens_are_never_looked_at_by_a_loss_of_tokens() -> None:
    nothing = torch.tensor([-1.0, *NOTHING])
    curr = nothing.clone().requires_grad_()
    parts = policy_loss(LossFn(), tokens([1.0] * 5, [1, 0, 0, 0, 0]), Logprobs(curr, *(nothing,) * 4), counts(1))
    assert float(parts.loss.detach()) == pytest.approx(-1.0)
    parts.loss.backward()
    assert curr.grad is not None
    assert curr.grad.tolist() == pytest.approx([-1, 0, 0, 0, 0])


@pytest.mark.parametrize("sequences", [0, 2])
def test_a_micro_batch_without_tokens_has_a_loss_of_0_with_a_gradient(sequences: int) -> None:
    empty = torch.zeros(0)
    batch = Tokens(torch.zeros(0, dtype=torch.int64), empty, empty, empty, torch.ones(sequences), torch.ones(sequences))
    for keys in ({}, {"use_cispo": True}, {"token_level_loss": False, "sequence_level_importance_ratios": True}):
        curr = torch.zeros(0, requires_grad=True)
        parts = policy_loss(LossFn(**keys), batch, Logprobs(curr, *(empty,) * 4), GlobalCounts(0, 0, 0))
        parts.loss.backward()
        assert float(parts.loss.detach()) == 0.0
        assert set(map(float, parts.sums.values())) == {0.0}
        assert set(map(float, parts.minima.values())) == {math.inf}
        assert set(map(float, parts.maxima.values())) == {-math.inf}
