"""The plan of memory against torch's own tracker, which runs the policy's step with fake tensors on ranks that don't exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_services.trainer.memory.fit import ERROR
from tests.support.forks import fork

pytestmark = pytest.mark.slow


def compare(case: dict[str, Any], found: Path) -> None:
    from benchmarks.memory import Case, planned, tracked

    found.write_text(json.dumps([planned(Case(**case)), tracked(Case(**case))]))


def compared(folder: Path, case: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """The plan's and the tracker's bytes by phase; in a process of its own, whose process group is a fake."""
    found, log = folder / "found.json", folder / "log"
    assert fork(compare, case, found, log=log).wait() == 0, log.read_text()[-2000:]
    ours, theirs = json.loads(found.read_text())
    return ours, theirs


SMALL = {"model": "Qwen/Qwen2.5-1.5B", "ranks": 4, "tokens": 4096, "layers": 3}


def check(folder: Path, case: dict[str, Any], within: float = ERROR) -> None:
    ours, theirs = compared(folder, case)
    assert max(ours.values()) == pytest.approx(max(theirs.values()), rel=within), (ours, theirs)
    for phase, found in theirs.items():
        assert ours[phase] > 0.8 * found, (phase, ours, theirs)


def test_the_plan_of_a_small_model_is_what_the_tracker_counts(tmp_path: Path) -> None:
    check(tmp_path, SMALL)


# Whether a layer is recomputed, and the rank of an adapter: all four pairs of the smallest model, and each value once of the others.
EACH = ((True, 0), (False, 16))
ALL = (*EACH, (True, 16), (False, 0))
BIG = [
    {"model": model, "ranks": ranks, "recompute": recompute, "dim": dim}
    for model, ranks, pairs in (
        ("Qwen/Qwen2.5-1.5B", 1, ALL),
        ("meta-llama/Llama-3.1-8B", 4, EACH),
        ("Qwen/Qwen2.5-32B", 16, EACH),
        ("Qwen/Qwen3-30B-A3B", 16, EACH),
    )
    for recompute, dim in pairs
]


@pytest.mark.nightly  # minutes each
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", BIG, ids=str)
def test_the_plan_of_a_known_model_is_what_the_tracker_counts(tmp_path: Path, case: dict[str, Any]) -> None:
    check(tmp_path, case)


@pytest.mark.nightly
def test_the_plan_of_a_filter_has_room_for_its_sort(tmp_path: Path) -> None:
    check(tmp_path, {**SMALL, "top_p": 0.9}, within=0.2)  # on a CPU there is no such workspace
