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
from services.trainer.learning.advantages import Settings, SumOverRanks, estimate
from services.trainer.learning.tokens import Episode, Estimates, Float64

T = TypeVar("T")

COMPONENTS = ("correct", "format")


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
            return estimate(settings, loss_fn, self.episodes, self.rewards, self.components, self.n, lambda x: x)

        def of_rank(rank: int, sum_over_ranks: SumOverRanks) -> Estimates:
            mine = [e for e, owner in zip(self.episodes, owners, strict=True) if owner == rank]
            # a rank need not hold its trajectories in the batch's order
            return estimate(settings, loss_fn, mine[::-1], self.rewards, self.components, self.n, sum_over_ranks)

        found = on_ranks(of_rank, 3)
        assert all(estimates.metrics == found[0].metrics for estimates in found)
        shares: list[list[Any]] = [list(range(len(f.advantages))) for f in found]
        order = [(owner, shares[owner].pop()) for owner in owners]
        return Estimates(
            tuple(found[rank].advantages[i] for rank, i in order),
            None if found[0].returns is None else tuple((found[rank].returns or ())[i] for rank, i in order),
            found[0].metrics,
        )


def on_ranks(work: Callable[[int, SumOverRanks], T], ranks: int) -> list[T]:
    """What `work(rank, sum_over_ranks)` returns on each of `ranks` ranks that run at once, or what all of them raise."""
    barrier = threading.Barrier(ranks, timeout=10)
    tables: list[Float64] = [np.empty(0)] * ranks

    def run(rank: int) -> T:
        def add(table: Float64) -> Float64:
            tables[rank] = table
            barrier.wait()
            assert {t.shape for t in tables} == {table.shape}, "ranks are not in the same collective"
            total: Float64 = np.sum(np.stack(tables), axis=0)
            barrier.wait()
            return total

        return work(rank, add)

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
    if any(future.exception() for future in futures):
        assert len({repr(future.exception()) for future in futures}) == 1, [future.exception() for future in futures]
    return [future.result() for future in futures]


def episode(index: int = 0, n: int = 1, **given: Any) -> Episode:
    """One trajectory of 3 tokens and reward 0, but for what is given."""
    length = given.get("length", 3)
    values: Mapping[str, Any] = {
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
