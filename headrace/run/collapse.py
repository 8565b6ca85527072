"""Tells from a run's metrics whether its policy has collapsed, since which step, and what the likely cause is.

Two rules, both over means of `WINDOW` steps:

*The reward fell.* Its mean is below the run's best by at least half of what the run had gained since its first steps. If it had gained
little, it is below by half of the best mean or by the standard deviation of the rewards, whichever is less. And the fall stands out from
the differences between single steps, because the rewards of small batches vary.

*Completions repeat themselves.* The share of repeated tokens (`repetition`) is above one half, and well above that of the first steps.
Rewards may rise meanwhile, if repetition is what they reward.

The likely cause of a fall is another build of an environment, or else the first one in `_explain` that fits.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from headrace.run.headlines import build_changes
from headrace.run.journal import Line

WINDOW = 5
# A smaller fall of the mean reward, in standard errors of a window, may be chance: the best of many windows was lucky. They are estimated
# from the newest differences between neighbouring steps, so many at most.
_STANDARD_ERRORS, _DIFFERENCES = 8.0, 200
_REPEATED, _MORE_THAN_AT_FIRST = 0.5, 0.3  # shares of tokens
_OFF_POLICY = 0.5  # the share of off-policy tokens from which they explain a fall
_GREW = 10.0  # times the norm of the gradient before the fall
# Steps remembered since the best window: the newest ones. They are enough to see a fall, if not always its first step.
_REMEMBERED = 500
_WATCHED = (
    "reward",
    "reward_std",
    "groups_without_spread",
    "entropy",
    "repetition",
    "truncation_rate",
    "mean_gen_tokens_per_sample",
    "grad_norm",
    "off_policy_tokens",
)

Metrics = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Collapse:
    """A collapse that lasts. `step` is its first step. `before` and `after` are means of metrics: over the best window of the run (for
    repetition the first), and over that in which the collapse was noticed. `edited_at`: the step from which on another build of an
    environment scores, which explains it."""

    step: int
    what: str
    cause: str
    remedy: str
    before: Metrics
    after: Metrics
    edited_at: int | None = None

    @property
    def evidence(self) -> list[str]:
        """The metrics that changed, as `entropy 0.81 → 0.004`."""
        shown = {name: (f"{self.before.get(name, math.nan):.3g}", f"{value:.3g}") for name, value in self.after.items()}
        return [f"{name} {before} → {after}" for name, (before, after) in shown.items() if before != after]

    def __str__(self) -> str:
        said = f"the policy collapsed at step {self.step}"
        if self.edited_at is not None:
            said = f"an environment was edited at step {self.edited_at}, which may be no fault of the policy"
        return f"{said}: {self.what}. {self.cause}; {self.remedy}"

    def describe_way_back(self, run: str, checkpoints: Sequence[int]) -> str:
        """Return how to continue from before it, if any of the run's `checkpoints` (versions, oldest first) allows that."""
        healthy = [version for version in checkpoints if version < self.step]
        if healthy:
            return f"`headrace rewind {run} {healthy[-1]}` goes back to the newest checkpoint from before it"
        kept = (
            f"its checkpoints ({', '.join(map(str, checkpoints))}) are all later"
            if checkpoints
            else "it has no checkpoint"
        )
        return f"{kept}; save more often (checkpointing.save_period), or keep more (checkpointing.keep_top_k)"


class CollapseDetector:
    """Watches the training steps of a history, in their order. `found` is the collapse that lasts at the newest one."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        """`lines` are those so far, as `surviving` returns them."""
        self.found: Collapse | None = None
        self._count = 0
        self._first: Metrics = {}  # the first window's means
        self._best: Metrics = {}  # those of the window with the highest reward
        self._window: deque[Line] = deque(maxlen=WINDOW)
        self._since_best: deque[Line] = deque(maxlen=_REMEMBERED)
        self._differences: deque[float] = deque(maxlen=_DIFFERENCES)
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> Collapse | None:
        """Add a line; only those of training steps count. Returns `found`."""
        if line.kind != "train" or not math.isfinite(reward := line.metrics.get("reward", math.nan)):
            return self.found
        if self._window:
            self._differences.append(abs(reward - self._window[-1].metrics["reward"]))
        self._count += 1
        self._window.append(line)
        now = _means(self._window)
        if self._count <= WINDOW:
            self._first = now
        if not self._best or now["reward"] >= self._best["reward"]:
            self._best = now
            self._since_best.clear()
        self._since_best.append(line)
        self.found = self._find_repetition(now) or self._find_fall(now)
        return self.found

    def _find_repetition(self, now: Metrics) -> Collapse | None:
        repeated, at_first = (means.get("repetition", 0.0) for means in (now, self._first))
        if self._count < 2 * WINDOW or repeated <= max(_REPEATED, at_first + _MORE_THAN_AT_FIRST):
            return None
        if self.found is not None:
            return self.found
        return Collapse(
            self._window[0].step,
            f"completions repeat themselves: {repeated:.0%} of their tokens, {at_first:.0%} at first",
            "The reward pays for repetition, or nothing holds the policy near its start",
            "look at samples; then mend the reward, or raise loss_fn.reference_policy_kl_penalty",
            self._first,
            now,
        )

    def _find_fall(self, now: Metrics) -> Collapse | None:
        if len(self._since_best) <= WINDOW:  # the window overlaps the best one
            return None
        lowest = self._best["reward"] - self._largest_fall()
        if now["reward"] >= lowest:
            return None
        if self.found is not None:
            return self.found
        step = next(line.step for line in self._since_best if line.metrics["reward"] < lowest)
        what = f"the mean reward fell from {self._best['reward']:.3g} to {now['reward']:.3g}"
        for edited_at, change in build_changes((line.step, line.builds) for line in self._since_best):
            return Collapse(step, what, f"In {change}", "look at what it scores now", self._best, now, edited_at)
        cause, remedy = self._explain(now)
        return Collapse(step, what, cause, remedy, self._best, now)

    def _largest_fall(self) -> float:
        """The largest difference from the best mean reward that is no collapse."""
        best = self._best["reward"]
        little = min(abs(best) / 2, self._best.get("reward_std", math.inf))
        # the mean of the differences' sizes is 2 / sqrt(pi) of the standard deviation, if that is normal
        deviation = statistics.fmean(self._differences) * math.sqrt(math.pi) / 2
        return max((best - self._first["reward"]) / 2, little, _STANDARD_ERRORS * deviation / math.sqrt(WINDOW))

    def _explain(self, now: Metrics) -> tuple[str, str]:
        """Return the likely cause of a fall that no build explains, and the remedy."""
        best, since = self._best, self._since_best
        highest = {name: max((line.metrics.get(name, 0.0) for line in since), default=0.0) for name in _WATCHED}
        if highest["off_policy_tokens"] >= _OFF_POLICY:
            return (
                f"Up to {highest['off_policy_tokens']:.0%} of a step's tokens were off-policy: the weights changed too fast for the age of "
                "the data",
                "lower the learning rate or the age bound, or correct for it (loss_fn.use_importance_sampling_correction)",
            )
        norm = best.get("grad_norm", math.inf)
        if highest["grad_norm"] > _GREW * norm:
            return (
                f"The gradient grew from {norm:.3g} to {highest['grad_norm']:.3g}",
                "lower the learning rate or policy.max_grad_norm",
            )
        if _writes_alike(best, now):
            return "The policy writes as before, so the reward has changed", "look at the environment and the data"
        if (cut := now.get("truncation_rate", 0.0)) > best.get("truncation_rate", 0.0) + 0.3:
            return (
                f"{cut:.0%} of the completions are cut off",
                "raise policy.generation.max_new_tokens, or take length into the reward (reward_shaping)",
            )
        if now.get("entropy", math.inf) < best.get("entropy", 0.0) / 10:
            return "The policy has almost no randomness left", "lower the learning rate, or raise the temperature"
        return "No single metric explains it", "compare samples from before and after"


def _means(lines: Iterable[Line]) -> Metrics:
    """Return the means of the watched metrics over the lines that have them."""
    values: dict[str, list[float]] = {}
    for line in lines:
        for name in _WATCHED:
            if name in line.metrics:
                values.setdefault(name, []).append(line.metrics[name])
    return {name: statistics.fmean(of) for name, of in values.items()}


def _writes_alike(before: Metrics, after: Metrics) -> bool:
    """Whether entropy, lengths and truncation are about the same."""

    def ratio(name: str) -> float:
        return (after.get(name, 0.0) + 1e-3) / (before.get(name, 0.0) + 1e-3)

    cut = after.get("truncation_rate", 0.0) - before.get("truncation_rate", 0.0)
    return 0.5 < ratio("entropy") < 2 and 0.75 < ratio("mean_gen_tokens_per_sample") < 1.33 and abs(cut) < 0.1
