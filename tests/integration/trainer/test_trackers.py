"""Trackers follow the journal: with their real libraries, on files; a fault is injected where one has to fail."""

from __future__ import annotations

import base64
import importlib.util
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ServiceError
from headrace.config import Config, load
from headrace.config.yaml_text import dump
from headrace.run.journal import Journal
from headrace.run.sample_files import SampleFiles
from headrace_services.trainer.telemetry import trackers
from headrace_services.trainer.telemetry.alarm import picture_path
from headrace_services.trainer.telemetry.trackers import (
    Opener,
    TrackerEntry,
    TrackerThread,
    list_enabled,
    parameters,
    tracker_metrics,
)
from tests.support.stored_samples import sample, write
from tests.support.waiting import wait_until

LONG_S = 100.0
# two red pixels
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAAD0lEQVR4nGP8z8DAwMAAAAYIAQHLR3Z1AAAAAElFTkSuQmCC"
)


def config_of(folder: Path, tracker: str, **settings: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"id": "adder", "dir": str(folder)},
            "env": {"sums": {"type": "math"}},
            "replay": {"redis_url": "redis://me:secret@host:6379/0"},
            "logger": {f"{tracker}_enabled": True, **settings},
        }
    )


def follow(config: Config, journal: Journal) -> None:
    """One life of a trainer: its tracker gets what there is, and is closed."""
    ((name, opener, server),) = list_enabled(config)
    shown = config.logger.num_val_samples_to_print
    thread = TrackerThread(name, opener, server, journal.path, SampleFiles(config.log_folder, 5), shown)
    live(thread)
    assert (thread.behind(), thread.failures) == (0, 0)


def live(thread: TrackerThread) -> None:
    thread.start()
    thread.finish(time.monotonic() + LONG_S)
    thread.join()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "adder" / "metrics.jsonl")


def train(journal: Journal, step: int, loss: float, timeline: str = "t") -> None:
    journal.append("train", step, timeline, {"loss": loss, "timing/train/total_step_time": 1.0})


def two_lives(config: Config, journal: Journal) -> None:
    """Three steps and a validation; then the trainer goes on from version 2 and makes step 2 anew."""
    for step in range(3):
        train(journal, step, step / 10)
    journal.append("validation", 2, "t", {"accuracy": 0.5})
    journal.append("validation", 3, "t", {"accuracy": 0.1})
    follow(config, journal)
    journal.append("rewind", 2, "u", {})
    train(journal, 2, 7.0, "u")
    train(journal, 3, 8.0, "u")
    follow(config, journal)


def test_tensorboard_shows_the_surviving_history_alone(tmp_path: Path, journal: Journal) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(tmp_path, "tensorboard")
    two_lives(config, journal)
    events = EventAccumulator(str(config.log_folder / "tensorboard"))
    events.Reload()
    loss = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert loss == [(0, 0.0), (1, pytest.approx(0.1)), (2, 7.0), (3, 8.0)]
    assert [(event.step, event.value) for event in events.Scalars("validation/accuracy")] == [(2, 0.5)]
    assert [event.step for event in events.Scalars("timing/train/total_step_time")] == [0, 1, 2, 3]
    assert "_hparams_/session_start_info" in events.Tags()["tensors"] or events.SummaryMetadata("_hparams_/experiment")


def records(path: Path) -> Iterator[bytes]:
    """The records of a file that W&B writes: LevelDB's log format (blocks of 32 KiB; crc, length and type before each chunk) behind
    seven bytes of its own."""
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if place + 7 + length > len(data):  # it is being written
            return
        if room < 7 or kind == 0:
            place += room
            continue
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield whole
            whole = b""


def history(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(run, row) of what W&B wrote offline."""
    from wandb.proto import wandb_internal_pb2 as pb

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run = ""
        for data in records(path):
            record = pb.Record()  # type: ignore[attr-defined]  # of the module that fits the installed protobuf
            record.ParseFromString(data)
            run = record.run.run_id or run
            if record.HasField("history"):
                items = record.history.item
                yield run, {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def losses_in(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["train/loss"]) for _, row in history(folder) if "train/loss" in row]


def test_weights_and_biases_gets_every_line_without_a_login(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb"))
    config = config_of(tmp_path, "wandb", num_val_samples_to_print=1)
    two_lives(config, journal)
    assert "not logged in" in caplog.text
    losses = [(0, 0.0), (1, 0.1), (2, 0.2), (2, 7.0), (3, 8.0)]
    # a process of W&B's own writes them, on a busy machine after the tracker is closed
    wait_until(lambda: losses_in(config.log_folder) == losses)
    rows = list(history(config.log_folder))
    assert len({run for run, _ in rows}) == 1
    assert [row["_step"] for _, row in rows] == list(range(len(rows)))


@pytest.mark.slow
@pytest.mark.nightly  # the import alone takes five seconds; by day the other two trackers get the same two lives
def test_mlflow_goes_on_with_its_run(tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    config = config_of(Path("."), "mlflow")  # run.dir is relative by default
    two_lives(config, journal)
    client = MlflowClient(f"sqlite:///{tmp_path / config.log_folder}/mlflow.db", registry_uri=tmp_path.as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "headrace"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("adder", "FINISHED")
    assert run.data.params["logger.mlflow_enabled"] == "true"
    assert run.data.params["policy.model_name"] == config.policy.model_name
    assert "replay.redis_url" not in run.data.params
    newest = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train/loss")}
    assert newest == {0: 0.0, 1: 0.1, 2: 7.0, 3: 8.0}
    assert run.data.metrics["validation/accuracy"] in (0.5, 0.1)


def test_validations_samples_and_alarms_pictures_go_with_their_lines(tmp_path: Path, journal: Journal) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(tmp_path, "tensorboard", num_val_samples_to_print=1)
    config.log_folder.mkdir(parents=True)
    picture_path(config.log_folder, 0).write_bytes(PNG)
    write(config.log_folder, "val", 1, [sample("g", content="four")])
    journal.append("train", 0, "t", {"train_inference_alarm": 1.0})
    train(journal, 1, 0.5)
    journal.append("validation", 1, "t", {"accuracy": 1.0})
    journal.append("validation", 2, "t", {"accuracy": 1.0})  # whose trajectories are gone
    follow(config, journal)
    events = EventAccumulator(str(config.log_folder / "tensorboard"))
    events.Reload()
    assert [(image.step, image.width, image.height) for image in events.Images("train/disagreement")] == [(0, 2, 1)]
    (text,) = events.Tensors("validation/samples/text_summary")
    assert text.step == 1
    assert b"**reward 1**" in text.tensor_proto.string_val[0]
    assert b"    four" in text.tensor_proto.string_val[0]


class Recorder:
    """A tracker that fails when it is told to."""

    run_id = "r"

    def __init__(self, written: list[TrackerEntry], fails: Callable[[], bool] = lambda: False) -> None:
        self._written, self._fails = written, fails

    def write(self, entries: Sequence[TrackerEntry], rewound_to: int | None) -> None:
        if self._fails():
            raise ConnectionError("no route to host")
        self._written += entries

    def close(self) -> None:
        return


def thread_of(journal: Journal, folder: Path, opener: Opener, server: str = "") -> TrackerThread:
    return TrackerThread("recorder", opener, server, journal.path, SampleFiles(folder, 0))


def test_law_a_tracker_that_fails_costs_the_run_nothing(
    tmp_path: Path, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[TrackerEntry] = []
    down, failed = threading.Event(), threading.Event()
    down.set()

    def fails() -> bool:
        if down.is_set():
            failed.set()
        return down.is_set()

    opened: list[str | None] = []

    def opener(run_id: str | None) -> Recorder:
        opened.append(run_id)
        return Recorder(written, fails)

    thread = thread_of(journal, tmp_path / "logs", opener)
    thread.start()
    for step in range(3):
        train(journal, step, 0.0)
        thread.notify()
    assert failed.wait(LONG_S)
    down.clear()
    thread.finish(time.monotonic() + LONG_S)
    thread.join()
    assert [entry.step for entry in written] == [0, 1, 2]
    assert tracker_metrics([thread]) == {"trackers/failures": float(thread.failures), "trackers/lines_behind": 0.0}
    assert thread.failures >= 1
    assert caplog.text.count("(ConnectionError: no route to host)") == 1
    assert caplog.text.count("recorder works again") == 1
    assert opened[0] is None
    assert set(opened[1:]) == {"r"}


def test_a_tracker_that_is_back_gets_its_lines_at_once(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "RETRY_S", 0.001)
    written: list[TrackerEntry] = []
    caught_up = threading.Event()
    failures = iter([True, True])

    def fails() -> bool:
        if next(failures, False):
            return True
        caught_up.set()
        return False

    train(journal, 0, 0.0)
    thread = thread_of(journal, tmp_path / "logs", lambda run_id: Recorder(written, fails))
    thread.start()
    assert caught_up.wait(LONG_S)
    thread.finish(time.monotonic() + LONG_S)
    thread.join()
    assert [entry.step for entry in written] == [0]
    assert thread.failures == 2


def test_a_tracker_that_stays_away_gets_its_lines_at_the_next_start(
    tmp_path: Path, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    train(journal, 0, 0.0)
    live(thread_of(journal, tmp_path / "logs", lambda run_id: Recorder([], lambda: True)))
    assert "recorder lacks 1 lines" in caplog.text
    written: list[TrackerEntry] = []
    live(thread_of(journal, tmp_path / "logs", lambda run_id: Recorder(written)))
    assert [entry.step for entry in written] == [0]


def test_a_tracker_gets_what_it_lacks_of_the_steps_before_a_rewind(tmp_path: Path, journal: Journal) -> None:
    written: list[TrackerEntry] = []
    train(journal, 0, 0.0)
    live(thread_of(journal, tmp_path / "logs", lambda run_id: Recorder(written)))
    train(journal, 1, 0.0)
    train(journal, 2, 0.0)
    journal.append("rewind", 2, "u", {})
    journal.append("validation", 0, "u", {"pending": 3.0})  # it ran beside training, and is lost
    train(journal, 2, 1.0, "u")
    live(thread_of(journal, tmp_path / "logs", lambda run_id: Recorder(written)))
    assert [entry.step for entry in written] == [0, 1, 0, 2]
    assert [entry.metrics.get("train/loss") for entry in written] == [0.0, 0.0, None, 1.0]


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_the_error_of_a_tracker_names_its_proxy(
    tmp_path: Path, journal: Journal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://me:canary@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracker.invalid")
    ((_, _, server),) = list_enabled(config_of(tmp_path, tracker))
    train(journal, 0, 0.0)
    live(thread_of(journal, tmp_path / "logs", lambda run_id: Recorder([], lambda: True), server))
    assert "http://***@127.0.0.1:9 (https_proxy" in caplog.text
    assert "canary" not in caplog.text


def test_a_tracker_that_hangs_does_not_keep_a_finished_trainer(
    tmp_path: Path, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = threading.Event()
    train(journal, 0, 0.0)
    thread = thread_of(journal, tmp_path / "logs", lambda run_id: Recorder([], lambda: hangs.wait(LONG_S)))
    thread.start()
    thread.finish(time.monotonic())
    thread.join()
    assert "recorder lacks 1 lines" in caplog.text
    hangs.set()


def test_a_journal_that_lost_lines_goes_on_in_the_same_run(tmp_path: Path, journal: Journal) -> None:
    written: list[TrackerEntry] = []
    runs: list[str | None] = []

    def opener(run_id: str | None) -> Recorder:
        runs.append(run_id)
        return Recorder(written)

    def train_and_send() -> None:
        thread = thread_of(journal, tmp_path / "logs", opener)
        train(journal, len(journal.read()), 0.0)
        live(thread)

    train_and_send()
    train_and_send()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[: whole.index(b"\n") + 1])
    train_and_send()
    assert runs == [None, "r", "r"]
    assert [(entry.number, entry.step) for entry in written] == [(0, 0), (1, 1), (2, 1)]


def test_a_position_that_cannot_be_read_is_an_error(tmp_path: Path, journal: Journal) -> None:
    (tmp_path / "recorder.json").write_text("")
    with pytest.raises(ServiceError, match=r"recorder\.json.*remove"):
        thread_of(journal, tmp_path, lambda run_id: Recorder([]))


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for tracker in ("tensorboard", "wandb", "mlflow"):
        config = config_of(tmp_path, tracker)
        with pytest.raises(ServiceError, match=rf"pip install 'headrace\[{tracker}\]'"):
            list(list_enabled(config))


def test_a_tracker_gets_numbers_switches_and_telling_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HR_SECRET", "canary-value")
    saved = tmp_path / "run.yaml"
    text = dump(config_of(tmp_path, "mlflow", mlflow={"tracking_uri": "https://me:secret@mlflow.example"}))
    saved.write_text(text.replace("system_prompt: null", "system_prompt: use ${oc.env:HR_SECRET}"))
    config = load(saved, ["env.math={command: [program, --token, '${oc.env:HR_SECRET}', --key, secret]}"])
    assert config.env["math"].command == ["program", "--token", "canary-value", "--key", "secret"]
    sent = parameters(config)
    assert not [word for word in ("secret", "canary-value") if word in json.dumps(sent)]
    assert sent["policy"]["model_name"] == config.policy.model_name
    assert sent["data"]["default"]["system_prompt"] == "use ${oc.env:HR_SECRET}"
    assert sent["trainer"]["num_processes"] == 1
    assert sent["logger"]["mlflow_enabled"] is True
