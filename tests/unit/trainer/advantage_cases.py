"""Batches to take advantages of, and what the estimators say of them on one rank or on several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from headrace.config import Config, LossConfig
from headrace.config.grpo import GRPOAdvEstimatorConfig
from headrace.config.ppo import PPOAdvEstimatorConfig
from headrace.records.trajectory import Trajectory
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.learning.algorithms import estimate_advantages
from headrace_services.trainer.learning.batch import Batch, Float64
from tests.support.trainer import batch, on_ranks, trajectory

COMPONENTS = ("correct", "format")
RANKS = 3

NO_KL = LossConfig(reference_policy_kl_penalty=0)
KL = {
    kind: LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.3, reference_policy_kl_type=kind)
    for kind in ("k1", "k2", "k3")
}
OPD = GRPOAdvEstimatorConfig(name="opd", teacher_model_name="teacher")

Estimator = GRPOAdvEstimatorConfig | PPOAdvEstimatorConfig


def configured(
    estimator: Estimator,
    loss_fn: LossConfig = NO_KL,
    n: int = 1,
    policy: Mapping[str, object] | None = None,
    **algorithm: object,
) -> Config:
    """A configuration with groups of `n`, keys of `policy`, and others of `grpo` or `ppo`, whichever the estimator is of."""
    section = "ppo" if isinstance(estimator, PPOAdvEstimatorConfig) else "grpo"
    keys = {"num_generations_per_prompt": n, "adv_estimator": estimator, **algorithm}
    return Config.model_validate({section: keys, "loss_fn": loss_fn, "policy": policy or {}})


class Estimates(NamedTuple):
    """Advantages and returns of each trajectory's tokens, in the order of the batch, and metrics."""

    advantages: list[Float64]
    returns: list[Float64] | None
    metrics: dict[str, float]


def estimates(given: Batch, config: Config, owners: Sequence[int] = ()) -> Estimates:
    """Of a whole batch; `owners` says which rank holds each trajectory (none: one rank holds all)."""

    def of_rank(ranks: Ranks) -> tuple[Batch, dict[str, float]]:
        # a rank need not hold its trajectories in the batch's order
        mine = given.take([i for i, owner in enumerate(owners) if owner == ranks.rank][::-1])
        return mine, estimate_advantages(config, mine, ranks)

    if owners:
        shares = on_ranks(of_rank, RANKS)
    else:
        whole = dataclasses.replace(given)
        shares = [(whole, estimate_advantages(config, whole, Ranks()))]
    assert all(metrics == shares[0][1] for _, metrics in shares)
    columns: dict[str, dict[int, Float64]] = {"advantages": {}, "returns": {}}
    for share, _ in shares:
        for name, of_place in columns.items():
            if (column := getattr(share, name)) is not None:
                of_place.update(zip(share.places.tolist(), by_trajectory(share, column), strict=True))
    advantages, returns = ([of_place[place] for place in sorted(of_place)] for of_place in columns.values())
    return Estimates(advantages, None if shares[0][0].returns is None else returns, shares[0][1])


def by_trajectory(given: Batch, column: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Values [N], those of each trajectory by themselves."""
    return [column[given.trajectory == i] for i in range(len(given))]


def grouped(given: Batch, values: Sequence[Any]) -> list[list[Any]]:
    """One value a trajectory, those of each group together."""
    groups: dict[int, list[Any]] = {}
    for group, value in zip(given.groups.tolist(), values, strict=True):
        groups.setdefault(group, []).append(value)
    return list(groups.values())


def of_length(length: int, place: int, n: int, **given: Any) -> Trajectory:
    """A trajectory with `length` policy tokens, of the group that has its place among groups of `n`."""
    own = [1] * length or [0]  # there is no empty completion: one token of the environment
    return trajectory([1], [2] * len(own), own=own, group=f"p{place // n}", index=place % n, **given)


def made(
    rewards: Sequence[float],
    n: int = 1,
    length: int = 3,
    components: Mapping[str, float] | None = None,
    multipliers: Sequence[float] | None = None,
    **columns: npt.ArrayLike,
) -> Batch:
    """Trajectories of `length` policy tokens in groups of `n`, all with the same reward components; `columns` of their tokens besides."""
    size = len(rewards)
    whole = batch(
        [of_length(length, place, n) for place in range(size)],
        rewards,
        components=[components or {}] * size,
        multipliers=multipliers,
    )
    return dataclasses.replace(whole, **{name: np.ravel(values).astype(np.float32) for name, values in columns.items()})


@st.composite
def batches(draw: st.DrawFn, least: int = 1) -> Batch:
    """Groups of `least` to 4, of 0 to 6 tokens each, some left out of the loss, some tokens over age; extremes included. All columns
    that any estimator reads are there."""
    groups, n = draw(st.integers(1, 4)), draw(st.integers(least, 4))
    size = groups * n
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    weights = draw(st.sampled_from([(1.0,), (0.0,), (0.0, 0.5, 1.0)]))
    constant = draw(st.booleans())
    nearness = draw(st.sampled_from([1e-3, 1.0, 80.0]))  # of policy and reference

    def reward() -> float:
        return 0.7 if constant else float(rng.choice([0.0, 1.0, rng.uniform(-3, 3)]))

    whole = batch(
        [
            of_length(length, place, n, versions=rng.choice([3, 5], max(length, 1)).tolist())
            for place, length in enumerate(lengths)
        ],
        [reward() for _ in range(size)],
        components=[{name: reward() for name in COMPONENTS} for _ in range(size)],
        multipliers=rng.choice(weights, size).tolist(),
        step=5,
        max_age=1,
    )
    count = sum(lengths)
    old = -rng.uniform(0, 80, count)
    others = (np.minimum(old + rng.uniform(-nearness, nearness, count), 0.0).astype(np.float32) for _ in range(2))
    whole.old_logprobs = old.astype(np.float32)
    whole.ref_logprobs, whole.teacher_logprobs = others
    whole.values = rng.uniform(-5, 5, count).astype(np.float32)
    return whole
