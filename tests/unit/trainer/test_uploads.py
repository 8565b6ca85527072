"""Checkpoints reach the store whole or not at all, whatever fails on the way, and a machine without the run continues it from there."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from headrace.base.errors import (
    CodecError,
    ConfigError,
    MissingPackage,
    Restartable,
    ServiceError,
    Unavailable,
    is_outage,
)
from headrace.base.files import link_or_copy
from headrace.run import object_store, stored_run
from headrace.run.checkpoints import DAMAGE, LOCK, STATE, FolderLock, find_change
from headrace.run.folder import SAVED
from headrace.run.journal import JOURNAL, read_journal
from headrace.run.lineage import FOLDER, LineageFiles
from headrace.run.object_store import RunStore, StoreStatus, StoreUnreachable, list_problems, write_status
from headrace_services.trainer.control import uploads
from headrace_services.trainer.control.uploads import Uploads
from tests.support.s3_server import CUT, DONE, S3Server, moto_server, s3_server
from tests.support.stored_runs import RUN, Machine
from tests.support.waiting import wait_until

URL = "s3://bucket/runs"
Make = Callable[..., Machine]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr(uploads, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(uploads, "END_S", 20.0)
    monkeypatch.setattr(object_store, "_PATIENCE", {"max_retries": 1})
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Make]:
    """Makes machines by name; their trainers are gone after the test."""
    made: list[Machine] = []

    def make(name: str, store: str = URL, **checkpointing: object) -> Machine:
        made.append(Machine(tmp_path / name, store, **checkpointing))
        return made[-1]

    yield make
    for each in made:
        each.uploads.close()


@pytest.fixture
def first(s3: S3Server, machine: Make) -> Machine:
    """One that has begun the run, with an empty store."""
    first = machine("first")
    first.start("t1")
    return first


@pytest.fixture(params=["s3", "file", pytest.param("moto", marks=pytest.mark.nightly)])
def url(request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a store of each kind; moto's has another reading of the protocol than `s3`."""
    with moto_server(tmp_path, monkeypatch) if request.param == "moto" else contextlib.nullcontext():
        yield f"file://{tmp_path}/mount" if request.param == "file" else URL


def test_an_empty_machine_continues_from_the_store(url: str, machine: Make) -> None:
    first = machine("first", url)
    assert first.start("t1") == 0
    first.publish(10, b"two parts" * 2**20)
    first.send(20, accuracy=0.5)
    first.checkpoints.add_metrics(20, "t1", {"val:late": 0.75})
    first.uploads.wake()
    first.finish()
    first.uploads.close()
    assert first.stored() == [10, 20]

    second = machine("second", url)
    assert second.start("t2") == 20
    assert second.weights(20) == first.weights(20)
    assert second.store.find_lost(second.uploads._stored[10]) is None
    assert find_change(second.checkpoints.path(20)) is None
    assert second.checkpoints.state(20).metrics == {"val:accuracy": 0.5, "val:late": 0.75}
    assert [(line.kind, line.step) for line in read_journal(second.folder / JOURNAL)] == [
        ("train", 9),
        ("train", 19),
        ("rewind", 20),
    ]
    assert [step for step, _ in LineageFiles(second.config.checkpoint_folder / FOLDER).files()] == [9, 19]
    assert len([*(second.folder / "groups").iterdir()]) == 2
    assert (second.folder / SAVED).stat().st_mode & 0o777 == 0o600
    second.send(30)
    assert second.stored() == [10, 20, 30]
    second.uploads.close()
    # it goes on where it is, and the first, whose folder is older, does not
    assert machine("second", url).start("t3") == 30
    with pytest.raises(ServiceError, match="went on elsewhere"):
        machine("first", url).claim("t3")


def test_what_was_sent_is_not_sent_again(s3: S3Server, machine: Make, first: Machine) -> None:
    s3.spoil = lambda method, name: 500 if method == "PUT" and "manifests" in name else None
    first.publish(10)
    wait_until(lambda: list_problems(first.config.checkpoint_folder))
    first.uploads.close()
    assert s3.names("manifests") == []
    sent = s3.sent("step_10-t1/checkpoint")
    assert len([name for name in sent if "weights" in name]) == 1

    s3.spoil = lambda method, name: None
    again = machine("first")  # as after a kill in the midst of the upload
    assert again.start("t2") == 10
    again.finish()
    assert again.stored() == [10]
    assert s3.sent("step_10-t1/checkpoint") == sent


def test_a_checkpoint_without_its_manifest_does_not_exist(s3: S3Server, machine: Make, first: Machine) -> None:
    first.send(10)
    s3.spoil = lambda method, name: (
        CUT if method in ("PUT", "POST") and "step_20-t1/checkpoint/policy" in name else None
    )
    first.publish(20, b"w" * 20_000_000)
    wait_until(lambda: list_problems(first.config.checkpoint_folder))
    first.uploads.close()
    s3.spoil = lambda method, name: None
    assert first.stored() == [10]
    assert s3.names("step_20-t1") != []
    second = machine("second")
    assert second.start("t2") == 10
    second.send(20)
    # what was sent of the other is removed
    folders = {name.split("/")[2] for name in s3.names()}
    assert {folder for folder in folders if folder.startswith("step_")} == {"step_10-t1", "step_20-t2"}


def test_later_metrics_are_no_file_of_a_checkpoint(first: Machine) -> None:
    """Nor is what is left of some that a killed trainer was writing."""
    first.publish(10)
    for name in ("metrics-t1.json", ".metrics-t1.json"):
        (first.checkpoints.path(10) / name).write_text("{}")
    with stored_run.collect(first.config, 10) as (manifest, _):
        assert [name for name in manifest.files if "metrics-t1" in name] == []


def test_retention_in_the_midst_of_an_upload_is_no_failure(first: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(source: str, target: str) -> None:
        shutil.rmtree(first.checkpoints.path(10), ignore_errors=True)
        link_or_copy(source, target)

    monkeypatch.setattr(stored_run, "link_or_copy", removed)
    first.send(10)
    assert first.uploads.take_metrics()["store_failures"] == 0
    first.send(20)
    assert first.stored() == [20]


@pytest.mark.parametrize("fault", ["missing", "changed", "cut off", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(s3: S3Server, machine: Make, first: Machine, fault: str) -> None:
    first.publish(10)
    first.send(20)
    first.uploads.close()
    (weights,) = s3.names("step_20-t1/checkpoint/policy/weights")
    (manifest,) = s3.names("manifests/step_20")
    if fault == "missing":
        del s3.objects[weights]
    elif fault == "changed":
        s3.objects[weights].data = bytes(reversed(s3.objects[weights].data))
    elif fault == "cut off":
        s3.objects[weights].data = s3.objects[weights].data[:-1]
    else:
        s3.objects[manifest].data = b"{"
    said: list[str] = []
    second = machine("second")
    assert stored_run.fetch_newest(second.config, second.store, said.append) == 10
    assert any("20" in line and "damaged" in line and "step_20-t1" in line for line in said)
    assert second.checkpoints.find_published() == [10]
    assert [*second.config.checkpoint_folder.glob(f"*/{DAMAGE}")] == []

    s3.objects[s3.names("step_10-t1/checkpoint/state.json")[0]].data = b""
    with pytest.raises(ServiceError, match="every checkpoint"):
        stored_run.fetch_newest(machine("third").config, second.store, said.append)


def test_a_store_that_fails_ends_no_run_and_is_told(s3: S3Server, first: Machine) -> None:
    s3.spoil = lambda method, name: 503 if method == "PUT" else None
    first.publish(10)
    folder = first.config.checkpoint_folder
    wait_until(lambda: first.uploads.take_metrics()["store_failures"])
    first.uploads.poll()
    (line,) = list_problems(folder)
    assert "checkpoint 10" in line
    assert "503" in line
    s3.spoil = lambda method, name: None
    first.finish()
    assert first.stored() == [10]
    assert list_problems(folder) == []
    assert first.uploads.take_metrics()["timing/train/checkpoint_upload"] > 0


def test_a_file_that_has_no_name_in_a_store_is_told(first: Machine) -> None:
    odd = first.folder / "inputs" / "a\tb"
    odd.parent.mkdir()
    odd.touch()
    first.publish(10)
    wait_until(lambda: any("rename" in line for line in list_problems(first.config.checkpoint_folder)))
    odd.unlink()
    first.finish()
    assert first.stored() == [10]


def test_what_the_store_says_is_in_conflict_is_sent_again(s3: S3Server, first: Machine) -> None:
    conflicts = iter([409])
    s3.spoil = lambda method, name: next(conflicts, None) if method == "PUT" and "manifests" in name else None
    first.send(10)
    assert first.stored() == [10]
    assert first.uploads.take_metrics()["store_failures"] == 1


def test_a_thread_that_can_not_be_started_is_told(first: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "ThreadPoolExecutor", Mock(side_effect=RuntimeError("can't start new thread")))
        first.publish(10)
        wait_until(lambda: any("thread" in line for line in list_problems(first.config.checkpoint_folder)))
    first.finish()
    assert first.stored() == [10]


def test_a_chain_that_a_rule_of_the_bucket_has_removed_is_told(s3: S3Server, machine: Make, first: Machine) -> None:
    first.send(10)
    del s3.objects[s3.names("starts")[0]]
    first.publish(20)
    wait_until(lambda: any("starts/" in line for line in list_problems(first.config.checkpoint_folder)))
    first.uploads.poll()
    first.uploads.close()
    # another machine does not begin anew
    with pytest.raises(CodecError, match="starts/"):
        machine("second").claim()


def test_a_store_that_is_taken_out_of_the_configuration_is_no_problem(s3: S3Server, machine: Make) -> None:
    config = machine("first").config
    config.checkpoint_folder.mkdir(parents=True)
    write_status(config.checkpoint_folder, StoreStatus(URL, 10, "checkpoint 20 is not there"))
    assert list_problems(config.checkpoint_folder) != []
    without = config.checkpointing.model_copy(update={"store": None})
    assert Uploads.of(config.model_copy(update={"checkpointing": without})) is None
    assert list_problems(config.checkpoint_folder) == []


def test_a_store_that_hangs_holds_up_no_end(s3: S3Server, machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "CLOSE_S", 0.05)
    answers, answered = threading.Event(), threading.Event()

    def hang(method: str, name: str) -> None:
        if method == "PUT" and "owners" in name:
            answers.wait(20)
            answered.set()

    first = machine("first")
    first.start("t1")
    s3.spoil = hang
    first.uploads.close()
    assert not answered.is_set()
    answers.set()


def test_the_end_of_a_run_waits_for_the_store_but_not_for_ever(
    s3: S3Server, machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "END_S", 0.1)
    first = machine("first")
    first.start("t1")
    s3.spoil = lambda method, name: 500 if method == "PUT" else None
    first.publish(10)
    with pytest.raises(ServiceError, match="checkpoint 10"):
        first.finish()


def test_the_store_keeps_what_retention_keeps(s3: S3Server, machine: Make) -> None:
    first = machine("first", keep_top_k=1, metric_name="val:accuracy")
    first.start("t1")
    first.send(10, accuracy=0.9)
    first.send(20, accuracy=0.1)
    first.send(30, accuracy=0.2)
    assert first.stored() == [10, 30]
    assert s3.names("step_20") == []
    first.uploads.close()
    # a machine that fetched the newest alone keeps the best in the store
    second = machine("second", keep_top_k=1, metric_name="val:accuracy")
    assert second.start("t2") == 30
    second.send(40, accuracy=0.3)
    assert second.stored() == [10, 40]


def test_what_was_removed_is_sent_again_once_it_is_the_best(
    s3: S3Server, machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose validation ends late: it stays in the folder."""
    first = machine("first", keep_top_k=1)
    monkeypatch.setattr(first.checkpoints, "_retain", Mock())
    first.start("t1")
    for version, accuracy in ((10, 0.1), (20, 0.5), (30, 0.4)):
        first.send(version, accuracy=accuracy)
    assert first.stored() == [20, 30]
    first.checkpoints.add_metrics(10, "t1", {"val:accuracy": 0.9})
    for _ in range(2):
        first.uploads.wake()
        first.finish()
        assert first.stored() == [10, 30]


def test_a_folder_keeps_nothing_of_what_was_removed(machine: Make, tmp_path: Path) -> None:
    first = machine("first", f"file://{tmp_path}/mount", keep_top_k=1, metric_name=None)
    first.start("t1")
    for version in (10, 20):
        first.send(version)
    there = {path.name for path in (tmp_path / "mount" / RUN).iterdir()}
    assert there == {"manifests", "owners", "starts", "step_20-t1"}


def test_retention_takes_nothing_from_an_upload(s3: S3Server, machine: Make) -> None:
    reached, goes_on = threading.Event(), threading.Event()

    def wait(method: str, name: str) -> None:
        if method == "PUT" and "step_10-t1/checkpoint" in name:
            reached.set()
            assert goes_on.wait(20)

    first = machine("first", keep_top_k=1, metric_name=None)
    first.start("t1")
    s3.spoil = wait
    first.publish(10)
    assert reached.wait(20)
    first.publish(20)
    assert first.checkpoints.find_published() == [20]
    goes_on.set()
    first.finish()
    assert first.stored() == [20]
    assert "PUT runs/adder/manifests/step_10-t1.json" in s3.requests
    assert [*first.config.checkpoint_folder.glob(".uploading-*")] == []


@pytest.mark.parametrize(("method", "status"), [("PUT", CUT), ("PUT", 403), ("PUT", 404), ("GET", 503)])
def test_law_6_a_claim_tells_that_it_is_the_store_that_is_away(
    s3: S3Server, machine: Make, first: Machine, method: str, status: int
) -> None:
    first.send(10)
    first.uploads.close()
    again = machine("first")
    s3.spoil = lambda asked, name: status if asked == method else None
    with pytest.raises(ServiceError) as away:
        again.claim()
    assert is_outage(away.value)
    s3.spoil = lambda asked, name: None
    assert again.start("t2") == 10


def test_a_second_trainer_is_refused_while_the_first_lives(
    s3: S3Server, machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "BEAT_S", 0.02)
    first = machine("first")
    first.start("t1")
    first.send(10)
    second = machine("second")
    with pytest.raises(ServiceError, match=r"process \d+ on ") as refused:
        second.claim()
    assert not is_outage(refused.value)
    assert not second.folder.exists()
    assert second.claim(buffer="t1")  # the buffer, which both have, refuses the first from now on
    first.uploads.close()
    assert second.store.read_owner("t1").ended
    assert machine("third").claim()


def test_a_silent_trainer_is_followed_and_then_refused(
    s3: S3Server, machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "BEAT_S", 1000.0)  # as one that is frozen
    first = machine("first")
    first.start("t1")
    first.send(10)
    second = machine("second")
    assert not second.claim(stopped=True)
    assert second.start("t2") == 10
    first.publish(20)  # it wakes up
    wait_until(lambda: first.uploads._ended_by)
    with pytest.raises(ServiceError, match="another trainer has taken over"):
        first.uploads.poll()
    assert second.stored() == [10]
    assert machine("third").claim("t2")
    # nor may it start again from what it made
    with pytest.raises(ServiceError, match="went on elsewhere"):
        machine("first").claim("t2")


def test_a_trainer_has_given_a_sign_of_life_when_its_start_is_seen(s3: S3Server, machine: Make) -> None:
    signs: list[bool] = []

    def look(method: str, name: str) -> None:
        if method == "PUT" and "starts" in name:
            signs.append(s3.names("owners/t1") != [])

    s3.spoil = look
    machine("first").start("t1")
    assert signs == [True]


@pytest.mark.parametrize("name", ["trials", "starts"])
def test_what_a_lost_answer_was_about_is_this_trainers_own(s3: S3Server, machine: Make, name: str) -> None:
    lost = iter([DONE])
    s3.spoil = lambda method, of: next(lost, None) if method == "PUT" and name in of else None
    first = machine("first")
    first.start("t1")
    assert next(lost, None) is None
    assert len(first.store.starts()) == 1


def test_a_start_while_another_looks_takes_nothing_from_the_chain(machine: Make, first: Machine) -> None:
    first.send(10)
    starts = first.store.starts()
    second = machine("second")
    second.start("t2", "t1")
    second.send(20)
    assert [*first.store.manifests(starts)] == [10]


def test_of_two_trainers_that_start_at_once_one_is_refused(s3: S3Server, machine: Make) -> None:
    first, second = machine("first"), machine("second")
    assert first.claim()
    assert second.claim()
    first.resume("t1", 0)
    with pytest.raises(ServiceError, match="another trainer"):
        second.resume("t2", 0)


def test_a_run_that_had_no_store_is_sent_with_its_chain(s3: S3Server, machine: Make, tmp_path: Path) -> None:
    before = machine("first", f"file://{tmp_path}/none")
    before.start("t1")
    before.publish(10)
    before.uploads.close()
    first = machine("first")
    assert first.start("t2") == 10
    first.finish()
    assert first.stored() == [10]
    assert [start.timeline for start in first.store.starts()] == ["t1", "t2"]


def test_what_a_rewind_left_is_not_continued_from(machine: Make, first: Machine) -> None:
    for version in (10, 20):
        first.send(version)
    first.uploads.close()
    first.checkpoints.path(20).rename(first.folder / "aside")
    again = machine("first")
    assert again.start("t2") == 10
    assert again.stored() == [10]
    again.uploads.close()
    second = machine("second")
    assert second.start("t3") == 10
    second.send(20, b"other")
    assert second.stored() == [10, 20]


@pytest.mark.parametrize("changed", [b"WEIGHTS of 10", b"weights"])
def test_a_file_that_changed_here_is_not_published(s3: S3Server, first: Machine, changed: bytes) -> None:
    s3.spoil = lambda method, name: 500 if method == "PUT" else None
    first.publish(10)
    (first.checkpoints.path(10) / "policy" / "weights").write_bytes(changed)
    s3.spoil = lambda method, name: None
    wait_until(lambda: any("changed" in line for line in list_problems(first.config.checkpoint_folder)))
    assert first.stored() == []
    assert s3.names("policy/weights") == []


def test_a_run_is_fetched_for_looking_at_it(s3: S3Server, machine: Make, tmp_path: Path) -> None:
    first = machine("first", checkpoint_dir=str(tmp_path / "first"))
    first.start("t1")
    first.send(10)
    first.send(20)
    store, folder = RunStore(f"{URL}/{RUN}"), tmp_path / "laptop" / RUN
    with pytest.raises(ConfigError, match="10, 20"):
        stored_run.fetch(store, 15, folder, print)
    assert stored_run.fetch(store, 10, folder, print) == 10
    assert (folder / "checkpoints" / "step_10" / "policy" / "weights").read_bytes() == first.weights(10)
    assert "checkpoint_dir" not in (folder / SAVED).read_text()
    with pytest.raises(ConfigError, match="exists"):
        stored_run.fetch(store, 10, folder, print)


def test_a_fetch_that_was_cut_takes_only_what_is_missing_or_different(
    s3: S3Server, first: Machine, tmp_path: Path
) -> None:
    first.send(10)
    fetching = tmp_path / "laptop" / "checkpoints" / ".fetching"
    s3.spoil = lambda method, name: 503 if method == "GET" and "policy/weights" in name else None
    with pytest.raises(Restartable):
        stored_run.fetch(first.store, None, tmp_path / "laptop", print)
    here = {
        str(path.relative_to(fetching)): path
        for part in ("checkpoint", "lineage", "run")
        for path in (fetching / part).rglob("*")
        if path.is_file() and path.stat().st_size
    }
    here.pop("checkpoint/ledger.json").write_text("{}")
    (fetching / "checkpoint" / "of_another").touch()
    s3.spoil, before = lambda method, name: None, len(s3.requests)
    with contextlib.ExitStack() as stack:
        other = FolderLock(fetching)
        stack.callback(other.release)
        assert other.try_take() is None
        with pytest.raises(ServiceError, match="in use"):
            stored_run.fetch(first.store, None, tmp_path / "laptop", print)
    assert stored_run.fetch(first.store, None, tmp_path / "laptop", print) == 10
    asked = [request.partition("step_10-t1/")[2] for request in s3.requests[before:] if "GET runs" in request]
    assert "checkpoint/policy/weights" in asked
    assert here
    assert here.keys() & set(asked) == set()
    fetched = tmp_path / "laptop" / "checkpoints" / "step_10"
    assert (find_change(fetched), (fetched / "of_another").exists(), fetching.exists()) == (None, False, False)

    # nor does one that was cut as it ended
    fetching.mkdir()
    s3.requests.clear()
    assert stored_run.fetch(first.store, None, tmp_path / "laptop", print) == 10
    assert (find_change(fetched), [name for name in s3.requests if "policy" in name]) == (None, [])


def test_a_fetched_checkpoint_damaged_before_its_start_comes_again(machine: Make, first: Machine) -> None:
    first.send(10)
    first.uploads.close()
    second = machine("second")
    assert second.claim()
    (second.checkpoints.path(10) / STATE).write_bytes(b"{")
    assert second.start("t2") == 10
    assert find_change(second.checkpoints.path(10)) is None


def test_a_full_disk_says_that_a_fetch_goes_on(first: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first.send(10)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(object_store.os, "fsync", full)
        with pytest.raises(ServiceError, match=r"No space left.*goes on"):
            stored_run.fetch(first.store, None, tmp_path / "laptop", print)
    assert stored_run.fetch(first.store, None, tmp_path / "laptop", print) == 10


def test_a_checkpoint_removed_while_it_is_fetched_is_not_damaged(s3: S3Server, first: Machine, tmp_path: Path) -> None:
    first.send(10)

    def replaced(method: str, name: str) -> None:
        if method == "GET" and "policy/weights" in name:
            for each in s3.names("step_10-t1"):
                del s3.objects[each]

    s3.spoil = replaced
    with pytest.raises(Restartable, match="newer"):
        stored_run.fetch(first.store, 10, tmp_path / "laptop", print)


def test_a_stop_ends_a_fetch_and_the_next_start_goes_on(s3: S3Server, machine: Make, first: Machine) -> None:
    first.send(10)
    first.uploads.close()
    second, sent = machine("second"), len(s3.requests)
    assert not second.uploads.claim("another", lambda: any("weights" in name for name in s3.requests[sent:]))
    assert second.checkpoints.find_published() == []
    assert second.start("t2") == 10


def test_a_manifest_that_leads_out_of_the_folder_is_refused(s3: S3Server, first: Machine, tmp_path: Path) -> None:
    first.send(10)
    (name,) = s3.names("manifests")
    data = s3.objects[name].data
    for odd in ("run/../../../../../odd", f"{tmp_path}/odd"):
        s3.objects[name].data = data.replace(b"run/metrics.jsonl", odd.encode())
        with pytest.raises(ServiceError, match="leads out"):
            stored_run.fetch(first.store, None, tmp_path / "a" / "b", print)
        assert [*tmp_path.rglob("odd")] == []
        assert [path.name for path in (tmp_path / "a").rglob("*") if path.is_file()] == [LOCK]


@pytest.mark.parametrize(
    ("status", "kind", "word"),
    [(403, Unavailable, "credentials"), (404, Unavailable, "bucket"), (503, StoreUnreachable, "503")],
)
def test_a_store_that_refuses_is_found_before_the_start(
    s3: S3Server, machine: Make, status: int, kind: type[ServiceError], word: str
) -> None:
    s3.spoil = lambda method, name: status
    with pytest.raises(ServiceError, match=word) as refused:
        machine("first").claim()
    assert refused.type is kind
    assert "test-secret" not in str(refused.value)


def test_a_store_without_conditional_puts_is_refused(
    s3: S3Server, machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(S3Server, "makes_twice", True)
    with pytest.raises(ServiceError, match="If-None-Match"):
        machine("first").claim()
    assert s3.names() == []


@pytest.mark.parametrize("url", ["runs/adder", "http://x/y", "s3:/x", "s3://bucket/x?y=z", "s3://bucket/team#1"])
def test_an_address_that_is_none_is_refused(machine: Make, url: str) -> None:
    with pytest.raises(ConfigError, match="s3://BUCKET"):
        RunStore(url)
    with pytest.raises(ValidationError):
        machine("first", url)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(MissingPackage, match=r"headrace\[store\]"):
        RunStore(f"{URL}/{RUN}")


def test_of_two_trainers_begun_in_one_folder_the_earlier_one_ends(s3: S3Server, machine: Make) -> None:
    first, second = machine("first"), machine("first")
    assert (first.claim(), second.claim()) == (True, True)
    first.checkpoints.start("t1", 0)
    second.checkpoints.start("t2", 0)
    first.uploads.begin("t1")
    second.uploads.begin("t2")
    assert [start.timeline for start in second.store.starts()] == ["t1", "t2"]
    first.uploads.wake()
    with pytest.raises(ServiceError, match="another trainer"):
        first.uploads._require_newest()
    second.uploads._require_newest()


# What a trainer is about to ask of the store when it freezes: the method, what is in the object's name, and how many like it come before.
MOMENTS = {
    "a part of a file": ("PUT", "step_30-t1/checkpoint/policy/weights", 1),
    "the end of a file": ("POST", "step_30-t1/checkpoint/policy/weights", 1),
    "a manifest": ("PUT", "manifests/step_30-t1", 0),
    "later metrics": ("PUT", "manifests/step_10-t1", 0),
    "the removal of a manifest": ("POST", "", 0),
    "the removal of files": ("POST", "", 1),
}


# By day a manifest, its removal and later metrics, with a successor elsewhere. In its own folder one need not fetch what is there, which
# is tried with a manifest.
BY_DAY = {(each, "elsewhere") for each in MOMENTS if "of a file" not in each} | {("a manifest", "first")}


@pytest.mark.parametrize(
    ("moment", "where"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly] * (case not in BY_DAY))
        for case in itertools.product(MOMENTS, ("first", "elsewhere"))
    ],
)
def test_law_4_what_a_frozen_trainer_asks_for_late_harms_nothing(
    s3: S3Server, machine: Make, monkeypatch: pytest.MonkeyPatch, moment: str, where: str
) -> None:
    """Its request reaches the store when its successor has sent a checkpoint, and has removed and kept others."""
    monkeypatch.setattr(uploads, "BEAT_S", 1000.0)
    monkeypatch.setattr(object_store, "_PART", 1 << 16)
    first = machine("first", keep_top_k=2)
    first.start("t1")
    for version, accuracy in ((10, 0.5), (20, 0.4)):
        first.send(version, accuracy=accuracy)

    reached, goes_on, turns = threading.Event(), threading.Event(), itertools.count()
    method, part, before = MOMENTS[moment]

    def freeze(of: str, name: str) -> None:
        if of == method and (part in name if part else not name) and next(turns) == before:
            reached.set()
            assert goes_on.wait(20)

    s3.spoil = freeze
    if moment == "later metrics":
        first.checkpoints.add_metrics(10, "t1", {"val:late": 1.0})
        first.uploads.wake()
    else:
        first.publish(30, b"w" * 200_000, accuracy=0.45)
    assert reached.wait(20)

    # it keeps another one: what its predecessor is removing, or adds to, it has kept or removed
    second = machine(where, keep_top_k=None if "removal" in moment else 1, metric_name=None)
    began = second.start("t2")
    second.send(began + 10)
    goes_on.set()
    wait_until(lambda: first.uploads._ended_by or first.uploads._idle.is_set())
    second.send(began + 20)
    stored = second.stored()
    assert stored == sorted(second.uploads._stored)
    assert stored[-1:] == [began + 20]
    if "removal" not in moment:
        assert stored == [began + 20]
    folders = {name.split("/")[2] for name in s3.names("runs/adder/step_")}
    for version, name in second.store.manifests(second.store.starts()).items():
        manifest = second.store.read_manifest(name)
        sizes = second.store.list_objects(manifest.folder)
        assert {name: sizes.get(f"{manifest.folder}/{name}") for name in manifest.files} == {
            name: file.size for name, file in manifest.files.items()
        }, version
        folders.discard(manifest.folder)
    assert folders == set()
    second.uploads.close()
    third = machine("third")
    assert third.start("t3") == began + 20
    assert third.weights(began + 20) == second.weights(began + 20)
