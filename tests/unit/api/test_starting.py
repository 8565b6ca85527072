"""Several starts at a time: each is of its own run, or is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.api import starting
from headrace.base.errors import ServiceError
from headrace.base.files import write_json
from headrace.run.history import RECORD, RUN_LOCK, RunRecord

ROWS = [[{"input": "1+1", "output": "2"}], [{"input": "2+2", "output": "4"}]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path}/runs}}\ndata: {{train: {{dataset_name: arithmetic, env_name: math}}}}\nenv: {{math: {{type: math}}}}\n"
    )
    return path


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Patches a function so that two threads are in it at the same time."""

    def patch(name: str, instead: Any) -> None:
        barrier = threading.Barrier(2, timeout=60)

        def function(*arguments: Any) -> Any:
            barrier.wait()
            return instead(*arguments)

        monkeypatch.setattr(name, function)

    return patch


def start_two(start: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


def test_two_starts_in_one_second_are_two_runs(
    file: Path, together: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.launch.runs.new_id", lambda name, now: "adder")
    together("headrace.api.starting.is_locked", lambda path: False)
    monkeypatch.setattr(starting, "_start", lambda folder, file, given: (folder / RECORD).write_text(str(given)))
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # of what the patched start has not made
    found = start_two(lambda number: starting.start(file, {"grpo.seed": number}, None, ROWS[number]))
    assert sorted(folder.name for folder, _ in found) == ["adder", "adder-2"]
    for number, (folder, _) in enumerate(found):
        assert f"grpo.seed={number}" in (folder / RECORD).read_text()
        assert ROWS[number][0]["input"] in (folder / "inputs" / "train.jsonl").read_text()


def test_of_two_starts_of_one_run_one_is_refused(
    file: Path, together: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    together("headrace.api.starting.is_locked", lambda path: False)
    refused = threading.Event()
    monkeypatch.setattr(starting, "_start", lambda folder, file, given: refused.wait(10))

    def start(number: int) -> str:
        try:
            starting.start(file, {"run.id": "adder", "grpo.seed": number})
        except ServiceError as error:
            refused.set()
            return str(error)
        return ""

    started, error = sorted(start_two(start))
    assert (started, "adder is being started" in error) == ("", True)


def test_the_run_of_a_faster_start_is_not_taken_for_this_ones(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "adder"

    class Refused:
        pid, returncode = 1, 1

        def __init__(self, _: Any, *, stdout: Any, **__: Any) -> None:
            now = time.time() + 1
            write_json(folder / RECORD, RunRecord(now, "running", now))
            (folder / RUN_LOCK).write_text("7\n")
            stdout.write(b"error: run adder is already up (process 7); stop it first\n")
            stdout.flush()

        def poll(self) -> int:
            return 1

    monkeypatch.setattr("headrace.api.starting.subprocess.Popen", Refused)
    with pytest.raises(ServiceError, match="already up"):
        starting.start(file, {"run.id": "adder"})
