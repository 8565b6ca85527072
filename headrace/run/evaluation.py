"""The results of an evaluation: for each data set pass@k, rewards, lengths, and why prompts failed."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.base.deferred import np

# The lowest reward with which a completion passes.
THRESHOLD = 1.0


def validation_id(version: int, data_set: str, index: int) -> str:
    """Return the id of the group that evaluates `version` on problem `index` of a data set."""
    return f"v{version}-{data_set}-{index}"


def data_set_of(group_id: str) -> str:
    """Return the data set of a group whose id `validation_id` made."""
    return group_id.partition("-")[2].rpartition("-")[0]


def reaches(value: float, least: float) -> bool:
    """Return whether `value` is `least` or more, but for rounding: a reward of 0.7 + 0.2 + 0.1 is less than 1."""
    return value >= least or math.isclose(value, least)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the probability that at least one of `k` completions of a prompt passes, estimated without bias from `n` completions of which
    `passed` did (Chen et al. 2021, https://arxiv.org/abs/2107.03374): 1 - C(n - passed, k) / C(n, k), for 1 <= k <= n."""
    if not (0 <= passed <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} completions of which {passed} passed")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


@dataclasses.dataclass(frozen=True)
class DataSetReport:
    """The results on one data set. All means are over the prompts that were `evaluated`; prompts that `failed` are left out of them.

    `failures` has the number of prompts by the reason of failure. `pass_at` is by k, up to the `samples` of a prompt. `reward_stderr` is
    the standard error of the mean `reward`, from the means of the prompts, because completions of one prompt are not independent; None for
    a single prompt. `length` is the number of tokens in a completion.
    """

    evaluated: int
    failed: int
    failures: Mapping[str, int]
    samples: int = 0
    pass_at: Mapping[int, float] = dataclasses.field(default_factory=dict)
    reward: float | None = None
    reward_stderr: float | None = None
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)
    length: float | None = None
    truncated: float | None = None


def report(
    records: Iterable[Mapping[str, Any]], failures: Iterable[Mapping[str, Any]], threshold: float = THRESHOLD
) -> dict[str, DataSetReport]:
    """Return the results by data set, from a validation's records: the lines of `val_data_step<N>.jsonl.gz` and of
    `val_failed_data_step<N>.jsonl.gz`.

    A completion passes if its reward is at least `threshold`.
    """
    prompts: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    reasons: dict[str, Counter[str]] = {}
    for record in records:
        kept = {name: record[name] for name in ("rewards", "components", "finish_reason")}
        prompts.setdefault(data_set_of(record["group"]), {}).setdefault(record["group"], []).append(
            {**kept, "length": len(record["token_ids"])}
        )
    for failure in failures:
        reasons.setdefault(data_set_of(failure["group"]), Counter())[failure["reason"]] += 1
    names = dict.fromkeys([*prompts, *reasons])
    return {
        name: _of_data_set([*prompts.get(name, {}).values()], reasons.get(name, Counter()), threshold) for name in names
    }


def _of_data_set(
    prompts: Sequence[Sequence[Mapping[str, Any]]], failures: Counter[str], threshold: float
) -> DataSetReport:
    failed = dict(failures.most_common())
    if not prompts:
        return DataSetReport(0, failures.total(), failed)
    samples = min(map(len, prompts))  # the same for all, as groups are complete
    passed = [(len(prompt), sum(reaches(one["rewards"], threshold) for one in prompt)) for prompt in prompts]
    means = np.array([np.mean([one["rewards"] for one in prompt]) for prompt in prompts])
    completions = [one for prompt in prompts for one in prompt]
    components: dict[str, list[float]] = {}
    for one in completions:
        for name, value in one["components"].items():
            components.setdefault(name, []).append(value)
    return DataSetReport(
        evaluated=len(prompts),
        failed=failures.total(),
        failures=failed,
        samples=samples,
        pass_at={k: float(np.mean([pass_at_k(n, c, k) for n, c in passed])) for k in range(1, samples + 1)},
        reward=float(means.mean()),
        reward_stderr=float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None,
        components={name: float(np.mean(values)) for name, values in sorted(components.items())},
        length=float(np.mean([one["length"] for one in completions])),
        truncated=float(np.mean([one["finish_reason"] == "length" for one in completions])),
    )
