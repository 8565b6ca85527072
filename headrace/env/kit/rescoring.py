"""Compares the rewards of scored trajectories with those from another environment, or another build of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.env.kit.example_samples import close
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Group


@dataclasses.dataclass(frozen=True)
class Rescored:
    """A trajectory with its stored reward, and its new score."""

    group: Group
    trajectory: AnyTrajectory
    before: float
    after: Score

    @property
    def change(self) -> float:
        """The change of its reward; 0 without a new one."""
        return 0.0 if self.after.reward is None else self.after.reward - self.before

    @property
    def differs(self) -> bool:
        return self.after.reward is not None and not close(self.after.reward, self.before)


@dataclasses.dataclass(frozen=True)
class Rewards:
    """The rewards of some groups: mean and standard deviation. `spread` is the mean of the standard deviations within a group. `flat` is
    the share of groups whose rewards are all equal, from which nothing is learnt."""

    mean: float
    deviation: float
    spread: float
    flat: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The effect of scoring again. `before` and `after` are over the `groups` in which every trajectory gets a reward now. `failures`
    counts the trajectories without one, by reason."""

    groups: int
    trajectories: int
    differing: int
    before: Rewards | None
    after: Rewards | None
    failures: Mapping[str, int]


def compare(rescored: Sequence[Rescored]) -> Comparison:
    by_group: dict[str, list[Rescored]] = {}
    for each in rescored:
        by_group.setdefault(each.group.id, []).append(each)
    whole = [group for group in by_group.values() if all(each.after.reward is not None for each in group)]
    failures = Counter(f"{each.after.status}: {each.after.message}" for each in rescored if each.after.reward is None)
    return Comparison(
        groups=len(whole),
        trajectories=len(rescored),
        differing=sum(each.differs for each in rescored),
        before=rewards([[each.before for each in group] for group in whole]),
        after=rewards([[float(each.after.reward or 0.0) for each in group] for group in whole]),
        failures=dict(failures.most_common()),
    )


def rewards(groups: Sequence[Sequence[float]]) -> Rewards | None:
    """Return the statistics of these groups' rewards; None without groups."""
    if not groups:
        return None
    every = np.concatenate([np.asarray(group, np.float64) for group in groups])
    return Rewards(
        mean=float(every.mean()),
        deviation=float(every.std()),
        spread=float(np.mean([np.std(group) for group in groups])),
        flat=float(np.mean([max(group) == min(group) for group in groups])),
    )
