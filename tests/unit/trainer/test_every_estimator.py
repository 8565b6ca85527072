"""What holds for every estimator, whatever its formula: ranks, age, clamps, metrics, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Config
from headrace.config.advantages import AdvEstimator, PPOAdvEstimator
from headrace.config.loss import LossFn
from headrace.errors import ServiceError
from services.trainer.learning.advantages import Needs, Settings, needs
from services.trainer.learning.tokens import Float64
from tests.unit.trainer.advantage_cases import KL, NO_KL, Batch, batches, episode

ESTIMATORS = [
    AdvEstimator(),
    AdvEstimator(name="gdpo", reward_weights=[1.0, 0.3]),
    AdvEstimator(name="reinforce_plus_plus"),
    AdvEstimator(name="reinforce_plus_plus", kl_to_go=True),
    AdvEstimator(name="opd"),
    PPOAdvEstimator(length_adaptive_alpha=0.5, gae_lambda_value=1.0),
    PPOAdvEstimator(name="raw_reward"),
]
EACH = pytest.mark.parametrize("estimator", ESTIMATORS, ids=[f"{i}-{e.name}" for i, e in enumerate(ESTIMATORS)])


@EACH
@settings(max_examples=40)
@given(batch=batches(least=2), data=st.data())
def test_any_split_over_ranks_gives_the_same_bits(
    estimator: AdvEstimator | PPOAdvEstimator, batch: Batch, data: st.DataObject
) -> None:
    size = len(batch.episodes)
    owners = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    how = Settings(estimator, clip_high=2.0)
    alone, shared = batch.estimates(how, KL["k3"]), batch.estimates(how, KL["k3"], owners)
    assert alone.metrics == shared.metrics
    for ours, theirs in zip(alone.advantages, shared.advantages, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(alone.returns or (), shared.returns or (), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@EACH
@settings(max_examples=40)
@given(batch=batches(least=2))
def test_tokens_over_age_are_seen_like_the_others(estimator: AdvEstimator | PPOAdvEstimator, batch: Batch) -> None:
    young = Batch(tuple(dataclasses.replace(e, mask=np.ones(e.length, dtype=bool)) for e in batch.episodes), batch.n)
    ours, theirs = (b.estimates(Settings(estimator), KL["k3"]) for b in (batch, young))
    np.testing.assert_array_equal(np.concatenate(ours.advantages), np.concatenate(theirs.advantages))


@EACH
@settings(max_examples=40)
@given(batch=batches(least=2), low=st.floats(-1, -0.1), high=st.floats(0.1, 1))
def test_advantages_are_clamped_last_and_measured_as_they_are_trained_on(
    estimator: AdvEstimator | PPOAdvEstimator, batch: Batch, low: float, high: float
) -> None:
    free = batch.estimates(Settings(estimator), KL["k3"])
    found = batch.estimates(Settings(estimator, clip_low=low, clip_high=high), KL["k3"])
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
def test_the_names_of_metrics_do_not_depend_on_the_data(estimator: AdvEstimator | PPOAdvEstimator) -> None:
    ones = {name: np.zeros(3) for name in ("start", "ref", "values")}
    none = {name: np.zeros(0) for name in ("start", "ref", "values")}
    components = {"correct": 0.0, "format": 1.0}
    full = Batch(tuple(episode(i, 2, components=components, **ones) for i in range(4)), 2)
    empty = Batch(tuple(episode(i, 2, components=components, length=0, multiplier=0.0, **none) for i in range(4)), 2)
    names = [set(b.estimates(Settings(estimator), KL["k3"]).metrics) for b in (full, empty)]
    assert names[0] == names[1]


def test_the_share_of_trivial_baselines_is_measured() -> None:
    rewards = [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    batch = Batch(tuple(episode(i, 4, reward=float(r)) for i, r in enumerate(rewards)), 4)
    found = batch.estimates(Settings(AdvEstimator(), leave_one_out=False), NO_KL).metrics
    assert found["baseline_reward/pct_0"] == pytest.approx(100 / 3)
    assert found["baseline_reward/pct_1"] == pytest.approx(100 / 3)
    assert found["baseline_reward/pct_mixed"] == pytest.approx(100 / 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("owners", [(), (1, 0, 2, 1)], ids=["one-rank", "three-ranks"])
def test_values_that_are_not_finite_are_an_error_that_every_rank_raises(value: float, owners: tuple[int, ...]) -> None:
    values = [np.zeros(3), np.zeros(3), np.zeros(3), np.array([0.0, value, 0.0])]
    batch = Batch(tuple(episode(i, 2, values=v) for i, v in enumerate(values)), 2)
    with pytest.raises(ServiceError, match=r"^trajectory 'p1'\[1\]: values that are not finite"):
        batch.estimates(Settings(PPOAdvEstimator()), NO_KL, owners)


@pytest.mark.parametrize("owners", [(), (1, 0, 2, 1), (2, 2, 0, 0)], ids=["one-rank", "three-ranks", "other-order"])
@pytest.mark.parametrize(
    ("estimator", "loss_fn"),
    [(AdvEstimator(name="opd"), NO_KL), (AdvEstimator(name="reinforce_plus_plus"), KL["k1"])],
    ids=["opd", "kl-in-reward"],
)
def test_the_first_of_several_is_named_whichever_rank_holds_it(
    estimator: AdvEstimator, loss_fn: LossFn, owners: tuple[int, ...]
) -> None:
    def start(i: int) -> Float64:
        return np.full(3, math.nan if i in (1, 3) else -1.0)

    batch = Batch(tuple(episode(i, 2, start=start(i), ref=-np.ones(3)) for i in range(4)), 2)
    with pytest.raises(
        ServiceError,
        match=r"^trajectory 'p0'\[1\] and 1 more of the 4 trajectories: log-probabilities that are not finite",
    ):
        batch.estimates(Settings(estimator), loss_fn, owners)


def test_an_array_that_is_missing_or_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trajectory 'p0'\[0\]: values of shape None for 3 tokens"):
        Batch((episode(),), 1).estimates(Settings(PPOAdvEstimator()), NO_KL)
    with pytest.raises(ValueError, match=r"trajectory 'p0'\[0\]: values of shape \(2,\) for 3 tokens"):
        Batch((episode(values=np.zeros(2)),), 1).estimates(Settings(PPOAdvEstimator()), NO_KL)


@pytest.mark.parametrize(
    ("estimator", "loss_fn", "expected"),
    [
        (AdvEstimator(), NO_KL, Needs(start=False, ref=False, values=False)),
        (AdvEstimator(name="reinforce_plus_plus"), NO_KL, Needs(start=False, ref=False, values=False)),
        (AdvEstimator(name="reinforce_plus_plus"), KL["k3"], Needs(start=True, ref=True, values=False)),
        (
            AdvEstimator(name="reinforce_plus_plus"),
            LossFn(use_kl_in_reward=True, reference_policy_kl_penalty=0),
            Needs(start=False, ref=False, values=False),
        ),
        (AdvEstimator(name="opd"), NO_KL, Needs(start=True, ref=True, values=False)),
        (PPOAdvEstimator(), NO_KL, Needs(start=False, ref=False, values=True)),
        (PPOAdvEstimator(), KL["k2"], Needs(start=True, ref=True, values=True)),
        (PPOAdvEstimator(name="raw_reward"), NO_KL, Needs(start=False, ref=False, values=False)),
    ],
    ids=["grpo", "reinforce", "reinforce-kl", "reinforce-kl-of-weight-0", "opd", "gae", "gae-kl", "raw"],
)
def test_only_what_an_estimator_needs_has_to_be_there(
    estimator: AdvEstimator | PPOAdvEstimator, loss_fn: LossFn, expected: Needs
) -> None:
    how = Settings(estimator, leave_one_out=False)
    assert needs(how, loss_fn) == expected
    asked = {name: np.zeros(3) for name, wanted in dataclasses.asdict(expected).items() if wanted}
    Batch((episode(**asked),), 1).estimates(how, loss_fn)
    for name in asked:
        with pytest.raises(ValueError, match=name):
            Batch((episode(**{**asked, name: None}),), 1).estimates(how, loss_fn)


def test_settings_take_from_grpo_what_the_estimator_leaves_open() -> None:
    grpo = {"normalize_rewards": False, "use_leave_one_out_baseline": True, "advantage_clip_high": 3.0}
    own = {"adv_estimator": {"normalize_rewards": True, "use_leave_one_out_baseline": False}}
    for section, expected in ((grpo, (False, True)), ({**grpo, **own}, (True, False))):
        found = Settings.of(Config.model_validate({"grpo": section}).algorithm)
        assert (found.normalize_rewards, found.leave_one_out, found.clip_low, found.clip_high) == (*expected, None, 3.0)
    assert Settings.of(Config.model_validate({"ppo": {}}).algorithm).estimator == PPOAdvEstimator()
