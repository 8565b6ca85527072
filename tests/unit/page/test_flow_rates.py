"""How many groups flow through a run: counted over the steps of a window, by state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from headrace.page.flow_rates import per_second
from headrace.page.run_files import RunFiles
from headrace.page.server import build_app
from headrace.run import group_files
from headrace.run.findings import Window
from headrace.run.journal import JOURNAL
from tests.support.page_runs import Event, recorded_run, write_events


def a_minute(run: Path, window: Window) -> dict[str, float]:
    """Those that are not 0."""
    return {state: rate * 60 for state, rate in per_second(RunFiles(run), window).items() if rate}


def test_each_arrow_has_the_groups_of_the_windows_steps(tmp_path: Path) -> None:
    """Steps of ten seconds train two groups each. With the last step a group was filtered and one failed; a validation followed it."""
    run = recorded_run(tmp_path)
    last = {"queued": 4, "open": 4, "scoring": 3, "ready": 2, "reserved": 2, "filtered": 1, "failed": 1, "trained": 2}
    assert a_minute(run, "last") == pytest.approx({state: groups * 6 for state, groups in last.items()})
    whole = {state: groups + 10 for state, groups in last.items() if state not in ("filtered", "failed")}
    whole |= {"filtered": 1, "failed": 1}
    assert a_minute(run, "all") == pytest.approx({state: groups for state, groups in whole.items()})
    answer = TestClient(build_app(tmp_path)).get("/api/runs/adder", params={"window": "last"}).json()
    assert answer["flow"]["per_s"]["filtered"] == pytest.approx(0.1)


def test_groups_of_validations_are_not_those_of_training(tmp_path: Path) -> None:
    """Only the first file says of which lane the group is, and only the last how it ended."""
    told = {52: "leased", 54: "scoring", 55: "evaluated"}
    leased, scoring, evaluated = [(at, "held-out", what, {}) for at, what in told.items()]

    def rates(name: str, first: list[Event], last: list[Event]) -> dict[str, float]:
        run = recorded_run(tmp_path, name, groups=False)
        write_events(run, (-1, "held-out", "enqueued", {"lane": "validation"}), (51, "0-1", "leased", {}))
        write_events(run, *first, (53, "0-2", "leased", {}))
        write_events(run, *last, (61, "0-3", "leased", {}))
        return a_minute(run, "last")

    without = rates("without", [], [])
    assert rates("with", [leased], [scoring, evaluated]) == pytest.approx({**without, "evaluated": 6})


def test_the_time_between_two_starts_is_no_part_of_a_rate(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    lines = [json.loads(line) for line in (run / JOURNAL).read_text().splitlines()]
    for line in lines:
        if line["kind"] == "train" and line["step"] >= 3:
            line["time"] += 86_400.0
        if line["kind"] == "train" and line["step"] == 3:
            line["metrics"]["efficiency/init/total_s"] = 100.0
    (run / JOURNAL).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    # of five steps, in 50 seconds, the first three have their groups; and two hours after them nothing is counted
    write_events(run, (7_200, "night", "leased", {}), (86_445, "0-99", "leased", {}), (86_461, "late", "leased", {}))
    found = a_minute(run, "all")
    assert found["open"] == pytest.approx(7 / 50 * 60)
    assert found["trained"] == pytest.approx(10 / 50 * 60)


def test_events_that_are_not_written_yet_lower_no_rate(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, groups=False)
    write_events(run, (5, "a", "leased", {}), (15, "b", "leased", {}), (30, "a", "ready", {}))
    found = a_minute(run, "all")
    assert found["open"] == pytest.approx(2 / 30 * 60, rel=1e-3)
    assert found["trained"] == pytest.approx(12)
    assert a_minute(run, "last") == pytest.approx({"trained": 12}), "of its time no event is known"


def test_events_that_stand_in_two_files_count_once(tmp_path: Path) -> None:
    """A trainer that was killed after it wrote a file writes its events again."""
    run = recorded_run(tmp_path, groups=False)
    told = [(5.0, "a", "leased", {}), (15.0, "b", "leased", {}), (58.0, "a", "ready", {})]
    write_events(run, *told)
    write_events(run, *told, (59.0, "b", "ready", {}))
    assert len(group_files.list_files(run / group_files.FOLDER)) == 2
    found = a_minute(run, "all")
    assert (found["open"], found["ready"]) == pytest.approx((2 / 59 * 60, 2 / 59 * 60), rel=1e-3)


def test_without_a_history_only_what_was_trained_is_known(tmp_path: Path) -> None:
    assert a_minute(recorded_run(tmp_path, groups=False), "10") == pytest.approx({"trained": 12})


def test_a_damaged_file_leaves_no_rate_that_is_too_low(tmp_path: Path) -> None:
    (file,) = group_files.list_files(recorded_run(tmp_path) / group_files.FOLDER)
    file.path.write_bytes(b"damaged")
    answer = TestClient(build_app(tmp_path)).get("/api/runs/adder").json()
    assert answer["flow"]["per_s"] == {}
    assert len([problem for problem in answer["problems"] if file.name in problem]) == 1
