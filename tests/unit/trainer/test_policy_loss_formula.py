"""Loss, gradient and every metric against the formulae as they are written down, in float64 with autograd of their own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from pydantic import ValidationError

from headrace.config import LossConfig
from headrace_services.trainer.learning.losses import policy_loss
from tests.unit.trainer import loss_cases
from tests.unit.trainer.loss_cases import Case

torch.set_num_threads(1)


def compare(config: LossConfig, case: Case) -> None:
    case = case.under(config)
    output = case.output()
    parts = policy_loss(config, output, case.tokens(), case.counts)
    logprobs = case.logprobs.clone().requires_grad_()
    expected = loss_cases.written(config, case, logprobs)
    close(parts.loss.detach(), expected.loss.detach(), "loss")
    parts.loss.backward()
    expected.loss.backward()
    assert output.logprobs.grad is not None
    assert logprobs.grad is not None
    close(output.logprobs.grad, case.flat(logprobs.grad), "gradient")
    assert parts.sums.keys() == expected.sums.keys()
    assert parts.minima.keys() == {"probs_ratio_min", "probs_ratio_clamped_min"}
    assert parts.maxima.keys() == {"probs_ratio_max", "probs_ratio_clamped_max"}
    for name, value in expected.sums.items():
        close(parts.sums[name], value, name)
    counted = case.counted > 0
    for name, ratio in (("probs_ratio", expected.ratio), ("probs_ratio_clamped", expected.clamped)):
        if bool(counted.any()):
            close(parts.minima[f"{name}_min"], ratio[counted].min(), name)
            close(parts.maxima[f"{name}_max"], ratio[counted].max(), name)
        else:
            assert (float(parts.minima[f"{name}_min"]), float(parts.maxima[f"{name}_max"])) == (torch.inf, -torch.inf)


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


@given(config=loss_cases.configs(), case=loss_cases.cases)
def test_loss_gradient_and_metrics_are_those_of_the_formulae(config: LossConfig, case: Case) -> None:
    compare(config, case)


FORMS: tuple[dict[str, object], ...] = (
    {},
    {"ratio_clip_c": 1.5},
    {"use_cispo": True},
    {"disable_ppo_ratio": True},
    {"force_on_policy_ratio": True},
)
REDUCTIONS: tuple[dict[str, object], ...] = (
    {},
    {"constant_length": 9},
    {"token_level_loss": False},
    {"token_level_loss": False, "sequence_level_importance_ratios": True},
)
DENOMINATORS: tuple[dict[str, object], ...] = (
    {},
    {"use_importance_sampling_correction": True},
    {"use_importance_sampling_correction": True, "sequence_is_aggregation": "sum"},
    {"prev_logprobs_source": "generation"},
    {"proximal": "recompute"},
    {"proximal": "interpolate"},
)
TRUNCATIONS = tuple(loss_cases.truncation(kind, 0.7, 1.4) for kind in (None, "tis", "icepop", "seq-mask-tis"))
PENALTIES: tuple[dict[str, object], ...] = tuple(
    {"reference_policy_kl_type": kind, "use_on_policy_kl_approximation": weighed, "reference_policy_kl_penalty": 0.3, **more}
    for kind in ("k1", "k2", "k3")
    for weighed in (False, True)
    for more in (
        {},
        {"kl_input_clamp_value": 0.5, "positive_example_nll_weight": 0.2},
        {"kl_output_clamp_value": 0.2, "probability_difference_mask": 0.05},
        {"kl_input_clamp_value": None, "kl_output_clamp_value": None, "use_kl_in_reward": True},
    )
)  # fmt: skip


def combinations() -> Iterator[LossConfig]:
    """Every combination of the policy term's options that is accepted, the other terms' in turn."""
    other = itertools.cycle(PENALTIES)
    for keys in itertools.product(FORMS, REDUCTIONS, DENOMINATORS, TRUNCATIONS):
        try:
            yield LossConfig(**{key: value for part in (*keys, next(other)) for key, value in part.items()})
        except ValidationError:
            continue


def test_every_combination_of_options_is_the_formula() -> None:
    case = loss_cases.made([5, 1, 7, 0, 6, 8], seed=11, spread=0.6, young=0.7)
    assert 0 < case.counts.positive_tokens < case.counts.tokens
    everything = list(combinations())
    assert len(everything) > 150
    for config in everything:
        compare(config, case)


def test_a_kl_term_needs_a_reference_policy() -> None:
    case = loss_cases.made([2], seed=1)
    without = dataclasses.replace(case.tokens(), ref_logprobs=None)
    with pytest.raises(ValueError, match="reference_policy_kl_penalty"):
        policy_loss(LossConfig(), case.output(), without, case.counts)
