"""What the folder of a run says of it."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.base.errors import CodecError
from headrace.config import Config
from headrace.run import history
from headrace.run.checkpoints import LOCK
from headrace.run.history import RECORD, RUN_LOCK, Best, find_best, parse_metric, recorded
from headrace.run.journal import JOURNAL, Journal, Line


class Stopped(Exception):
    pass


@pytest.fixture
def config(tmp_path: Path) -> Config:
    found = Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}})
    found.run_folder.mkdir()
    return found


def clock(*times: float) -> Callable[[], float]:
    return iter(times).__next__


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, "finished", ""),
        (Stopped(), "stopped", ""),
        (KeyboardInterrupt(), "stopped", ""),
        (ValueError("no data"), "failed", "no data"),
        (MemoryError(), "failed", "MemoryError()"),
    ],
)
def test_a_run_says_how_it_ended(config: Config, error: BaseException | None, state: str, reason: str) -> None:
    def run() -> None:
        with recorded(config.run_folder, Stopped, clock(100.0, 160.0)):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    past = history.read(config)
    assert (past.state, past.reason, past.started, past.since) == (state, reason, 100.0, 160.0)


def test_a_run_that_goes_on_was_started_once(config: Config) -> None:
    for times in ((100.0, 110.0), (200.0, 210.0)):
        with recorded(config.run_folder, Stopped, clock(*times)):
            pass
    past = history.read(config)
    assert (past.started, past.since) == (100.0, 210.0)


@pytest.mark.parametrize("lock", [RUN_LOCK, f"checkpoints/{LOCK}"])
@pytest.mark.parametrize("noted", [True, False])
def test_a_run_runs_while_its_lock_is_held_and_was_killed_otherwise(config: Config, lock: str, noted: bool) -> None:
    if noted:
        with recorded(config.run_folder, Stopped):
            running = (config.run_folder / RECORD).read_bytes()
        (config.run_folder / RECORD).write_bytes(running)
    path = config.run_folder / lock
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert history.read(config).state == "running"
    assert history.read(config).state == ("killed" if noted else "unknown")


def test_a_damaged_record_is_named_and_the_next_start_writes_it_anew(config: Config) -> None:
    (config.run_folder / RECORD).write_text("{")
    with pytest.raises(CodecError, match=r"run\.json can't be read"):
        history.read(config)
    with recorded(config.run_folder, Stopped):
        pass
    assert history.read(config).state == "finished"


def test_steps_and_best_are_of_the_surviving_history(config: Config) -> None:
    journal = Journal(config.run_folder / JOURNAL)
    for step in range(4):
        journal.append("train", step, "a", {"reward": step / 4, "timing/train/total_step_time": 2.0})
    assert history.read(config).best() == Best("train:reward", 3, 0.75)
    journal.append("validation", 4, "a", {"accuracy": 0.9})
    journal.append("rewind", 2, "b", {})
    journal.append("validation", 2, "b", {"accuracy": 0.5})
    past = history.read(config)
    assert past.best() == Best("val:accuracy", 2, 0.5)
    assert (past.last_step, past.seconds) == (1, 4.0)


def test_of_equal_values_the_newest_is_best_and_no_number_never() -> None:
    lines = [
        Line("train", step, "a", 0.0, {"loss": value}) for step, value in enumerate((0.5, 0.25, 0.25, float("nan")))
    ]
    assert find_best(lines, "loss", higher_is_better=False) == Best("loss", 2, 0.25)
    assert find_best(lines, "loss", higher_is_better=True) == Best("loss", 0, 0.5)
    assert find_best(lines, "val:loss", higher_is_better=True) is None


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("val:accuracy", ("validation", "accuracy")),
        ("train:reward", ("train", "reward")),
        ("accuracy", ("validation", "accuracy")),
        ("both", ("train", "both")),
        ("accuracy/val:x", ("train", "accuracy/val:x")),
    ],
)
def test_a_metric_is_of_training_or_of_validation(name: str, metric: tuple[str, str]) -> None:
    lines = [Line("validation", 0, "a", 0.0, {"accuracy": 1.0, "both": 1.0}), Line("train", 0, "a", 0.0, {"both": 1.0})]
    assert parse_metric(name, lines) == metric
