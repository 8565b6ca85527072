"""What the policy's loss says of each token: its share of the loss, and why a token has none."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from headrace.config import LossConfig
from headrace.run.samples import Clipped, MaskReason
from headrace_services.trainer.learning.losses import LossParts, policy_loss
from headrace_services.trainer.network.policy_model import PolicyOutput
from tests.unit.trainer import loss_cases
from tests.unit.trainer.loss_cases import Case

torch.set_num_threads(1)

PLAIN = {"reference_policy_kl_penalty": 0.0}


def run(config: LossConfig, case: Case) -> tuple[LossParts, torch.Tensor]:
    """The loss with its columns, and its gradient."""
    case = case.under(config)
    output = case.output()
    parts = policy_loss(config, output, case.tokens(), case.counts, columns=True)
    parts.loss.backward()
    assert output.logprobs.grad is not None
    return parts, output.logprobs.grad


@given(config=loss_cases.configs(), case=loss_cases.cases)
def test_token_losses_add_up_to_the_loss_of_every_form(config: LossConfig, case: Case) -> None:
    parts, _ = run(config, case)
    assert float(parts.columns["token_losses"].sum()) == pytest.approx(float(parts.loss.detach()), rel=1e-9, abs=1e-12)
    counted = case.flat(case.counted)
    for name, bound in (("clip_fraction_low", Clipped.LOW), ("clip_fraction_high", Clipped.HIGH)):
        if "clipped" in parts.columns:
            share = float((counted * (parts.columns["clipped"] == bound)).sum()) / max(1.0, float(counted.sum()))
            assert share == pytest.approx(float(parts.sums[name]), rel=1e-6)  # some forms add 1e-8 to the count


@given(config=loss_cases.configs(), case=loss_cases.cases)
def test_columns_change_neither_loss_nor_gradient_nor_metrics(config: LossConfig, case: Case) -> None:
    with_columns, gradient = run(config, case)
    output = case.under(config).output()
    without = policy_loss(config, output, case.under(config).tokens(), case.counts)
    without.loss.backward()
    assert without.columns == {}
    assert torch.equal(without.loss, with_columns.loss)
    assert torch.equal(output.logprobs.grad, gradient)  # type: ignore[arg-type]
    assert {name: float(value) for name, value in without.sums.items()} == pytest.approx(
        {name: float(value) for name, value in with_columns.sums.items()}, abs=0, nan_ok=True
    )


@given(case=loss_cases.cases)
def test_a_tokens_loss_and_gradient_agree_by_the_form_of_the_term(case: Case) -> None:
    """Of the ratio, the gradient is the term itself, and 0 where a bound cuts it; of a weighted log-probability, its factor."""
    parts, gradient = run(LossConfig(**PLAIN, ratio_clip_c=1.5), case)
    losses, clipped = parts.columns["token_losses"], parts.columns["clipped"]
    cut = ~((clipped == Clipped.NONE) | clipped.isnan())
    torch.testing.assert_close(gradient, torch.where(cut, 0.0, losses))
    parts, gradient = run(LossConfig(**PLAIN, force_on_policy_ratio=True), case)
    torch.testing.assert_close(gradient, parts.columns["token_losses"])
    for form in ("use_cispo", "disable_ppo_ratio"):
        parts, gradient = run(LossConfig(**PLAIN, **{form: True}), case)
        torch.testing.assert_close(gradient * case.flat(case.logprobs), parts.columns["token_losses"])


def only(case: Case, **columns: object) -> Case:
    """A case in which every token counts, with an advantage of 1, but for these columns."""
    ones = torch.ones_like(case.present)
    return dataclasses.replace(
        case,
        **{"mask": ones, "advantages": ones, "multipliers": ones[:, 0], **columns},  # type: ignore[arg-type]
    )


def test_the_reason_of_each_mask_is_named() -> None:
    case = loss_cases.made([3, 3], 0, spread=0.0)
    rollout = case.old_logprobs.clone()
    rollout[0, 0] -= 3.0  # a weight of 20
    mask = torch.ones_like(rollout)
    mask[1, 2] = 0
    case = only(case, rollout_logprobs=rollout, mask=mask)

    def reasons(config: dict[str, object], output: PolicyOutput | None = None) -> list[int]:
        tokens = case.tokens()
        found = policy_loss(LossConfig(**config), output or case.output(), tokens, case.counts, columns=True)
        return [int(reason) for reason in found.columns["mask_reasons"]]

    none, old = MaskReason.COUNTED, MaskReason.OVER_AGE
    corrected = {**PLAIN, "use_importance_sampling_correction": True}
    assert reasons(PLAIN) == [none] * 5 + [old]
    icepop = {**corrected, **loss_cases.truncation("icepop", 0.5, 2.0)}
    assert reasons(icepop) == [MaskReason.IMPORTANCE_WEIGHT, *[none] * 4, old]
    sequences = {**corrected, **loss_cases.truncation("seq-mask-tis", 0.5, 2.0)}
    assert reasons(sequences) == [*[MaskReason.SEQUENCE_MASK] * 3, none, none, old]
    band = {**PLAIN, "probability_difference_mask": 1e-9}
    assert reasons(band)[0] == MaskReason.PROBABILITY_DIFFERENCE
    logprobs = case.flat(case.logprobs).clone()
    logprobs[3] = -torch.inf
    filtered = PolicyOutput(logprobs.requires_grad_(), unfiltered=case.flat(case.logprobs))
    assert reasons(PLAIN, filtered) == [none, none, none, MaskReason.SAMPLING_FILTER, none, old]


def test_weights_before_and_after_truncation_are_both_there() -> None:
    case = only(loss_cases.made([4], 1, spread=0.5))
    config = LossConfig(**PLAIN, use_importance_sampling_correction=True, **loss_cases.truncation("tis", 0.7, 1.4))
    columns = run(config, case)[0].columns
    raw = (case.old_logprobs - case.rollout_logprobs)[0].exp()
    torch.testing.assert_close(columns["raw_importance_weights"], raw)
    torch.testing.assert_close(columns["importance_weights"], raw.clamp(0.7, 1.4))
    assert "importance_weights" not in run(LossConfig(**PLAIN), case)[0].columns
