"""When a policy is said to have collapsed: on recorded runs of the demo (a learning rate of 2e-2 and of 3e-3; an environment that gives 0
from some moment on; and as it is), and at the edges of the rules."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace.run.collapse import WINDOW, Collapse, CollapseDetector
from headrace.run.journal import Line, read_journal

RECORDED = Path(__file__).parent / "recorded"


def lines(rewards: Sequence[float], builds: Sequence[str] = (), **others: Sequence[float]) -> Iterator[Line]:
    for step, reward in enumerate(rewards):
        metrics = {"reward": reward, "reward_std": 0.4, **{name: values[step] for name, values in others.items()}}
        yield Line("train", step, "t", 0.0, metrics, builds={"math": [builds[step]]} if builds else {})


def find(rewards: Sequence[float], builds: Sequence[str] = (), **others: Sequence[float]) -> Collapse | None:
    return CollapseDetector(lines(rewards, builds, **others)).found


@pytest.mark.parametrize(
    ("run", "step", "cause"),
    [
        ("learning_rate_too_high", 3, "off-policy"),
        ("learning_rate_high", 5, "gradient"),
        ("reward_that_breaks", 20, "the reward has changed"),
    ],
)
def test_a_recorded_collapse_is_found_with_its_step_and_cause(run: str, step: int, cause: str) -> None:
    found = CollapseDetector(read_journal(RECORDED / f"{run}.jsonl")).found
    assert found is not None
    assert found.step == step
    assert cause in found.cause


def test_a_recorded_run_that_learns_has_not_collapsed_at_any_step() -> None:
    detector = CollapseDetector()
    assert not any(detector.add(line) for line in read_journal(RECORDED / "healthy.jsonl"))


def test_a_fall_is_a_collapse_until_the_reward_is_back() -> None:
    detector = CollapseDetector(lines([0.2] * 5 + [0.8] * 10 + [0.1] * 10))
    assert detector.found is not None
    assert detector.found.step == 15
    assert any(said.startswith("reward 0.8 → ") for said in detector.found.evidence)
    for line in lines([0.7] * WINDOW):
        detector.add(line)
    assert detector.found is None


def test_half_of_what_was_gained_may_be_lost() -> None:
    assert find([0.0] * 5 + [0.8] * 5 + [0.45] * 20) is None
    assert find([0.0] * 5 + [0.8] * 5 + [0.35] * 20) is not None


def test_noise_of_small_batches_is_no_collapse() -> None:
    draw = random.Random(3)
    for _ in range(20):
        rewards = [sum(draw.random() < 0.3 for _ in range(8)) / 8 for _ in range(1000)]
        detector = CollapseDetector()
        assert not any(detector.add(line) for line in lines(rewards))


@pytest.mark.parametrize(
    ("best", "after", "collapsed"),
    [(0.9, 0.6, False), (0.9, 0.4, True), (0.3, 0.2, False), (0.3, 0.0, True), (30.0, 29.7, False), (-2.0, -2.5, True)],
)
def test_a_run_that_has_gained_nothing_can_fall(best: float, after: float, collapsed: bool) -> None:
    """By half of its best mean, or by the standard deviation of its rewards."""
    assert (find([best] * 10 + [after] * WINDOW) is not None) is collapsed


def test_a_new_build_of_the_environment_comes_first_among_causes() -> None:
    found = find([0.9] * 20 + [0.0] * 10, ["a"] * 20 + ["b"] * 10, off_policy_tokens=[0.0] * 20 + [0.9] * 10)
    assert found is not None
    assert "build b" in found.cause
    assert str(found).startswith("an environment was edited at step 20")
    assert "collapsed" not in str(found)


@pytest.mark.parametrize(
    ("others", "cause"),
    [
        ({"grad_norm": [1.0] * 20 + [50.0] * 10}, "gradient"),
        ({"entropy": [1.0] * 30, "mean_gen_tokens_per_sample": [9.0] * 30}, "writes as before"),
        ({"entropy": [1.0] * 20 + [0.3] * 10, "truncation_rate": [0.0] * 20 + [0.9] * 10}, "cut off"),
        ({"entropy": [1.0] * 20 + [0.01] * 10}, "randomness"),
        ({"entropy": [1.0] * 20 + [0.3] * 10}, "No single metric"),
    ],
)
def test_the_cause_follows_from_the_metrics(others: dict[str, list[float]], cause: str) -> None:
    found = find([0.9] * 20 + [0.0] * 10, **others)
    assert found is not None
    assert cause in found.cause


def test_repetition_that_pays_is_a_collapse() -> None:
    rising = [number / 40 for number in range(40)]
    assert find(rising, repetition=[0.1] * 10 + [0.9] * 30) is not None
    assert find(rising, repetition=[0.7] * 10 + [0.9] * 30) is None, "so it was from the beginning"


def test_short_and_odd_histories_are_none() -> None:
    assert find([]) is None
    assert find([1.0] + [0.0] * 3) is None
    assert find([float("nan")] * 30) is None
    assert CollapseDetector([Line("validation", 3, "t", 0.0, {"accuracy": 0.1})] * 30).found is None


def test_recorded_runs_hold_what_the_rules_watch() -> None:
    for path in RECORDED.glob("*.jsonl"):
        first = json.loads(path.read_text().splitlines()[0])
        assert {"reward", "entropy", "grad_norm"} <= first["metrics"].keys(), path


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [
        ([0, 2, 4, 6], "headrace rewind adder 2`"),
        ([4, 6], "(4, 6) are all later"),
        ([3], "checkpointing.keep_top_k"),
        ([], "no checkpoint"),
    ],
)
def test_the_way_back_is_the_newest_checkpoint_before_it(checkpoints: list[int], said: str) -> None:
    collapse = Collapse(3, "the reward fell", "", "", {}, {})
    assert said in collapse.describe_way_back("adder", checkpoints)
