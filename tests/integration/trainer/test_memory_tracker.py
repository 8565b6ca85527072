"""The plan of memory against torch's own tracker, which runs the policy's step with fake tensors on ranks that don't exist."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from headrace_services.trainer.memory.fit import ERROR

pytestmark = pytest.mark.slow

COMPARE = """
import json, sys
from benchmarks.memory import Case, planned, tracked
case = Case(**json.loads(sys.argv[1]))
print(json.dumps([planned(case), tracked(case)]))
"""


def compared(**case: Any) -> tuple[dict[str, int], dict[str, int]]:
    """The plan's and the tracker's bytes by phase; in a process of its own, whose process group is a fake."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE, json.dumps(case)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = json.loads(done.stdout.splitlines()[-1])
    return ours, theirs


SMALL = {"model": "Qwen/Qwen2.5-1.5B", "ranks": 4, "tokens": 4096, "layers": 3}


def check(case: dict[str, Any], within: float = ERROR) -> None:
    ours, theirs = compared(**case)
    assert max(ours.values()) == pytest.approx(max(theirs.values()), rel=within), (ours, theirs)
    for phase, found in theirs.items():
        assert ours[phase] > 0.8 * found, (phase, ours, theirs)


def test_the_plan_of_a_small_model_is_what_the_tracker_counts() -> None:
    check(SMALL)


BIG = [
    {"model": model, "ranks": ranks, "recompute": recompute, "dim": dim}
    for model, ranks in (
        ("Qwen/Qwen2.5-1.5B", 1),
        ("meta-llama/Llama-3.1-8B", 4),
        ("Qwen/Qwen2.5-32B", 16),
        ("Qwen/Qwen3-30B-A3B", 16),
    )
    for recompute in (True, False)
    for dim in (0, 16)
]


@pytest.mark.nightly  # minutes each
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", BIG, ids=str)
def test_the_plan_of_a_known_model_is_what_the_tracker_counts(case: dict[str, Any]) -> None:
    check(case)


@pytest.mark.nightly
def test_the_plan_of_a_filter_has_room_for_its_sort() -> None:
    check({**SMALL, "top_p": 0.9}, within=0.2)  # on a CPU there is no such workspace
