"""The policy's loss in numbers worked out by hand, and its independence of how a batch is split and ordered."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.config import LossConfig
from headrace_services.trainer.learning.batch import GlobalCounts, MicroBatch
from headrace_services.trainer.learning.losses import LossParts, policy_loss
from headrace_services.trainer.network.policy_model import PolicyOutput
from tests.unit.trainer import loss_cases
from tests.unit.trainer.loss_cases import Case

torch.set_num_threads(1)

NO_KL = {"reference_policy_kl_penalty": 0.0}
GSPO = {"token_level_loss": False, "sequence_level_importance_ratios": True}
IS = {"use_importance_sampling_correction": True}


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(
    config: LossConfig,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    rollout: Tensor | None = None,
    ref: Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
    **more: Tensor,
) -> tuple[LossParts, Tensor]:
    """Loss and gradient of trajectories of `lengths` (one, unless given), all of whose tokens count unless `more` says otherwise."""
    lengths = lengths or (len(logprobs),)
    n, b = len(logprobs), len(lengths)
    columns = {
        "mask": torch.ones(n),
        "ages": torch.zeros(n),
        "multipliers": torch.ones(b),
        "rewards": torch.ones(b),
        **more,
    }
    tokens = MicroBatch(
        trajectory=torch.repeat_interleave(torch.tensor(lengths)),
        advantages=advantages,
        rollout_logprobs=old if rollout is None else rollout,
        old_logprobs=old,
        ref_logprobs=ref,
        **columns,
    )
    counted = tokens.mask * tokens.multipliers[tokens.trajectory]
    positive = counted * (tokens.rewards > 0)[tokens.trajectory]
    counts = GlobalCounts(float(counted.sum()), float(tokens.multipliers.sum()), float(positive.sum()))
    logprobs = logprobs.clone().requires_grad_()
    parts = policy_loss(config, PolicyOutput(logprobs), tokens, counts)
    parts.loss.backward()
    assert logprobs.grad is not None
    return parts, logprobs.grad


def close(found: Tensor, *expected: float) -> None:
    torch.testing.assert_close(
        found.detach(), row(*expected) if found.ndim else row(*expected)[0], atol=1e-7, rtol=1e-7
    )


def log(*ratios: float) -> Tensor:
    return row(*ratios).log()


def test_ratio_is_clipped_only_where_that_lowers_the_objective() -> None:
    old = -torch.ones(6, dtype=torch.float64)
    ratios, advantages = log(1.5, 1.5, 1.5, 0.5, 0.5, 0.5), row(2, -2, -2, 2, 2, -2)
    parts, gradient = run(LossConfig(**NO_KL), old + ratios, old, advantages)
    # A=2: min(3, 2.4); A=-2: min(-3, -2.4); A=2: min(1, 1.6); A=-2: min(-1, -1.6)
    close(parts.loss, -(2.4 - 3 - 3 + 1 + 1 - 1.6) / 6)
    close(gradient, 0, 3 / 6, 3 / 6, -1 / 6, -1 / 6, 0)
    assert float(parts.sums["clip_fraction_high"]) == pytest.approx(1 / 6)
    assert float(parts.sums["clip_fraction_low"]) == pytest.approx(1 / 6)
    assert float(parts.minima["probs_ratio_min"]) == pytest.approx(0.5)
    assert float(parts.maxima["probs_ratio_clamped_max"]) == pytest.approx(1.2)


def test_the_two_bounds_of_the_clip_are_of_their_own() -> None:
    config = LossConfig(**NO_KL, ratio_clip_min=0.1, ratio_clip_max=0.28)
    parts, _ = run(config, row(-1, -3), row(-2, -2), row(1, -1))
    close(parts.loss, (-1.28 + 0.9) / 2)


def test_dual_clip_bounds_the_ratio_where_the_advantage_is_negative() -> None:
    config = LossConfig(**NO_KL, ratio_clip_c=3.0)
    old = row(-3, -3, -3)
    parts, gradient = run(config, old + log(5, 2, 5), old, row(-1, -1, 1))
    close(parts.loss, (3 + 2 - 1.2) / 3)
    close(gradient, 0, 2 / 3, 0)


def test_sequence_ratio_is_the_geometric_mean_shared_by_the_tokens() -> None:
    old = row(-1, -1, -1)
    logprobs = old + row(0.1, -0.3, 0.05)
    parts, gradient = run(LossConfig(**NO_KL, **GSPO), logprobs, old, row(1, 1, 2), lengths=(2, 1))
    first, second = math.exp(-0.1), math.exp(0.05)
    close(parts.loss, -(first + 2 * second) / 2)
    close(gradient, -first / 4, -first / 4, -2 * second / 2)


def test_tokens_over_age_stay_in_the_ratio_and_leave_the_loss() -> None:
    old = row(-1, -1)
    logprobs = old + row(0.1, -0.3)
    parts, gradient = run(LossConfig(**NO_KL, **GSPO), logprobs, old, row(1, 1), mask=row(1, 0))
    close(parts.loss, -math.exp(-0.1))
    close(gradient, -math.exp(-0.1) / 2, -math.exp(-0.1) / 2)
    parts, gradient = run(LossConfig(**NO_KL), logprobs, old, row(1, 1), mask=row(1, 0))
    close(parts.loss, -math.exp(0.1))
    close(gradient, -math.exp(0.1), 0)


def test_cispo_weighs_by_the_clipped_ratio_and_drops_no_token() -> None:
    config = LossConfig(**NO_KL, use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=5.0)
    old = row(-3, -1)
    logprobs = old + log(10, 0.5)
    parts, gradient = run(config, logprobs, old, row(1, -1))
    close(parts.loss, float(-6 * logprobs[0] + 0.5 * logprobs[1]) / 2)
    close(gradient, -6 / 2, 0.5 / 2)
    assert float(parts.sums["clip_fraction_high"]) == pytest.approx(0.5)


def test_reinforce_is_the_log_probability_times_the_advantage() -> None:
    parts, gradient = run(LossConfig(**NO_KL, disable_ppo_ratio=True), row(-1, -3), row(-2, -2), row(2, -1))
    close(parts.loss, (2 - 3) / 2)
    close(gradient, -1, 0.5)


def test_a_forced_ratio_is_1_whatever_prev_is() -> None:
    parts, gradient = run(LossConfig(**NO_KL, force_on_policy_ratio=True), row(-1, -3), row(-9, -9), row(2, -1))
    close(parts.loss, (-2 + 1) / 2)
    close(gradient, -1, 0.5)


@pytest.mark.parametrize(
    ("keys", "loss"),
    [
        ({}, -(1 + 1 + 4) / 3),
        ({"token_level_loss": False}, -(1 + 4) / 2),
        ({"constant_length": 10}, -(1 + 1 + 4) / (2 * 10)),
    ],
    ids=["tokens", "sequences", "constant"],
)
def test_what_the_loss_is_averaged_over(keys: dict[str, object], loss: float) -> None:
    old = row(-1, -2, -3)
    parts, _ = run(LossConfig(**NO_KL, **keys), old, old, row(1, 1, 4), lengths=(2, 1))
    close(parts.loss, loss)


@pytest.mark.parametrize(
    ("keys", "weights", "outside"),
    [
        ({}, (0.25, 1.0, 4.0), None),
        (loss_cases.truncation("tis", None, 2.0), (0.25, 1.0, 2.0), 1 / 3),
        (loss_cases.truncation("tis", 0.5, 2.0), (0.5, 1.0, 2.0), 2 / 3),
        (loss_cases.truncation("icepop", 0.5, 5.0), (0.0, 1.0, 4.0), 1 / 3),
        (loss_cases.truncation("seq-mask-tis", 0.9, 1.1), (0.0, 0.0, 0.0), 1.0),
        (loss_cases.truncation("seq-mask-tis", 0.4, 1.7), (0.25, 1.0, 0.0), 0.5),
    ],
    ids=["none", "tis", "tis-both", "icepop", "seq-mask-none-left", "seq-mask"],
)
def test_importance_weights_by_token(
    keys: dict[str, object], weights: tuple[float, ...], outside: float | None
) -> None:
    old, advantages = row(-1, -1, -1), row(1, 2, 3)
    parts, gradient = run(
        LossConfig(**NO_KL, **IS, **keys), old, old, advantages, old - log(0.25, 1, 4), lengths=(2, 1)
    )
    weighted = row(*weights) * advantages
    close(parts.loss, float(-weighted.sum() / 3))
    close(gradient, *(-weighted / 3).tolist())
    close(parts.sums["sampling_importance_ratio"], (0.25 + 1 + 4) / 3)
    if outside is not None:
        close(parts.sums["sampling_importance_ratio_truncated"], sum(weights) / 3)
        close(parts.sums["is_oob_ratio"], outside)


@pytest.mark.parametrize(("how", "first"), [("mean", 0.5), ("sum", 0.25)])
def test_importance_weights_of_sequences(how: str, first: float) -> None:
    """Their metric is the mean over sequences, however many there are."""
    config = LossConfig(**NO_KL, **IS, **GSPO, sequence_is_aggregation=how)
    old = row(-1, -1, -1)
    parts, _ = run(config, old, old, row(1, 1, 1), old - log(0.25, 1, 4), lengths=(2, 1))
    close(parts.loss, -(first + 4) / 2)
    close(parts.sums["sampling_importance_ratio"], (first + 4) / 2)


def test_decoupled_ppo_clips_and_weighs_by_the_proximal_policy() -> None:
    config = LossConfig(**NO_KL, proximal="recompute")
    old = row(-1, -1)
    parts, gradient = run(config, old + log(1.5, 1.1), old, row(1, 1), old - log(2, 2))
    close(parts.loss, -2 * (1.2 + 1.1) / 2)
    close(gradient, 0, -2 * 1.1 / 2)


def test_an_interpolated_proximal_policy_lies_between_by_age() -> None:
    """Of a token sampled by the weights of this very step it is the behaviour policy, of an old one nearly the trainer's."""
    config = LossConfig(**NO_KL, proximal="interpolate", ratio_clip_min=1.0, ratio_clip_max=9.0)
    rollout = row(-2, -2, -2)
    logprobs = rollout + log(16, 16, 16)
    parts, gradient = run(config, logprobs, rollout, row(1, 2, 3), ages=row(0, 1, 3))
    proximal = row(1, 4, 8)  # 16 to the power of 0, 1/2 and 3/4
    ratio = row(10, 4, 2)  # the first is clipped
    close(parts.loss, float(-(proximal * ratio * row(1, 2, 3)).sum() / 3))
    close(gradient, 0, -4 * 4 * 2 / 3, -8 * 2 * 3 / 3)
    close(parts.sums["sampling_importance_ratio"], float(proximal.mean()))


def test_probability_difference_drops_what_is_pushed_further_away() -> None:
    config = LossConfig(
        **NO_KL, probability_difference_mask=0.1, prev_logprobs_source="generation", disable_ppo_ratio=True
    )
    rollout = log(0.5, 0.5, 0.5, 0.5, 0.001)
    logprobs = log(0.65, 0.65, 0.35, 0.35, 0.09)
    parts, gradient = run(config, logprobs, rollout, row(1, -1, 1, -1, 1))
    close(gradient, 0, 1 / 5, -1 / 5, 0, -1 / 5)
    close(parts.sums["probability_difference_masked"], 2 / 5)


def test_kl_penalty_and_its_score_function_gradient() -> None:
    parts, gradient = run(LossConfig(reference_policy_kl_penalty=0.5), row(-1), row(-1), row(0), ref=row(-1.7))
    k3 = math.exp(-0.7) - 1 + 0.7
    close(parts.loss, 0.5 * k3)
    close(parts.sums["kl_penalty"], k3)
    # d/dcurr (u k3) = k3 + dk3/dcurr, with dk3/dd = e^d - 1 and dd/dcurr = -1
    close(gradient, 0.5 * (k3 + 1 - math.exp(-0.7)))


def test_kl_clamps_leave_nothing_to_push() -> None:
    config = LossConfig(reference_policy_kl_penalty=1, kl_input_clamp_value=2.0, kl_output_clamp_value=3.0)
    logprobs = row(-1, -5, -9)
    # d = -4 clamped to -2; d = 4 clamped to 2, its k3 above 3; d = 1 within
    parts, gradient = run(config, logprobs, logprobs, row(0, 0, 0), ref=row(-5, -1, -8))
    close(parts.loss, (math.exp(-2) + 1 + 3 + math.e - 2) / 3)
    close(gradient, 0, 0, (math.e - 2 + 1 - math.e) / 3)


def test_a_kl_penalty_in_the_reward_is_not_in_the_loss_too() -> None:
    parts, gradient = run(LossConfig(use_kl_in_reward=True), row(-1), row(-1), row(0))
    close(parts.loss, 0)
    close(gradient, 0)


def test_positive_examples_are_those_of_the_whole_batch() -> None:
    config = LossConfig(**NO_KL, positive_example_nll_weight=0.5)
    logprobs = row(-1, -2, -4)
    parts, gradient = run(config, logprobs, logprobs, row(0, 0, 0), lengths=(2, 1), rewards=row(1, 0))
    close(parts.loss, 0.5 * 1.5)
    close(parts.sums["positive_nll_loss"], 1.5)
    close(gradient, -0.25, -0.25, 0)


def test_a_trainer_and_a_generator_that_disagree() -> None:
    """The worked example of the divergences: log-probabilities -15 (trainer) and -5 (generator), and the other way round."""
    parts, _ = run(LossConfig(**NO_KL), row(-15), row(-15), row(1), row(-5))
    assert float(parts.sums["gen_kl_error"]) == pytest.approx(9.000, abs=1e-3)
    assert float(parts.sums["policy_kl_error"]) == pytest.approx(22015.47, abs=1e-2)
    assert float(parts.sums["js_divergence_error"]) == pytest.approx(4.307, abs=1e-3)
    assert float(parts.sums["token_mult_prob_error"]) == pytest.approx(math.exp(10))
    parts, _ = run(LossConfig(**NO_KL), row(-5), row(-5), row(1), row(-15))
    assert float(parts.sums["gen_kl_error"]) == pytest.approx(22015.47, abs=1e-2)
    assert float(parts.sums["policy_kl_error"]) == pytest.approx(9.000, abs=1e-3)
    assert float(parts.sums["js_divergence_error"]) == pytest.approx(4.307, abs=1e-3)
    assert float(parts.sums["approx_entropy"]) == pytest.approx(5 * math.exp(10))


def test_metrics_compare_trainer_and_generator_for_any_ratio() -> None:
    """With the behaviour policy as the ratio's denominator, ratio and metrics would else agree with it by definition."""
    config = LossConfig(**NO_KL, prev_logprobs_source="generation")
    rollout, old = row(-1, -2), row(-1.5, -2.25)
    parts, _ = run(config, old, old, torch.ones(2), rollout, ages=torch.ones(2))
    close(parts.sums["token_mult_prob_error"], (math.exp(0.5) + math.exp(0.25)) / 2)
    close(parts.sums["sampling_importance_ratio"], (math.exp(-0.5) + math.exp(-0.25)) / 2)
    assert float(parts.sums["gen_kl_error"]) > 0


@settings(max_examples=50)
@given(config=loss_cases.configs(), case=loss_cases.cases)
def test_without_old_log_probabilities_those_of_the_only_pass_serve(config: LossConfig, case: Case) -> None:
    given = dataclasses.replace(case, old_logprobs=case.logprobs).tokens()
    outputs = case.output(), case.output()
    expected = policy_loss(config, outputs[0], given, case.counts)
    found = policy_loss(config, outputs[1], dataclasses.replace(given, old_logprobs=None), case.counts)
    assert found.loss.equal(expected.loss)
    assert found.sums == expected.sums
    for parts in (expected, found):
        parts.loss.backward()
    assert outputs[1].logprobs.grad.equal(outputs[0].logprobs.grad)


# -- how a batch is split and ordered ----------------------------------------------------------------------------------


def shares(
    config: LossConfig, case: Case, micro_batches: list[list[int]]
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Metrics of the micro-batches together; gradients by sequence."""
    every: list[LossParts] = []
    gradients: dict[int, Tensor] = {}
    for sequences in micro_batches:
        part = case.of(sequences)
        output = part.output()
        every.append(policy_loss(config, output, part.tokens(), case.counts))
        every[-1].loss.backward()
        assert output.logprobs.grad is not None
        pieces = output.logprobs.grad.split([int(n) for n in part.present.sum(1)])
        gradients |= dict(zip(sequences, pieces, strict=True))
    totals = {name: torch.stack([p.sums[name] for p in every]).sum() for name in every[0].sums}
    totals |= {name: torch.stack([p.minima[name] for p in every]).min() for name in every[0].minima}
    totals |= {name: torch.stack([p.maxima[name] for p in every]).max() for name in every[0].maxima}
    return totals, gradients


@given(config=loss_cases.configs(), case=loss_cases.cases, data=st.data())
def test_micro_batches_and_order_of_sequences_change_nothing(
    config: LossConfig, case: Case, data: st.DataObject
) -> None:
    case = case.under(config)
    places = list(range(len(case.rewards)))
    order = data.draw(st.permutations(places))
    ends = sorted(data.draw(st.lists(st.integers(0, len(places)), max_size=3)))
    split = [order[i:j] for i, j in zip([0, *ends], [*ends, len(places)], strict=True)]
    totals, gradients = shares(config, case, [places])
    again, gradients_again = shares(config, case, split)
    assert totals.keys() == again.keys()
    for name, value in totals.items():
        torch.testing.assert_close(again[name], value, rtol=1e-10, atol=1e-12)
    for place, gradient in gradients.items():
        torch.testing.assert_close(gradients_again[place], gradient, rtol=1e-10, atol=1e-12)
