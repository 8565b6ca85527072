"""Explains the metrics and builds of a step, in the same words for `headrace up`, `headrace status`, the log and the page."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from headrace.base.devices import NCCL_REMEDY

# The steps whose pace tells how long the others take.
_RECENT = 10
# A training step has the metric `NAME_alarm` for each.
ALARMS = ("train_inference", "equal_rewards", "collapse", "weight_channel")


def accuracy_name(metrics: Mapping[str, float]) -> str:
    """Return the name to show for a validation's metric `accuracy`: it is an accuracy only if every reward is 0 or 1."""
    return "mean reward" if metrics.get("partial_credit") else "accuracy"


def incomplete(metrics: Mapping[str, float]) -> str:
    """Return what a validation lacks that was given up, lost or skipped; empty for one that is complete."""
    pending = metrics.get("pending", 0.0)
    return f"{pending:.0f} prompts have no result" if pending else ""


def alarms(step: int, metrics: Mapping[str, float], only: Collection[str] = ALARMS) -> list[str]:
    """Return the alarms of a training step, one sentence each; `only` those of these names."""
    found = {}
    if metrics.get("train_inference_alarm"):
        error = metrics.get("on_policy_token_mult_prob_error", metrics.get("token_mult_prob_error", float("nan")))
        found["train_inference"] = (
            f"trainer and inference disagree (token_mult_prob_error {error:.3f}); see the trainer's log"
        )
    if metrics.get("equal_rewards_alarm"):
        found["equal_rewards"] = (
            "nothing to learn from, all groups have had equal rewards for several steps; see the trainer's log"
        )
    if metrics.get("collapse_alarm"):
        found["collapse"] = "the reward fell, or completions repeat themselves; see the trainer's log"
    if given_up := metrics.get("weight_channel_alarm"):
        how = "weights travel by gloo, because NCCL can't" if given_up > 1 else "only with blocking calls does NCCL"
        found["weight_channel"] = f"{how} connect the trainer and its replicas; {NCCL_REMEDY}"
    return [f"step {step}: {said}" for name, said in found.items() if name in only]


def build_changes(steps: Iterable[tuple[int, Mapping[str, Sequence[str]]]]) -> list[tuple[int, str]]:
    """Return where an environment changed to another build, from steps with their builds by environment: the first step with groups of the
    new build, and a sentence."""
    found = []
    known: dict[str, Sequence[str]] = {}
    for step, builds_of in steps:
        for name, builds in builds_of.items():
            former = known.get(name, builds)
            found += [
                (step, f"step {step}: environment {name} scores with build {_name(build)}, after {_name(former[-1])}")
                for build in builds
                if build not in former
            ]
            known[name] = builds
    return found


def _name(build: str) -> str:
    return build or "unnamed"


def follows_start(metrics: Mapping[str, float]) -> bool:
    """Whether a step is the first after a start of the trainer. The replicas load their models in it, so its times are not typical."""
    return "efficiency/init/total_s" in metrics


def seconds_per_step(steps: Iterable[Mapping[str, float]]) -> float | None:
    """Return the median time of training steps, from their metrics. A step after a start counts only if there are no others; None without a
    step."""
    timed = [metrics for metrics in steps if "timing/train/total_step_time" in metrics]
    usual = [metrics for metrics in timed if not follows_start(metrics)] or timed
    return statistics.median(metrics["timing/train/total_step_time"] for metrics in usual) if usual else None


def seconds_left(steps: Sequence[Mapping[str, float]], left: int) -> float | None:
    """Return how long `left` further steps take at the pace of the newest of `steps`, which are in order; None without one."""
    pace = seconds_per_step(steps[-_RECENT:])
    return None if pace is None or left <= 0 else pace * left
