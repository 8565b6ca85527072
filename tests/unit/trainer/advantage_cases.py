"""Batches of made-up trajectories for tests of rewards and advantages, and ranks that share one."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from headrace.config.loss import LossFn
from services.trainer.learning.advantages import AllRanks, Settings, estimate
from services.trainer.learning.tokens import Episode, Estimates, Float64

T = TypeVar("T")

COMPONENTS = ("correct", "format")

NO_KL = LossFn()
KL = {
    kind: LossFn(use_kl_in_reward=True, reference_policy_kl_penalty=0.3, reference_policy_kl_type=kind)
    for kind in ("k1", "k2", "k3")
}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Trajectories of a whole batch, groups of `n` one after the other."""

    episodes: tuple[Episode, ...]
    n: int

    @property
    def rewards(self) -> Float64:
        return np.array([episode.reward for episode in self.episodes])

    @property
    def components(self) -> dict[str, Float64]:
        return {name: np.array([e.components.get(name, 0.0) for e in self.episodes]) for name in COMPONENTS}

    def groups(self) -> list[list[Episode]]:
        return [list(self.episodes[i : i + self.n]) for i in range(0, len(self.episodes), self.n)]

    def estimates(self, settings: Settings, loss_fn: LossFn, owners: Sequence[int] = ()) -> Estimates:
        """Of the whole batch, in its order; `owners` says which rank holds each trajectory (none: one rank holds all)."""
        if not owners:
            return estimate(settings, loss_fn, self.episodes, self.rewards, self.components, self.n, Alone())

        def of_rank(rank: int, ranks: AllRanks) -> Estimates:
            mine = [e for e, owner in zip(self.episodes, owners, strict=True) if owner == rank]
            # a rank need not hold its trajectories in the batch's order
            return estimate(settings, loss_fn, mine[::-1], self.rewards, self.components, self.n, ranks)

        found = on_ranks(of_rank, 3)
        assert all(estimates.metrics == found[0].metrics for estimates in found)
        shares: list[list[Any]] = [list(range(len(f.advantages))) for f in found]
        order = [(owner, shares[owner].pop()) for owner in owners]
        return Estimates(
            tuple(found[rank].advantages[i] for rank, i in order),
            None if found[0].returns is None else tuple((found[rank].returns or ())[i] for rank, i in order),
            found[0].metrics,
        )


class Alone:
    """The collectives of the only rank there is."""

    def sum_array(self, values: Float64) -> Float64:
        return values

    def gather(self, value: T) -> list[T]:
        return [value]


class _Together:
    """Those of one of several ranks, each a thread; `said` is what all of them bring to the collective they are in."""

    def __init__(self, rank: int, barrier: threading.Barrier, said: list[Any]) -> None:
        self._rank = rank
        self._barrier = barrier
        self._said = said

    def sum_array(self, values: Float64) -> Float64:
        tables = self.gather(values)
        assert {t.shape for t in tables} == {values.shape}, "ranks are not in the same collective"
        total: Float64 = np.sum(np.stack(tables), axis=0)
        return total

    def gather(self, value: T) -> list[T]:
        self._said[self._rank] = value
        self._barrier.wait()
        everyone = list(self._said)
        self._barrier.wait()
        return everyone


def on_ranks(work: Callable[[int, AllRanks], T], count: int) -> list[T]:
    """What `work(rank, ranks)` returns on each of `count` ranks that run at once, or what all of them raise."""
    barrier, said = threading.Barrier(count, timeout=10), [None] * count
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, rank, _Together(rank, barrier, said)) for rank in range(count)]
    if any(future.exception() for future in futures):
        assert len({repr(future.exception()) for future in futures}) == 1, [future.exception() for future in futures]
    return [future.result() for future in futures]


def episode(index: int = 0, n: int = 1, **given: Any) -> Episode:
    """One trajectory of 3 tokens and reward 0, but for what is given."""
    length = given.get("length", 3)
    values: Mapping[str, Any] = {
        "name": f"trajectory 'p{index // n}'[{index % n}]",
        "group": index // n,
        "index": index,
        "length": length,
        "reward": 0.0,
        "components": {},
        "mask": np.ones(length, dtype=bool),
        "multiplier": 1.0,
        **given,
    }
    return Episode(**values)


@st.composite
def batches(draw: st.DrawFn, least: int = 1) -> Batch:
    """Groups of `least` to 4, of 0 to 6 tokens each, some left out of the loss, some tokens over age; extremes included."""
    groups, n = draw(st.integers(1, 4)), draw(st.integers(least, 4))
    size = groups * n
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    weights = draw(st.sampled_from([(1.0,), (0.0,), (0.0, 0.5, 1.0)]))
    constant = draw(st.booleans())
    nearness = draw(st.sampled_from([1e-3, 1.0, 80.0]))  # of policy and reference

    def reward() -> float:
        return 0.7 if constant else float(rng.choice([0.0, 1.0, rng.uniform(-3, 3)]))

    episodes = []
    for index, length in enumerate(lengths):
        start = -rng.uniform(0, 80, length)
        episodes.append(
            episode(
                index,
                n,
                length=length,
                reward=reward(),
                components={name: reward() for name in COMPONENTS},
                mask=rng.random(length) < 0.5,
                multiplier=float(rng.choice(weights)),
                start=start,
                ref=np.minimum(start + rng.uniform(-nearness, nearness, length), 0.0),
                values=rng.uniform(-5, 5, length),
            )
        )
    return Batch(tuple(episodes), n)
