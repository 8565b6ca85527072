"""What happened to a run is marked in its curves: also where a start changed the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from headrace.config.loading import examine
from headrace.page.server import build_app
from headrace.run import start
from tests.support.page_runs import recorded_run, started_with


def begin(run: Path, *given: str) -> tuple[start.ChangedKeys, ...]:
    """Record a start with these overrides, and return the changes of all so far."""
    file = run.parent / "run.yaml"
    file.write_text("run: {id: adder}\n")
    examined = examine(file, given)
    start.record(run, examined.config, examined.origin)
    found = start.read(run)
    assert found is not None
    return found.changes


def test_a_start_tells_which_keys_it_changed(tmp_path: Path) -> None:
    address = "replay.redis_url=redis://me:secret@10.0.0.1:6379/0"
    assert begin(tmp_path, "grpo.seed=1") == ()
    (first,) = begin(tmp_path, "grpo.seed=2", address)
    assert len(first.keys) == 2
    assert "grpo.seed: 1 -> 2" in first.keys
    assert begin(tmp_path, "grpo.seed=2", address) == (first,), "nothing changed"
    assert [changed.keys for changed in begin(tmp_path, "grpo.seed=3", address)][1:] == [("grpo.seed: 2 -> 3",)]
    assert "secret" not in (tmp_path / start.START).read_text()


def test_ports_and_the_way_to_a_file_are_no_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    begin(tmp_path, "policy.model_name=model", "trainer.port=4001")
    monkeypatch.chdir(tmp_path / "model")
    assert begin(tmp_path, "policy.model_name=../model", "trainer.port=4002") == ()


def test_a_record_of_an_older_build_has_nothing_to_compare(tmp_path: Path) -> None:
    started_with(tmp_path)
    assert begin(tmp_path, "grpo.seed=2") == ()


def marks(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = TestClient(build_app(run.parent)).get("/api/runs/adder/metrics").json()["marks"]
    return [mark for mark in found if mark["kind"] == "configuration"]


def test_a_change_is_marked_at_the_first_step_trained_with_it(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    many = [f"env.e{number}.timeout_s: 1 -> 2" for number in range(25)]
    # steps end each ten seconds; after the last of them nothing was trained
    started_with(run, (25, ["policy.optimizer.kwargs.lr: 0.1 -> 0.2"]), (41, many), (99, ["grpo.seed: 1 -> 2"]))
    found = marks(run)
    assert [mark["step"] for mark in found] == [2, 4]
    assert found[0]["text"] == "policy.optimizer.kwargs.lr: 0.1 -> 0.2"
    assert found[1]["text"].endswith("and 5 more")


def test_a_damaged_record_of_starts_leaves_the_curves(tmp_path: Path) -> None:
    (recorded_run(tmp_path) / start.START).write_text("{")
    answer = TestClient(build_app(tmp_path)).get("/api/runs/adder/metrics")
    assert answer.status_code == 200
    assert answer.json()["names"]
    assert start.START in answer.json()["problems"][0]
