"""`headrace.Run` of a run that is not up: what it reads from the folder, and how it shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.base.errors import ConfigError, HeadraceError, ServiceError
from headrace.launch import runs
from headrace.run import now
from headrace.run.history import RUN_LOCK
from headrace.run.now import EnvironmentNow, Now
from tests.support.page_runs import PROMPTS, SAMPLES, STEPS, recorded_run
from tests.support.past_run import past_run

HOSTILE = "<script>alert(1)</script>"
HEAVY = {"torch", "vllm", "transformers", "pandas", "pyarrow", "IPython", "headrace_services"}


@pytest.fixture
def run(tmp_path: Path) -> headrace.Run:
    return headrace.Run(recorded_run(tmp_path, text=HOSTILE))


def test_a_run_is_found_by_its_id_and_by_its_folder(run: headrace.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.folder.parent / "runs").symlink_to(run.folder.parent)
    monkeypatch.chdir(run.folder.parent)
    assert headrace.Run("adder").folder.samefile(run.folder)
    with pytest.raises(ConfigError, match="did you mean adder"):
        headrace.Run("addr")


def test_what_a_run_recorded_is_read_from_its_folder_alone(run: headrace.Run) -> None:
    assert (run.id, run.state, run.reason) == ("adder", "finished", "")
    best = run.best
    assert best is not None
    assert (best.metric, best.step) == ("val:accuracy", STEPS)
    assert [group.state for group in run.groups()].count("trained") == STEPS * PROMPTS
    assert [group.id for group in run.groups(states=["failed"])] == ["0-91"]
    assert len(run.samples()) == len(list(run.trajectories())) == PROMPTS * SAMPLES
    assert [sample.group for sample in run.samples(STEPS, validation=True)] == ["validation-0"]
    with pytest.raises(HeadraceError, match=f"{STEPS - 1}"):
        run.samples(1)


def test_metrics_are_those_of_the_surviving_steps(run: headrace.Run) -> None:
    metrics = run.metrics()
    assert metrics.index.name == "step"
    assert list(metrics.index) == list(range(STEPS))
    assert metrics["reward"].tolist() == [step / 10 for step in range(STEPS)]
    assert run.metrics("validation")["accuracy"].to_dict() == {STEPS: 0.5}


def test_groups_and_trajectories_become_tables(run: headrace.Run) -> None:
    groups = run.groups().to_arrow()
    assert groups.num_rows == len(list(run.groups()))
    first = groups.to_pylist()[0]
    assert first["rewards"] == [0.0, 1.0, 2.0]
    assert first["source"] == {"file": "data/sums.jsonl", "line": 1}
    trajectories = run.trajectories().to_pandas()
    assert trajectories["reward"].tolist() == [0.0, 1.0, 2.0] * PROMPTS
    assert json.loads(trajectories["extra_env_info"][0]) == {"answer": HOSTILE}
    assert headrace.Run(past_run(run.folder.parent, "bare", 1)).groups().to_arrow().num_rows == 0


def test_more_groups_than_are_asked_for_at_a_time_are_all_there(
    run: headrace.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = [group.id for group in run.groups()]
    monkeypatch.setattr("headrace.api.run._PAGE", 4)
    monkeypatch.setattr("headrace.api.rows._ROWS", 3)
    assert [group.id for group in run.groups()] == everything
    assert run.groups().to_arrow().column("id").to_pylist() == everything


def test_a_state_or_sort_that_there_is_not_is_refused_at_once(run: headrace.Run) -> None:
    with pytest.raises(ConfigError, match="'trainned': it is one of queued"):
        run.groups(states=["trainned"])
    with pytest.raises(ConfigError, match="'-rewards': it is one of order"):
        run.groups(sort="-rewards")


def test_a_picture_has_the_curves_and_nothing_that_a_run_wrote_acts(tmp_path: Path) -> None:
    run = headrace.Run(recorded_run(tmp_path, text=HOSTILE, state="failed", reason=HOSTILE))
    picture = run._repr_html_()
    assert picture.count("<polyline") == 1  # one validation makes no curve
    assert "&lt;script&gt;" in picture
    assert "<script" not in picture
    assert "failed" in repr(run)


def test_waiting_for_a_run_that_failed_raises_its_reason(tmp_path: Path) -> None:
    run = headrace.Run(recorded_run(tmp_path, state="failed", reason="the disk is full"))
    with pytest.raises(ServiceError, match="the disk is full"):
        run.wait()
    assert run.stop() is run


def test_waiting_for_a_run_tells_once_which_environment_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded_run(tmp_path, state="running")
    monkeypatch.setattr("headrace.api.run._POLL_S", 0.01)
    broken = EnvironmentNow("math", 3, 0, broken=True, message=f"KeyError: {HOSTILE}")
    now.write(folder, Now(1.0, 0, -1, False, {}, {}, [], [], [broken, EnvironmentNow("other", 0, 0, broken=False)], []))
    run = headrace.Run(folder)
    with runs.held(folder / RUN_LOCK, "", ""):
        assert "waits for environment math: KeyError" in repr(run)
        with pytest.raises(TimeoutError):
            run.wait(timeout=0.2)
    assert capsys.readouterr().out.count("waits for environment math: KeyError") == 1
    assert "waits" not in repr(run)
    (folder / now.NOW).write_text("{")
    assert "waits" not in repr(run)


def test_waiting_for_a_run_that_has_ended_returns_it(run: headrace.Run) -> None:
    assert run.wait(timeout=0) is run


def test_completion_knows_the_names_that_are_loaded_late() -> None:
    assert set(headrace.__all__) <= set(dir(headrace))


def test_nothing_heavy_is_loaded_to_read_a_run(run: headrace.Run) -> None:
    code = f"""
import sys, headrace
assert not any(name.startswith("headrace.api") for name in sys.modules)
run = headrace.Run({str(run.folder)!r})
assert run.state == "finished" and run.best and list(run.trajectories()) and run._repr_html_()
print(*(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
