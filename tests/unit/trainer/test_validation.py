"""What the held-out prompts say: failures are counts, and a threshold ends the run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.config import Config
from headrace.records.score import Score
from headrace.records.trajectory import Span
from headrace.replay import Evaluated
from headrace.run.journal import Line
from headrace.run.metric_names import unknown
from headrace_services.trainer.control.decisions import Action
from headrace_services.trainer.control.validation import Validations, summarize
from tests.unit.trainer.loop_cases import group, trajectory


def evaluated(name: str, rewards: Sequence[float], version: int, task: str = "sums", **changes: object) -> Evaluated:
    written = trajectory(group_id=name, spans=(Span(version, 0, 1), Span(version + 1, 1, 2)), **changes)
    return Evaluated(group(name, len(rewards), task), tuple((written, Score("SCORED", reward)) for reward in rewards))


def test_law_7_failed_validation_groups_are_counts_never_zeros() -> None:
    cut_off = {"finish_reason": "length", "loss_mask": np.array([1, 0], np.uint8)}
    groups = [evaluated("a", [1.0], 5), evaluated("b", [0.0], 3, "words", **cut_off)]
    metrics = summarize(groups, failed=2, pending=3)
    assert metrics["accuracy"] == 0.5
    assert (metrics["evaluated"], metrics["failed"], metrics["pending"]) == (2, 2, 3)
    assert (metrics["version_min"], metrics["version_max"]) == (3, 6)
    assert (metrics["mean_length"], metrics["truncation_rate"]) == (1.5, 0.5)
    assert (metrics["accuracy/sums"], metrics["accuracy/words"]) == (1.0, 0.0)
    assert summarize([], failed=2, pending=0) == {"evaluated": 0, "failed": 2, "pending": 0}
    assert "pass_k" not in metrics


def test_pass_k_is_the_share_of_prompts_that_any_completion_solves() -> None:
    rewards = [(0.0, 1.0), (0.0, 0.0), (-1.0, 0.5), (-1.0, -1.0)]
    metrics = summarize([evaluated("a", of_prompt, 3) for of_prompt in rewards], failed=0, pending=0)
    assert (metrics["pass_k"], metrics["accuracy"]) == (0.5, -1.5 / 8)


@pytest.mark.parametrize(
    ("rewards", "partial"),
    [([0.0, 1.0, 1.0], 0.0), ([0.5, 1.0], 0.5), ([-1.0, 1.0], 0.5), ([0.7 + 0.2 + 0.1, 0.0], 0.0)],
    ids=["right", "half", "scaled", "rounding"],
)
def test_accuracy_is_a_mean_reward_where_rewards_are_not_0_or_1(rewards: list[float], partial: float) -> None:
    metrics = summarize([evaluated(str(i), [reward], 3) for i, reward in enumerate(rewards)], failed=0, pending=0)
    assert metrics["partial_credit"] == partial
    assert metrics["reward_std"] == pytest.approx(statistics.pstdev(rewards))
    assert unknown(metrics) == []


def test_components_and_times_are_of_held_out_prompts_too() -> None:
    base = evaluated("a", [0.0], 4)
    score = Score("SCORED", 1.5, {"format": 0.5}, timings={"waiting": 2.0, "environment": 0.25})
    one = Evaluated(base.group, ((base.trajectories[0][0], score),))
    metrics = summarize([one], failed=0, pending=0)
    assert (metrics["reward/format"], metrics["reward_std/format"]) == (0.5, 0.0)
    assert (metrics["scoring_wait/e"], metrics["scoring_time/e"]) == (2.0, 0.25)


@pytest.mark.parametrize(
    ("metric", "threshold", "ends"),
    [
        ("accuracy", 0.5, True),
        ("val:accuracy", 0.5, True),
        ("accuracy", 0.5 + 1e-16 * 2, True),  # but for rounding
        ("accuracy", 0.51, False),
        ("accuracy/sums", 0.1, False),
        (None, None, False),
    ],
)
def test_a_validation_ends_a_run_at_its_threshold_only(metric: str | None, threshold: float | None, ends: bool) -> None:
    stop = {"stop_at_validation_metric": metric, "stop_at_validation_threshold": threshold}
    lines = [Line("validation", 0, "t", 0.0, {"accuracy": 0.5})]
    nothing: Any = None
    validations = Validations(Config.model_validate({"grpo": stop}), nothing, "t", nothing, nothing, lines)
    assert validations.target_reached is ends


async def test_the_time_to_read_and_report_results_is_the_validations() -> None:
    time, spent = [0.0], []

    async def takes(seconds: float, *_: object) -> None:
        time[0] += seconds

    class Running(SimpleNamespace):
        complete = False

        async def poll(self) -> bool:
            await takes(2.0)
            return self.complete

    context = SimpleNamespace(
        clock=lambda: time[0],
        telemetry=SimpleNamespace(report_validation=partial(takes, 3.0)),
        prompts=SimpleNamespace(left_out=[]),
    )
    recorder = SimpleNamespace(
        publish=partial(takes, 1.0), spend=lambda action, seconds, counts: spent.append((action, seconds))
    )
    stand_ins: list[Any] = [context, recorder, SimpleNamespace(add_metrics=lambda *_: None)]
    validations = Validations(Config(), stand_ins[0], "t", stand_ins[1], stand_ins[2], [])
    await validations.poll([])
    assert spent == []
    running: Any = Running(
        version=0, validators=frozenset(), metrics=lambda: summarize([], 0, 0), failed=[], evaluated=[]
    )
    validations.running = running
    await validations.poll([])
    running.complete = True
    await validations.poll([])
    assert spent == [(Action.AWAIT_VALIDATION, 2.0), (Action.AWAIT_VALIDATION, 6.0)]
    assert validations.running is None


async def test_skipped_validations_are_said_in_the_order_of_versions() -> None:
    published: list[tuple[int, dict[str, float]]] = []

    async def publish(kind: str, version: int, metrics: dict[str, float]) -> None:
        published.append((version, metrics))

    async def nothing(*_: object) -> None:
        return

    context = SimpleNamespace(
        clock=lambda: 0.0,
        telemetry=SimpleNamespace(report_validation=nothing),
        prompts=SimpleNamespace(left_out=[], validation=lambda version: [group("a", 1), group("b", 1)]),
    )
    stand_ins: list[Any] = [context, SimpleNamespace(publish=publish), SimpleNamespace(add_metrics=lambda *_: None)]
    validations = Validations(Config(), stand_ins[0], "t", stand_ins[1], stand_ins[2], [])
    running: Any = SimpleNamespace(version=2, metrics=lambda: summarize([], 2, 0), failed=[], evaluated=[])
    validations.running = running
    for version in (4, 6):
        await validations.skip(version)
        assert validations.has_begun(version)
    assert published == []
    running.abandon = nothing
    await validations.abandon("why not")
    none = {"evaluated": 0, "failed": 0, "pending": 2}
    assert [(version, metrics["failed"]) for version, metrics in published] == [(2, 2), (4, 0), (6, 0)]
    assert published[1:] == [(4, none), (6, none)]
