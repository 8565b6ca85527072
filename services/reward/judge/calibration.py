"""How far the rewards of judges agree with the scores that people gave the same completions. No I/O.

Of a judge that compares completions, rewards are relative to the others of their prompt, and so are the scores that they are held against.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.config.environments import LLMJudgeConfig
from headrace.env.environment import Sample
from headrace.env.kit.example_samples import LabelledCompletion
from headrace.records.score import Status

from .verdicts import Verdict

Values = npt.NDArray[np.float64]
_DIGITS = 9  # what differs by less is rounding


class Judged(msgspec.Struct, frozen=True):
    """A labelled completion: the score of people, from 0 to 1, and what the judges gave. Without a reward, `message` says why."""

    prompt: int  # equal for those that are compared with each other
    completion: str
    label: float
    status: Status
    reward: float | None
    components: dict[str, float]
    reasons: dict[str, Any]
    message: str


class Calibration(msgspec.Struct, frozen=True):
    """What judges gave to labelled completions. `measures` has, for the reward and for each judge, the numbers of `measure`; `order` those
    of `measure_order`."""

    judged: list[Judged]
    measures: dict[str, dict[str, float | None]]
    order: dict[str, float]

    @property
    def agreement(self) -> float | None:
        return self.measures.get("reward", {}).get("agreement")


def make_samples(labels: Sequence[LabelledCompletion]) -> list[Sample]:
    """Return labelled completions as a run sends them. Those of one prompt are a group."""
    names = [
        hashlib.sha256(json.dumps([each.messages, each.extra_env_info]).encode()).hexdigest()[:16] for each in labels
    ]
    groups: dict[str, dict[int, str]] = {name: {} for name in names}
    for place, (name, each) in enumerate(zip(names, labels, strict=True)):
        groups[name][place] = each.completion
    return [
        Sample(each.completion, each.extra_env_info, each.messages, group_id=name, group_completions=groups[name])
        for name, each in zip(names, labels, strict=True)
    ]


def find_refusal(found: Calibration, name: str, env: LLMJudgeConfig) -> str | None:
    """Return why the judges of `env.<name>` may not be used after this calibration, or None."""
    least, missing = env.min_agreement, [each for each in found.judged if each.reward is None]
    if least is not None and missing:
        which = f"{len(missing)} of {len(found.judged)} completions"
        return f"{which} got no reward, and with min_agreement all need one: {missing[0].message}"
    if least is not None and (found.agreement is None or found.agreement < least):
        agreement = (
            "can't be measured, as no two rewards differ" if found.agreement is None else f"is {found.agreement:.3f}"
        )
        return (
            f"the agreement with people {agreement}, and min_agreement {least:g}; improve rubric or judges (`headrace env calibrate` "
            f"shows where they differ), or lower env.{name}.min_agreement"
        )
    if env.map_to_people and len(fit_monotone(found.judged)[0]) < 2:
        return (
            "the scores of people don't rise with the rewards, so there is nothing to map; set map_to_people to false"
        )
    return None


def measure(judged: Sequence[Judged], compare: str | None) -> dict[str, dict[str, float | None]]:
    """Return how far the reward, and each judge, agrees with the labels: `agreement` (Spearman's rank correlation; None if all are given
    the same) and, unless completions are compared, `kappa` (Cohen's, with quadratic weights: the agreement beyond chance), `error` (the
    mean difference) and `bias` (by how much the reward is higher on average)."""
    scored = [each for each in judged if each.reward is not None]
    if compare in ("group", "pairs"):
        of_prompt = collections.Counter(each.prompt for each in scored)
        scored = [each for each in scored if of_prompt[each.prompt] > 1]
    if not scored:
        return {}
    labels = np.array([each.label for each in scored])
    given = {"reward": np.array([each.reward for each in scored], np.float64)}
    for name in (name for name in scored[0].components if name.startswith("judge_")):
        given[name] = np.array([each.components[name] for each in scored])
    if compare is None:
        return {name: _measure(rewards, labels) for name, rewards in given.items()}
    if compare == "reference":
        return {name: {"agreement": _correlation(rewards, labels)} for name, rewards in given.items()}
    prompts = np.array([each.prompt for each in scored])
    return {
        name: {"agreement": _correlation(_relative(rewards, prompts), _relative(labels, prompts))}
        for name, rewards in given.items()
    }


def _measure(rewards: Values, labels: Values) -> dict[str, float | None]:
    differences = rewards - labels
    by_chance = float(rewards.var() + labels.var() + differences.mean() ** 2)
    return {
        "agreement": _correlation(rewards, labels),
        "kappa": 1 - float(np.mean(differences**2)) / by_chance if by_chance else None,
        "error": float(np.abs(differences).mean()),
        "bias": float(differences.mean()),
    }


def _relative(values: Values, prompts: npt.NDArray[np.int64]) -> Values:
    return values - np.array([values[prompts == prompt].mean() for prompt in prompts])


def _correlation(one: Values, other: Values) -> float | None:
    ranks = _ranks(one), _ranks(other)
    if not all(each.std() for each in ranks):
        return None
    return round(float(np.corrcoef(*ranks)[0, 1]), _DIGITS)


def _ranks(values: Values) -> Values:
    """Return the rank of each value; equal ones share the mean of theirs."""
    _, places, counts = np.unique(values.round(_DIGITS), return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[places], np.float64)


def measure_order(pairs: Sequence[tuple[Verdict, Verdict]]) -> dict[str, float]:
    """Return, for verdicts on pairs and on the same pairs in the other order: how often the first of the two wins (0.5 of a judge that
    order doesn't move; a tie is half a win), and how often the order changes the verdict. {} without pairs."""
    if not pairs:
        return {}
    wins = [(one.scores[0], other.scores[0]) for one, other in pairs]
    return {"first_wins": float(np.mean(wins)), "turned": float(np.mean([one != 1 - other for one, other in wins]))}


def fit_monotone(judged: Sequence[Judged]) -> tuple[list[float], list[float]]:
    """Return the monotone function of the reward that fits the labels best: its corners, between which it is linear. It is the isotonic
    regression (pool adjacent violators), with each level in the middle of its rewards, so that it has no steps (Oron & Flournoy 2017,
    "Centered isotonic regression"). A single corner means that labels don't rise with rewards."""
    by_reward = collections.defaultdict[float, list[float]](list)
    for each in judged:
        if each.reward is not None:
            by_reward[round(each.reward, _DIGITS)].append(each.label)
    levels: list[Values] = []  # of each: the number of completions, the sums of their rewards and of their labels
    for reward in sorted(by_reward):
        labels = by_reward[reward]
        levels.append(np.array([len(labels), reward * len(labels), sum(labels)]))
        while len(levels) > 1 and levels[-2][2] / levels[-2][0] >= levels[-1][2] / levels[-1][0]:
            levels[-2:] = [levels[-2] + levels[-1]]
    return [float(rewards / count) for count, rewards, _ in levels], [
        float(labels / count) for count, _, labels in levels
    ]
