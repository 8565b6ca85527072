"""What holds for every estimator, whatever its formula: ranks, age, clamps, metrics, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ServiceError
from headrace.config import Config, LossConfig
from headrace.config.grpo import GRPOAdvEstimatorConfig
from headrace.config.ppo import PPOAdvEstimatorConfig
from headrace_services.trainer.learning import algorithms
from headrace_services.trainer.learning.batch import Batch
from tests.unit.trainer.advantage_cases import KL, NO_KL, OPD, Estimator, batches, configured, estimates, grouped, made

ESTIMATORS = [
    GRPOAdvEstimatorConfig(),
    GRPOAdvEstimatorConfig(name="gdpo", reward_weights=[1.0, 0.3]),
    GRPOAdvEstimatorConfig(name="reinforce_plus_plus"),
    GRPOAdvEstimatorConfig(name="reinforce_plus_plus", kl_to_go=True),
    OPD,
    PPOAdvEstimatorConfig(length_adaptive_alpha=0.5, gae_lambda_value=1.0),
    PPOAdvEstimatorConfig(name="raw_reward"),
]
EACH = pytest.mark.parametrize("estimator", ESTIMATORS, ids=[f"{i}-{e.name}" for i, e in enumerate(ESTIMATORS)])


# the column that each pass adds
COLUMNS = {"old": "old_logprobs", "ref": "ref_logprobs", "teacher": "teacher_logprobs", "values": "values"}


def with_kl(estimator: Estimator, batch: Batch, **algorithm: float) -> Config:
    """With a KL penalty in the rewards where the estimator takes one, else the configuration is refused."""
    loss_fn = KL["k3"] if estimator.takes_kl else NO_KL
    n = len(grouped(batch, batch.places.tolist())[0])
    return configured(estimator, loss_fn, n, **algorithm)


@EACH
@given(batch=batches(least=2), data=st.data())
def test_any_split_over_ranks_gives_the_same_bits(estimator: Estimator, batch: Batch, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, 2), min_size=batch.size, max_size=batch.size))
    config = with_kl(estimator, batch, advantage_clip_high=2.0)
    alone, shared = estimates(batch, config), estimates(batch, config, owners)
    assert alone.metrics == shared.metrics
    for ours, theirs in zip(alone.advantages, shared.advantages, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (alone.returns is None) == (shared.returns is None)
    for ours, theirs in zip(alone.returns or (), shared.returns or (), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@EACH
@given(batch=batches(least=2))
def test_tokens_over_age_are_seen_like_the_others(estimator: Estimator, batch: Batch) -> None:
    young = dataclasses.replace(batch, mask=np.ones_like(batch.mask))
    ours, theirs = (estimates(b, with_kl(estimator, b)) for b in (batch, young))
    np.testing.assert_array_equal(np.concatenate(ours.advantages), np.concatenate(theirs.advantages))


@EACH
@given(batch=batches(least=2), low=st.floats(-1, -0.1), high=st.floats(0.1, 1))
def test_advantages_are_clamped_last_and_measured_as_trained(
    estimator: Estimator, batch: Batch, low: float, high: float
) -> None:
    free = estimates(batch, with_kl(estimator, batch))
    found = estimates(batch, with_kl(estimator, batch, advantage_clip_low=low, advantage_clip_high=high))
    for clamped, before in zip(found.advantages, free.advantages, strict=True):
        np.testing.assert_array_equal(clamped, np.minimum(np.maximum(before, low), high))
    flat = np.concatenate(found.advantages)
    expected = {
        "advantages/mean": flat.mean() if flat.size else 0.0,
        "advantages/std": flat.std(ddof=1) if flat.size > 1 else 0.0,
        "advantages/min": flat.min() if flat.size else 0.0,
        "advantages/max": flat.max() if flat.size else 0.0,
    }
    assert {name: found.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-9)


@EACH
def test_the_names_of_metrics_do_not_depend_on_the_data(estimator: Estimator) -> None:
    components = {"correct": 0.0, "format": 1.0}
    full = made([0.0] * 4, 2, components=components, **{name: np.zeros(12) for name in COLUMNS.values()})
    none = {name: np.zeros(0) for name in COLUMNS.values()}
    empty = made([0.0] * 4, 2, 0, components, multipliers=[0.0] * 4, **none)
    names = [set(estimates(b, with_kl(estimator, b)).metrics) for b in (full, empty)]
    assert names[0] == names[1]


def test_the_share_of_trivial_baselines_is_measured() -> None:
    rewards = [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    config = configured(GRPOAdvEstimatorConfig(), n=4, use_leave_one_out_baseline=False)
    found = estimates(made(rewards, 4), config).metrics
    assert found["baseline_reward/pct_0"] == pytest.approx(100 / 3)
    assert found["baseline_reward/pct_1"] == pytest.approx(100 / 3)
    assert found["baseline_reward/pct_mixed"] == pytest.approx(100 / 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("owners", [(), (1, 0, 2, 1)], ids=["one-rank", "three-ranks"])
def test_values_that_are_not_finite_are_an_error_on_every_rank(value: float, owners: tuple[int, ...]) -> None:
    values = np.zeros((4, 3))
    values[3, 1] = value
    with pytest.raises(ServiceError, match=r"^trajectory 'p1'\[1\]: values.*finite"):
        estimates(made([0.0] * 4, 2, values=values), configured(PPOAdvEstimatorConfig(), n=2), owners)


@pytest.mark.parametrize("owners", [(), (1, 0, 2, 1), (2, 2, 0, 0)], ids=["one-rank", "three-ranks", "other-order"])
@pytest.mark.parametrize(
    ("estimator", "loss_fn"),
    [(OPD, NO_KL), (GRPOAdvEstimatorConfig(name="reinforce_plus_plus"), KL["k1"])],
    ids=["opd", "kl-in-reward"],
)
def test_the_first_of_several_is_named_whichever_rank_holds_it(
    estimator: GRPOAdvEstimatorConfig, loss_fn: LossConfig, owners: tuple[int, ...]
) -> None:
    old = np.full((4, 3), -1.0)
    old[[1, 3]] = math.nan
    batch = made([0.0] * 4, 2, old_logprobs=old, ref_logprobs=-np.ones(12), teacher_logprobs=-np.ones(12))
    with pytest.raises(ServiceError, match=r"^trajectory 'p0'\[1\] and 1 more of the 4.*log-prob"):
        estimates(batch, configured(estimator, loss_fn, 2), owners)


def test_a_column_that_is_missing_or_of_another_length_is_refused() -> None:
    config = configured(PPOAdvEstimatorConfig())
    with pytest.raises(AssertionError):
        estimates(made([0.0]), config)
    with pytest.raises(ValueError, match="same length"):
        estimates(made([0.0], values=np.zeros(2)), config)


@pytest.mark.parametrize(
    ("estimator", "loss_fn", "expected"),
    [
        (GRPOAdvEstimatorConfig(), NO_KL, set()),
        (GRPOAdvEstimatorConfig(name="gdpo"), NO_KL, set()),
        (GRPOAdvEstimatorConfig(name="reinforce_plus_plus"), NO_KL, set()),
        (GRPOAdvEstimatorConfig(name="reinforce_plus_plus"), KL["k3"], {"old", "ref"}),
        (
            GRPOAdvEstimatorConfig(name="reinforce_plus_plus"),
            LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0),
            set(),
        ),
        (OPD, NO_KL, {"old", "teacher"}),
        (PPOAdvEstimatorConfig(), NO_KL, {"values"}),
        (PPOAdvEstimatorConfig(), KL["k2"], {"old", "ref", "values"}),
        (PPOAdvEstimatorConfig(name="raw_reward"), NO_KL, set()),
    ],
    ids=["grpo", "gdpo", "reinforce", "reinforce-kl", "reinforce-kl-of-weight-0", "opd", "gae", "gae-kl", "raw"],
)
def test_only_what_an_estimator_needs_must_be_there(
    estimator: Estimator, loss_fn: LossConfig, expected: set[str]
) -> None:
    section = {} if isinstance(estimator, PPOAdvEstimatorConfig) else {"use_leave_one_out_baseline": False}
    config = configured(estimator, loss_fn, n=2, **section)
    assert algorithms.required_passes(config, optimizer_steps=1) == expected
    assert algorithms.needs_unfiltered(config) == ("old" in expected)
    components = {"correct": 0.0, "format": 1.0}
    asked = {COLUMNS[name]: np.zeros(6) for name in expected}
    batch = made([0.0, 1.0], 2, components=components, **asked)
    estimates(batch, config)
    for name in asked:
        with pytest.raises(AssertionError):
            estimates(dataclasses.replace(batch, **{name: None}), config)


@pytest.mark.parametrize(
    ("estimator", "loss_fn"),
    [(OPD, NO_KL), (GRPOAdvEstimatorConfig(name="reinforce_plus_plus"), KL["k3"]), (PPOAdvEstimatorConfig(), KL["k1"])],
    ids=["opd", "reinforce-kl", "gae-kl"],
)
def test_models_are_compared_before_top_k_and_top_p(estimator: Estimator, loss_fn: LossConfig) -> None:
    config = configured(estimator, loss_fn, n=2)
    others = {name: -np.arange(6.0) for name in ("ref_logprobs", "teacher_logprobs", "values")}
    expected = estimates(made([0.0, 1.0], 2, old_logprobs=-np.ones(6), **others), config)
    filtered = np.array([-0.5, -np.inf, -0.5, -0.5, -0.5, -np.inf])
    found = estimates(made([0.0, 1.0], 2, old_logprobs=filtered, old_logprobs_unfiltered=-np.ones(6), **others), config)
    np.testing.assert_array_equal(np.concatenate(found.advantages), np.concatenate(expected.advantages))


@pytest.mark.parametrize(
    ("loss_fn", "keys", "optimizer_steps", "expected"),
    [
        (NO_KL, {}, 1, set()),
        (NO_KL, {}, 2, {"old"}),
        (NO_KL, {"seq_logprob_error_threshold": 1.5}, 1, {"old"}),
        (LossConfig(), {}, 1, {"ref"}),
        (LossConfig(), {}, 3, {"old", "ref"}),
    ],
    ids=["one-step", "two-steps", "threshold", "kl-in-loss", "all"],
)
def test_loss_and_optimizer_steps_ask_for_passes_of_their_own(
    loss_fn: LossConfig, keys: dict[str, float], optimizer_steps: int, expected: set[str]
) -> None:
    config = configured(GRPOAdvEstimatorConfig(), loss_fn, n=2, **keys)
    assert algorithms.required_passes(config, optimizer_steps) == expected


def test_the_configuration_takes_from_grpo_what_is_left_open() -> None:
    grpo = {"normalize_rewards": False, "use_leave_one_out_baseline": True, "advantage_clip_high": 3.0}
    own = {"adv_estimator": {"normalize_rewards": True, "use_leave_one_out_baseline": False}}
    for section, expected in ((grpo, (False, True)), ({**grpo, **own}, (True, False))):
        found = Config.model_validate({"grpo": section}).grpo
        assert found is not None
        assert (found.normalizes, found.leaves_one_out) == expected
        assert (found.advantage_clip_low, found.advantage_clip_high) == (None, 3.0)
    assert Config.model_validate({"ppo": {}}).algorithm.adv_estimator == PPOAdvEstimatorConfig()
