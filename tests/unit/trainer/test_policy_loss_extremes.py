"""Float32 at its ends: what overflows is what the formulae say or makes the loss not finite, and no gradient is NaN by accident."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.config import LossConfig
from headrace_services.trainer.learning.batch import GlobalCounts, MicroBatch
from headrace_services.trainer.learning.losses import LossParts, policy_loss
from headrace_services.trainer.learning.losses.terms import divergences, importance_weights, reference_kl
from headrace_services.trainer.network.policy_model import PolicyOutput
from tests.unit.trainer import loss_cases
from tests.unit.trainer.loss_cases import Case

torch.set_num_threads(1)

NO_KL = {"reference_policy_kl_penalty": 0.0}
CORRECTED = {"use_importance_sampling_correction": True}
LOGPROBS = (-1e-7, -1.0, -2.5, -20.0, -80.0, -200.0, -600.0)
HUGE = 1e30  # beyond what is compared; float32 ends at 3e38


def run(config: LossConfig, case: Case) -> tuple[LossParts, Tensor]:
    output = case.output(torch.float32)
    parts = policy_loss(config, output, case.tokens(torch.float32), case.counts)
    parts.loss.backward()
    assert output.logprobs.grad is not None
    return parts, output.logprobs.grad


@st.composite
def extreme_cases(draw: st.DrawFn) -> Case:
    """Either the ratio or the importance weight is at the ends: of a product whose factors are 0 and infinite in float32, it
    can't hold the value that float64 has."""
    case = loss_cases.made(draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.integers(0, 2**32 - 1)))
    size = case.logprobs.numel()

    def values(*among: float) -> Tensor:
        drawn = draw(st.lists(st.sampled_from(among), min_size=size, max_size=size))
        return torch.tensor(drawn, dtype=torch.float64).reshape(case.logprobs.shape)

    if draw(st.booleans()):
        now, old, rollout = values(*LOGPROBS[:4]), values(*LOGPROBS[:4]), values(*LOGPROBS)
    else:
        now, old = values(*LOGPROBS), values(*LOGPROBS)
        rollout = old + values(-0.5, -1e-3)
    ref = values(*LOGPROBS)
    return dataclasses.replace(case, logprobs=now, old_logprobs=old, rollout_logprobs=rollout, ref_logprobs=ref)


@given(config=loss_cases.configs(kl_input_clamp_value=20.0), case=extreme_cases())
def test_extremes_are_the_formula_where_float32_can_hold_it(config: LossConfig, case: Case) -> None:
    case = case.under(config)
    parts, gradient = run(config, case)
    logprobs = case.logprobs.clone().requires_grad_()
    expected = loss_cases.written(config, case, logprobs, loss_cases.FLOAT32)
    expected.loss.backward()
    assert logprobs.grad is not None
    largest = max(float(expected.loss.detach().abs()), float(logprobs.grad.abs().sum()))
    if largest < HUGE:
        tolerance = {"rtol": 1e-3, "atol": 1e-3 * max(largest, 1.0)}
        torch.testing.assert_close(parts.loss.detach(), expected.loss.detach(), **tolerance)
        torch.testing.assert_close(gradient.double(), case.flat(logprobs.grad), **tolerance)
        assert not any(math.isnan(x) for x in (*parts.sums.values(), *parts.minima.values(), *parts.maxima.values()))
    else:
        assert not float(parts.loss.detach().abs()) < HUGE or not float(gradient.abs().max()) < HUGE


def tokens(
    advantages: list[float],
    mask: list[float] | None = None,
    trajectory: list[int] | None = None,
    **columns: Tensor | None,
) -> MicroBatch:
    """Tokens of one trajectory unless `trajectory` says otherwise, with log-probabilities of -1 unless `columns` has them."""
    n, of_token = len(advantages), torch.tensor(trajectory or [0] * len(advantages))
    given = {
        "mask": torch.tensor(mask or [1.0] * n),
        "ages": torch.zeros(n),
        "multipliers": torch.ones(int(of_token.max()) + 1),
        "rewards": torch.ones(int(of_token.max()) + 1),
        "advantages": torch.tensor(advantages),
        "rollout_logprobs": -torch.ones(n),
        "old_logprobs": -torch.ones(n),
        **columns,
    }
    return MicroBatch(of_token, **given)


def logprobs_of(
    old: list[float], rollout: list[float] | None = None, ref: list[float] | None = None
) -> dict[str, Tensor]:
    """Columns of `tokens`; the generator's log-probabilities are the old ones unless given."""
    columns = {"old_logprobs": torch.tensor(old), "rollout_logprobs": torch.tensor(old if rollout is None else rollout)}
    return columns | ({} if ref is None else {"ref_logprobs": torch.tensor(ref)})


def counts(n: float, sequences: float = 1.0) -> GlobalCounts:
    return GlobalCounts(n, sequences, n)


def gradient_of(config: LossConfig, logprobs: list[float], batch: MicroBatch) -> tuple[float, list[float]]:
    leaf = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    parts = policy_loss(config, PolicyOutput(leaf), batch, counts(len(logprobs)))
    parts.loss.backward()
    assert leaf.grad is not None
    return float(parts.loss.detach()), leaf.grad.tolist()


def finite(parts: LossParts) -> bool:
    return all(math.isfinite(x) for x in (*parts.sums.values(), *parts.minima.values(), *parts.maxima.values()))


def test_a_ratio_that_overflows_and_is_clipped_leaves_a_gradient_of_0() -> None:
    batch = tokens([1.0, 1.0], **logprobs_of([-1e30, -1]))
    loss, gradient = gradient_of(LossConfig(**NO_KL), [-1, -1], batch)
    assert loss == pytest.approx((-1.2 - 1) / 2)
    assert gradient == pytest.approx([0, -0.5])


def test_a_ratio_that_overflows_is_cut_by_the_dual_clip() -> None:
    config = LossConfig(**NO_KL, ratio_clip_c=3.0)
    loss, gradient = gradient_of(config, [-1, -1], tokens([-1.0, 1.0], **logprobs_of([-1e30, -1])))
    assert loss == pytest.approx((3 - 1) / 2)
    assert gradient == pytest.approx([0, -0.5])


def test_an_unclipped_ratio_that_overflows_makes_the_loss_infinite() -> None:
    loss, _ = gradient_of(LossConfig(**NO_KL), [-1], tokens([-1.0], **logprobs_of([-1e30])))
    assert loss == math.inf


def test_a_ratio_that_overflows_times_an_advantage_of_0_is_0() -> None:
    loss, gradient = gradient_of(LossConfig(**NO_KL), [-1, -1], tokens([0.0, 1.0], **logprobs_of([-1e30, -1])))
    assert loss == pytest.approx(-0.5)
    assert gradient == pytest.approx([0, -0.5])


@pytest.mark.parametrize("level", ["token", "mean", "sum"])
def test_an_importance_weight_that_overflows_counts_nothing(level: str) -> None:
    """Nor does the ratio it would multiply, be that as large as it may."""
    keys = {} if level == "token" else {"token_level_loss": False, "sequence_level_importance_ratios": True}
    config = LossConfig(
        **NO_KL,
        **keys,
        use_importance_sampling_correction=True,
        sequence_is_aggregation="sum" if level == "sum" else "mean",
    )
    batch = tokens([-1.0, 1.0], trajectory=[0, 1], **logprobs_of([-150, -1], [-300, -1]))
    loss, gradient = gradient_of(config, [0, -1], batch)
    assert math.isfinite(loss)
    assert gradient[0] == 0
    assert gradient[1] != 0


def test_kl_that_overflows_is_what_the_output_clamp_says() -> None:
    config = LossConfig(reference_policy_kl_penalty=1.0, kl_input_clamp_value=None)
    batch = tokens([0.0, 0.0], **logprobs_of([-1e4, -1], ref=[-1.0, -1.0]))
    loss, gradient = gradient_of(config, [-1e4, -1], batch)
    assert loss == pytest.approx(5.0)
    assert gradient == pytest.approx([0, 0])


def test_a_kl_weight_that_overflows_counts_nothing() -> None:
    config = LossConfig(reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=True)
    batch = tokens([0.0, 0.0], **logprobs_of([-1, -1], [-1e4, -1], ref=[-2.0, -2.0]))
    loss, gradient = gradient_of(config, [-1, -1], batch)
    assert loss == pytest.approx(math.exp(-1) / 2)
    assert gradient == pytest.approx([0, 0.5 * (math.exp(-1) + 1 - math.exp(-1))])


@pytest.mark.parametrize(("reference", "expected"), [(-1.0, 0.0), (math.nan, math.nan)])
@pytest.mark.parametrize("limit", [None, 10.0])
def test_an_infinite_kl_whose_weight_overflows_is_0_and_nan_stays(
    reference: float, expected: float, limit: float | None
) -> None:
    config = LossConfig(
        reference_policy_kl_penalty=1.0,
        use_on_policy_kl_approximation=True,
        kl_input_clamp_value=None,
        kl_output_clamp_value=limit,
    )
    logprobs = torch.tensor([-1e3], requires_grad=True)
    kl = reference_kl(config, logprobs, torch.tensor([reference]), torch.tensor([-1e4]))
    kl.sum().backward()
    assert logprobs.grad is not None
    assert [kl.item(), *logprobs.grad.tolist()] == pytest.approx([expected, expected], nan_ok=True)


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_a_weight_at_its_bound_is_inside(kind: str) -> None:
    bounds = {f"truncated_importance_sampling_{name}": value for name, value in (("ratio", 1.0), ("ratio_min", 1.0))}
    config = LossConfig(**CORRECTED, **bounds, truncated_importance_sampling_type=kind)
    even = -torch.ones(2)
    weights = importance_weights(config, even, even, torch.ones(2, dtype=torch.bool), tokens([1.0, 1.0]))
    assert weights.truncated.tolist() == [1.0, 1.0]
    assert weights.outside is not None
    assert not weights.outside.any()


def test_what_is_measured_is_float64_and_has_no_gradient() -> None:
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
    config = LossConfig(**CORRECTED, truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=2.0)
    parts = policy_loss(config, PolicyOutput(leaf), tokens([1.0, 1.0], ref_logprobs=-torch.ones(2)), counts(2))
    for measured in (parts.sums, parts.minima, parts.maxima, divergences(config, leaf, leaf, torch.ones(2))):
        assert {value.dtype for value in measured.values()} <= {torch.float64}
        assert not any(value.requires_grad for value in measured.values())


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "ref_logprobs"])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("corrected", [False, True])
def test_a_log_probability_that_is_nan_makes_the_loss_nan(name: str, advantage: float, corrected: bool) -> None:
    columns = {key: -torch.ones(2) for key in ("logprobs", "old_logprobs", "ref_logprobs")}
    columns[name] = torch.tensor([math.nan, -1.0])
    output = PolicyOutput(columns.pop("logprobs"))
    config = LossConfig(use_importance_sampling_correction=corrected)
    assert math.isnan(policy_loss(config, output, tokens([advantage, 1.0], **columns), counts(2)).loss)


def test_minus_infinity_without_top_k_or_top_p_is_as_any_other() -> None:
    gone, batch = [-math.inf, -1], tokens([1.0, 1.0])
    reinforce = LossConfig(**NO_KL, disable_ppo_ratio=True)
    assert policy_loss(reinforce, PolicyOutput(torch.tensor(gone)), batch, counts(2)).loss == math.inf
    loss, gradient = gradient_of(LossConfig(**NO_KL), gone, batch)
    assert loss == pytest.approx(-0.5)
    assert gradient == pytest.approx([0, -0.5])


AGAINST_THE_GENERATOR = {"prev_logprobs_source": "generation"}


@pytest.mark.parametrize(
    ("left_out", "source"),
    [
        ("logprobs", CORRECTED),
        ("old_logprobs", CORRECTED),
        # what the ratio is taken against, and what the metrics are, apart from each other
        ("rollout_logprobs", AGAINST_THE_GENERATOR),
        ("old_logprobs", AGAINST_THE_GENERATOR),
    ],
    ids=["now", "old", "prev", "start"],
)
@pytest.mark.parametrize("keys", [{}, {"disable_ppo_ratio": True}, {"use_cispo": True}, {"token_level_loss": False}])
def test_a_token_that_top_k_or_top_p_left_out_has_no_policy_term(
    left_out: str, source: dict[str, object], keys: dict[str, bool]
) -> None:
    config = LossConfig(**NO_KL, **keys, **source)
    columns = {key: torch.tensor([-1.0, -2.0]) for key in ("logprobs", "old_logprobs", "rollout_logprobs")}
    columns[left_out] = torch.tensor([-math.inf, -2.0])
    leaf = columns.pop("logprobs").requires_grad_()
    unfiltered = torch.tensor([-5.0, -2.0])
    parts = policy_loss(config, PolicyOutput(leaf, unfiltered), tokens([1.0, 1.0], **columns), counts(2))
    alone = tokens([1.0], **{key: value[1:] for key, value in columns.items()})
    total = 1 if config.token_level_loss is False else 2
    expected = policy_loss(config, PolicyOutput(leaf[1:].detach(), unfiltered[1:]), alone, counts(total)).loss
    assert float(parts.loss.detach()) == pytest.approx(float(expected))
    measured = policy_loss(config, PolicyOutput(leaf[1:].detach(), unfiltered[1:]), alone, counts(2)).sums
    for name in ("probs_ratio", "approx_entropy", "gen_kl_error", "sampling_importance_ratio"):
        assert float(parts.sums[name]) == pytest.approx(float(measured[name]))
    parts.loss.backward()
    assert leaf.grad is not None
    assert leaf.grad[0] == 0
    assert bool(leaf.grad.isfinite().all())
    assert finite(parts)


def test_a_token_that_was_left_out_keeps_its_kl_term() -> None:
    config = LossConfig(reference_policy_kl_penalty=1.0)
    unfiltered = torch.tensor([-1.0], requires_grad=True)
    output = PolicyOutput(torch.tensor([-math.inf]), unfiltered)
    parts = policy_loss(config, output, tokens([1.0], ref_logprobs=torch.tensor([-2.0])), counts(1))
    assert float(parts.loss.detach()) == pytest.approx(math.exp(-1))
    parts.loss.backward()
    assert unfiltered.grad is not None
    assert float(unfiltered.grad) == pytest.approx(1.0)


NOTHING = (math.nan, math.inf, -math.inf, 1e30)


@pytest.mark.parametrize(
    "keys",
    [{}, {"use_cispo": True}, {"token_level_loss": False, "sequence_level_importance_ratios": True}, {"proximal": "interpolate"},
     {"force_on_policy_ratio": True}, {"kl_input_clamp_value": None}],
    ids=lambda keys: "+".join(keys) or "default",
)  # fmt: skip
def test_tokens_of_uncounted_trajectories_are_never_looked_at(keys: dict[str, object]) -> None:
    config = LossConfig(**keys, positive_example_nll_weight=0.1)
    nothing = torch.tensor([-1.0, *NOTHING])
    leaf = nothing.clone().requires_grad_()
    batch = tokens(
        [1.0, math.nan, 1.0, 1.0, 1.0],
        trajectory=[0, 1, 1, 1, 1],
        multipliers=torch.tensor([1.0, 0.0]),
        rollout_logprobs=nothing,
        old_logprobs=nothing,
        ref_logprobs=nothing,
    )
    parts = policy_loss(config, PolicyOutput(leaf), batch, counts(1))
    alone = tokens([1.0], ref_logprobs=-torch.ones(1))
    expected = policy_loss(config, PolicyOutput(-torch.ones(1)), alone, counts(1)).loss
    assert float(parts.loss.detach()) == float(expected)
    parts.loss.backward()
    assert leaf.grad is not None
    assert leaf.grad[1:].tolist() == [0.0] * 4
    assert finite(parts)


def test_masked_tokens_are_never_looked_at_by_a_loss_of_tokens() -> None:
    nothing = torch.tensor([-1.0, *NOTHING])
    leaf = nothing.clone().requires_grad_()
    columns = {key: nothing for key in ("rollout_logprobs", "old_logprobs", "ref_logprobs")}
    parts = policy_loss(LossConfig(), PolicyOutput(leaf), tokens([1.0] * 5, [1, 0, 0, 0, 0], **columns), counts(1))
    assert float(parts.loss.detach()) == pytest.approx(-1.0)
    parts.loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx([-1, 0, 0, 0, 0])


@pytest.mark.parametrize("trajectories", [0, 2])
def test_a_micro_batch_without_tokens_has_a_loss_of_0_with_a_gradient(trajectories: int) -> None:
    """And the metrics of any other, so that every rank brings the same ones to a collective."""
    empty = torch.zeros(0)
    batch = MicroBatch(
        trajectory=torch.zeros(0, dtype=torch.int64),
        mask=empty,
        ages=empty,
        multipliers=torch.ones(trajectories),
        rewards=torch.ones(trajectories),
        advantages=empty,
        rollout_logprobs=empty,
        old_logprobs=empty,
        ref_logprobs=empty,
    )
    other = tokens([1.0], ref_logprobs=-torch.ones(1))
    for keys in ({}, {"use_cispo": True}, {"token_level_loss": False, "sequence_level_importance_ratios": True}):
        leaf = torch.zeros(0, requires_grad=True)
        parts = policy_loss(LossConfig(**keys), PolicyOutput(leaf), batch, GlobalCounts(0, 0, 0))
        parts.loss.backward()
        assert float(parts.loss.detach()) == 0.0
        assert set(map(float, parts.sums.values())) == {0.0}
        assert set(map(float, parts.minima.values())) == {math.inf}
        assert set(map(float, parts.maxima.values())) == {-math.inf}
        full = policy_loss(LossConfig(**keys), PolicyOutput(-torch.ones(1)), other, counts(1))
        for found, expected in ((parts.sums, full.sums), (parts.minima, full.minima), (parts.maxima, full.maxima)):
            assert found.keys() == expected.keys()
