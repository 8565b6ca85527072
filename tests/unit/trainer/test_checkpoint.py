import errno
import io
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headrace.base.errors import Restartable, ServiceError
from headrace.config.services import CheckpointingConfig
from headrace.run.checkpoints import SUMS, find_change, list_set_aside
from headrace_services.trainer.control.checkpoint import (
    ENDED,
    TRAINED,
    Checkpoints,
    CheckpointState,
    Ledger,
    select_superseded,
)


def state(version: int, **metrics: float) -> CheckpointState:
    named = {f"val:{name}": value for name, value in metrics.items()}
    return CheckpointState(version=version, timeline="t1", ancestors=("t0",), cursor=9, run_id="r", metrics=named)


Publish = Callable[..., Path]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "runs" / "checkpoints", CheckpointingConfig(keep_top_k=2))
    checkpoints.start("t1", 0)
    return checkpoints


@pytest.fixture
def publish(checkpoints: Checkpoints) -> Publish:
    def publish(version: int, write: Callable[[Path], None] | None = None, **metrics: float) -> Path:
        folder = checkpoints.begin(version, "t1")
        (folder / "policy").mkdir()
        (folder / "policy" / "weights").write_text(str(version))
        if write is not None:
            write(folder)
        return checkpoints.publish(
            state(version, **metrics), {version - 1: ["a", "b"]}, files={"ended": bytes([version])}
        )

    return publish


def test_what_was_published_is_read_back(checkpoints: Checkpoints, publish: Publish) -> None:
    assert checkpoints.newest() is None
    folder = publish(9)
    publish(10)
    assert checkpoints.find_published() == [9, 10]
    assert checkpoints.newest() == 10
    assert checkpoints.state(10) == state(10)
    assert checkpoints.ledger(10) == {9: ["a", "b"]}
    assert checkpoints.file(10, "ended") == bytes([10])
    with pytest.raises(ServiceError, match="step_10/trained can't be read"):
        checkpoints.file(10, "trained")
    assert folder == checkpoints.path(9)
    assert (folder / "policy" / "weights").read_text() == "9"


def test_half_written_checkpoints_are_never_listed_and_are_removed(checkpoints: Checkpoints, publish: Publish) -> None:
    publish(1)
    half = checkpoints.begin(2, "t1")
    (half / "state.json").write_text(state(2).model_dump_json())  # killed just before the rename
    (checkpoints.path(7)).mkdir()  # a copy by hand that was cut off
    assert checkpoints.find_published() == [1]
    again = checkpoints.begin(3, "t1")
    assert not half.exists()
    assert again == checkpoints.locate_unfinished(3, "t1")


def test_newest_stays_and_the_best_stay(checkpoints: Checkpoints, publish: Publish) -> None:
    for version, accuracy in ((1, 0.9), (2, 0.5), (3, 0.8), (4, 0.1)):
        publish(version, accuracy=accuracy)
    assert checkpoints.find_published() == [1, 3, 4]
    publish(5)
    assert checkpoints.find_published() == [1, 3, 5]


def test_a_version_is_published_once(checkpoints: Checkpoints, publish: Publish) -> None:
    publish(1)
    with pytest.raises(ServiceError, match="exists already"):
        checkpoints.begin(1, "t1")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"version": 1}',
        '{"version":1,"timeline":"t","cursor":"x","run_id":"r"}',
        '{"version":1,"timeline":"t","cursor":4,"run_id":"r","trained":[[0,4]]}',
    ],
)
def test_a_damaged_state_is_an_error_with_the_remedy(checkpoints: Checkpoints, publish: Publish, content: str) -> None:
    (publish(1) / "state.json").write_text(content)
    with pytest.raises(ServiceError, match=r"state\.json.*remove .*step_1 "):
        checkpoints.state(1)


def weights(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"a": np.arange(20, dtype=np.float32)}, path)


WHOLE = {"config.json": b"{}", "generation_config.json": b"{}"}


def real(folder: Path) -> None:
    """The files of a checkpoint that can be damaged."""
    for model in ("policy", "value"):
        weights(folder / model / "model.safetensors")
        for name, content in WHOLE.items():
            (folder / model / name).write_bytes(content)
    weights(folder / "training" / "rank_0_of_1.safetensors")
    (folder / "policy" / "vocab.txt").write_text("a b c d e f")
    (folder / TRAINED).write_bytes(Ledger(range(50)).encode())
    (folder / ENDED).write_bytes(bytes(20))


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut, emptied])
@pytest.mark.parametrize(
    "file",
    [
        "policy/model.safetensors",
        "policy/config.json",
        "value/model.safetensors",
        "training/rank_0_of_1.safetensors",
        "state.json",
        "ledger.json",
        TRAINED,
    ],
)
def test_a_damaged_newest_checkpoint_is_set_aside_with_words(
    checkpoints: Checkpoints,
    publish: Publish,
    caplog: pytest.LogCaptureFixture,
    file: str,
    harm: Callable[[Path], None],
) -> None:
    for version in (2, 4, 6):
        real(publish(version, accuracy=0.1 * version))
    assert checkpoints.newest() == 6
    damaged = checkpoints.path(6) / file
    harm(damaged)
    held = files_of(checkpoints.path(6))
    assert checkpoints.newest() == 4
    assert f"the checkpoint before it is used: {damaged}" in caplog.text
    assert files_of(checkpoints.path(6)) == held, "nobody but a trainer that starts touches it"
    checkpoints.start("t2", 4)
    assert checkpoints.find_published() == [4]
    (aside,) = checkpoints.path(4).parent.glob("*step_6*")
    assert aside.name == "damaged-step_6-t2"
    assert files_of(aside).items() > held.items()
    assert f"set aside as {aside}" in caplog.text
    (line,) = list_set_aside(aside.parent)
    assert line.startswith(f"checkpoint 6 is damaged ({damaged}")
    assert line.endswith(str(aside))


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 4
    path.write_bytes(data)


def with_other_shapes(path: Path) -> None:
    save_file({"a": np.zeros((4, 6), dtype=np.float32)}, path)


def all_in_one(folder: Path) -> str | None:
    """What two ranks of a host find together."""
    return find_change(folder, 0, 2) or find_change(folder, 1, 2)


@pytest.mark.parametrize("find", [find_change, all_in_one])
@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("policy/model.safetensors", flipped),
        ("policy/model.safetensors", with_other_shapes),
        ("policy/vocab.txt", flipped),
        ("policy/vocab.txt", Path.unlink),
        ("training/rank_0_of_1.safetensors", flipped),
        ("state.json", flipped),
        ("ledger.json", flipped),
        (TRAINED, flipped),
        (ENDED, flipped),
        (ENDED, cut),
        (SUMS, flipped),
        (SUMS, cut),
        (SUMS, emptied),
    ],
)
def test_a_change_of_any_file_of_the_newest_sets_it_aside(
    checkpoints: Checkpoints,
    publish: Publish,
    find: Callable[[Path], str | None],
    file: str,
    harm: Callable[[Path], None],
) -> None:
    for version in (2, 4):
        publish(version, write=real)
    assert checkpoints.newest(find) == 4
    harm(checkpoints.path(4) / file)
    assert checkpoints.newest(find) == 2
    checkpoints.start("t2", 2)
    assert [path.name for path in checkpoints.path(2).parent.glob("*step_4*")] == ["damaged-step_4-t2"]
    (line,) = list_set_aside(checkpoints.path(2).parent)
    assert str(checkpoints.path(4)) in line


def test_a_checkpoint_of_a_build_before_the_digests_is_used(checkpoints: Checkpoints, publish: Publish) -> None:
    publish(2, write=real)
    (checkpoints.path(2) / SUMS).unlink()
    flipped(checkpoints.path(2) / "policy" / "model.safetensors")
    assert checkpoints.newest(find_change) == 2


def test_metrics_that_are_added_later_change_no_digest(checkpoints: Checkpoints, publish: Publish) -> None:
    publish(2, write=real)
    checkpoints.add_metrics(2, "t1", {"val:accuracy": 0.5})
    assert checkpoints.newest(find_change) == 2


def test_sha256sum_checks_a_checkpoint(checkpoints: Checkpoints, publish: Publish) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("sha256sum is not installed: apt-get install coreutils")
    folder = publish(2, write=real)
    check = ["sha256sum", "--check", "--strict", "--quiet", SUMS]
    assert subprocess.run(check, cwd=folder, check=False).returncode == 0
    flipped(folder / "policy" / "vocab.txt")
    assert subprocess.run(check, cwd=folder, check=False).returncode == 1


@pytest.mark.parametrize("file", ["state.json", "metrics-t1.json"])
def test_retention_sets_an_unreadable_older_one_aside(checkpoints: Checkpoints, publish: Publish, file: str) -> None:
    publish(2)
    checkpoints.add_metrics(2, "t1", {"val:accuracy": 0.9})
    publish(4, accuracy=0.5)
    emptied(checkpoints.path(2) / file)
    publish(6, accuracy=0.1)
    publish(8, accuracy=0.2)
    assert checkpoints.find_published() == [4, 8]
    (line,) = list_set_aside(checkpoints.path(4).parent)
    assert file in line


def test_retention_ends_the_run_if_the_newest_cant_be_read(checkpoints: Checkpoints, publish: Publish) -> None:
    publish(2)
    emptied(checkpoints.path(2) / "state.json")
    with pytest.raises(ServiceError, match=r"step_2/state\.json"):
        checkpoints.add_metrics(2, "t1", {"val:accuracy": 0.5})
    assert checkpoints.find_published() == [2]


def test_a_missing_file_of_weights_is_damage(checkpoints: Checkpoints, publish: Publish) -> None:
    for version in (2, 4):
        real(publish(version))
    (checkpoints.path(4) / "policy" / "model.safetensors").unlink()
    assert checkpoints.newest() == 2


def test_no_usable_checkpoint_is_an_error_with_each_ones_reason(checkpoints: Checkpoints, publish: Publish) -> None:
    for version in (2, 4):
        real(publish(version))
    emptied(checkpoints.path(2) / "ledger.json")
    cut(checkpoints.path(4) / "policy" / "model.safetensors")
    with pytest.raises(ServiceError) as failure:
        checkpoints.newest()
    first, *rest = str(failure.value).splitlines()
    assert first.startswith("every checkpoint of the run is damaged")
    assert [line.split(" ")[2] for line in rest] == [
        f"{checkpoints.path(4)}/policy/model.safetensors",
        f"{checkpoints.path(2)}/ledger.json",
    ]
    assert checkpoints.find_published() == [2, 4]


def test_an_unwritable_place_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", CheckpointingConfig())
    with pytest.raises(ServiceError, match=r"write a checkpoint.*checkpointing\.checkpoint_dir"):
        checkpoints.start("t1", 0)


histories = st.dictionaries(st.integers(0, 50), st.one_of(st.none(), st.floats(0, 1)), max_size=12)


@given(history=histories, k=st.integers(1, 5), higher=st.booleans())
def test_retention_keeps_the_newest_and_the_best(history: dict[int, float | None], k: int, higher: bool) -> None:
    metrics = {version: {} if value is None else {"val:accuracy": value} for version, value in history.items()}
    gone = select_superseded(metrics, CheckpointingConfig(keep_top_k=k, higher_is_better=higher))
    kept = set(metrics) - set(gone)
    assert min(k, len(metrics)) <= len(kept) <= k + 1
    if not metrics:
        return
    assert max(metrics) in kept
    best = kept if len(kept) <= k else kept - {max(metrics)}
    for lost in gone:
        for held in best:
            a, b = history[held], history[lost]
            assert b is None or (a is not None and (a >= b if higher else a <= b))


def test_without_a_metric_the_newest_are_kept_and_without_a_limit_all() -> None:
    metrics = {version: {"val:accuracy": 1.0 / (version + 1)} for version in range(5)}
    assert select_superseded(metrics, CheckpointingConfig(keep_top_k=2, metric_name=None)) == [0, 1, 2]
    assert select_superseded(metrics, CheckpointingConfig(keep_top_k=None)) == []


# -- two trainers of one run: the first is frozen, and wakes up after the second has started


def write(folder: Path, version: int) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "weights").write_text(f"{version} in {folder.name}")


def of(timeline: str, version: int) -> CheckpointState:
    return CheckpointState(version=version, timeline=timeline, cursor=9, run_id="r")


def save(checkpoints: Checkpoints, timeline: str, *versions: int, **options: Any) -> None:
    for version in versions:
        write(checkpoints.begin(version, timeline), version)
        checkpoints.publish(of(timeline, version), {}, **options)


def test_a_trainer_that_wakes_after_its_successor_is_harmless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = (Checkpoints(tmp_path, CheckpointingConfig(keep_top_k=1)) for _ in range(2))
    old.start("old", 0)
    save(old, "old", 4)
    half = old.begin(6, "old")
    write(half, 6)
    # frozen here; its successor goes on
    new.start("new", 4)
    assert not half.exists(), "unfinished, of a timeline that has ended"
    being_written = new.begin(6, "new")
    write(being_written, 6)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    half.mkdir()  # it wakes up, and its library makes the folder again
    for late in (
        lambda: old.publish(of("old", 6), {}),
        lambda: old.begin(8, "old"),
        lambda: old.add_metrics(4, "old", {"val:accuracy": 1.0}),
    ):
        with pytest.raises(ServiceError, match=r"timeline old is not the newest of the chain.*timeline new"):
            late()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    new.publish(of("new", 6), {})
    assert new.find_published() == [6]
    assert (new.path(6) / "policy" / "weights").read_text() == "6 in .unfinished-step_6-new"


def test_what_cant_be_removed_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, a folder with a file that somebody has open is never empty."""
    remove = shutil.rmtree

    def keep(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    def remains() -> list[str]:
        return [path.name for path in tmp_path.glob(".unfinished-*")]

    monkeypatch.setattr(shutil, "rmtree", keep)
    old, new = (Checkpoints(tmp_path, CheckpointingConfig(keep_top_k=1)) for _ in range(2))
    old.start("old", 0)
    save(old, "old", 2, 4)
    half = old.begin(6, "old")
    assert old.find_published() == [4]
    new.start("new", 4)
    assert not half.exists(), "a trainer that is only frozen could complete it"
    assert len(remains()) == 2
    save(new, "new", 6)
    assert len(remains()) == 3
    monkeypatch.setattr(shutil, "rmtree", remove)
    save(new, "new", 8)
    assert remains() == []


class FrozenInPublish(Checkpoints):
    """Frozen between the last look at the chain and the rename, while `meanwhile` happens."""

    meanwhile: Callable[[], None]

    def _make_way(self, version: int, timeline: str) -> None:
        super()._make_way(version, timeline)
        self.meanwhile()


@pytest.mark.parametrize("successor_is_ahead", [False, True])
def test_an_abandoned_checkpoint_is_set_aside_and_never_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, successor_is_ahead: bool
) -> None:
    config = CheckpointingConfig(keep_top_k=1)
    old, new = FrozenInPublish(tmp_path, config), Checkpoints(tmp_path, config)
    old.meanwhile = lambda: None
    old.start("old", 0)
    save(old, "old", 2)
    write(old.begin(4, "old"), 4)

    def take_over() -> None:
        new.start("new", 2)
        # its library, asleep in a write, makes what was removed again
        write_again(old.locate_unfinished(4, "old"))
        if successor_is_ahead:
            save(new, "new", 4)

    def write_again(half: Path) -> None:
        half.mkdir()
        (half / "state.json").write_text(of("old", 4).model_dump_json())

    old.meanwhile = take_over
    with pytest.raises(ServiceError):
        old.publish(of("old", 4), {})
    third = Checkpoints(tmp_path, CheckpointingConfig())
    if successor_is_ahead:
        assert third.find_published() == [4]
        assert third.state(4).timeline == "new"
        return
    assert (tmp_path / "step_4" / "state.json").is_file(), "it was published, too late to be noticed"
    assert third.find_published() == [2]
    write(new.begin(4, "new"), 4)
    assert "checkpoint 4 was published by a trainer (timeline old)" in caplog.text
    new.publish(of("new", 4), {})
    assert third.state(4).timeline == "new"
    (aside,) = tmp_path.glob("abandoned-*")
    assert (aside.name, (aside / "state.json").is_file()) == ("abandoned-step_4-old", True)


class FrozenInAddMetrics(Checkpoints):
    """Frozen between its look at the chain and what it writes, while `meanwhile` happens."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def state(self, version: int) -> CheckpointState:
        found = super().state(version)
        self.meanwhile()
        return found

    def find_published(self) -> list[int]:
        found = super().find_published()
        self.meanwhile()
        return found


@pytest.mark.parametrize("goes_on_from", [2, 4])
def test_metrics_of_a_trainer_that_wakes_late_change_nothing(tmp_path: Path, goes_on_from: int) -> None:
    """The successor has published a checkpoint of the same version, or has added its own metrics to the one that it went on from."""
    config = CheckpointingConfig(keep_top_k=None)
    old, new = FrozenInAddMetrics(tmp_path, config), Checkpoints(tmp_path, config)
    old.start("old", 0)
    save(old, "old", 2, 4)
    old.add_metrics(4, "old", {"val:accuracy": 0.25, "val:early": 1.0})
    old.add_metrics(4, "old", {"val:accuracy": 0.5})
    assert new.state(4).metrics == {"val:accuracy": 0.5, "val:early": 1.0}

    def take_over() -> None:
        del old.meanwhile
        new.start("new", goes_on_from)
        if goes_on_from == 2:
            save(new, "new", 4)
        new.add_metrics(4, "new", {"val:accuracy": 0.75})

    old.meanwhile = take_over
    with pytest.raises(ServiceError, match="timeline old is not the newest of the chain"):
        old.add_metrics(4, "old", {"val:accuracy": 0.125})
    third = Checkpoints(tmp_path, CheckpointingConfig())
    assert third.find_published() == [2, 4]
    assert third.state(4).timeline == ("new" if goes_on_from == 2 else "old")
    assert third.state(4).metrics["val:accuracy"] == 0.75
    assert ("val:early" in third.state(4).metrics) == (goes_on_from == 4)


@contextmanager
def frozen_before(number: int, meanwhile: Callable[[], None]) -> Iterator[None]:
    """The process is frozen before the file operation of this number, while `meanwhile` happens."""
    operations = itertools.count()

    def counted(operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if next(operations) == number:
            patch.undo()
            meanwhile()
        return operation(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((io, "open"), *((os, name) for name in ("mkdir", "rename", "scandir", "unlink", "rmdir"))):
            patch.setattr(module, name, partial(counted, getattr(module, name)))
        yield


Does = Callable[[Checkpoints], None]


def freeze(folder: Path, before: int, method: str, keep: int | None, first: str, end: Does, over: Does) -> bool:
    """A trainer that comes to its `end` with a checkpoint 2 of timeline `first` is frozen before file operation `before` of `method`, and
    its successor takes `over`. Returns whether there are so many operations."""
    new, old = (Checkpoints(folder, CheckpointingConfig(keep_top_k=top)) for top in (3, keep))
    new.start(first, 0)
    save(new, first, 2)
    run, said = getattr(old, method), ""
    kept: dict[Path, bytes] = {}

    def take_over() -> None:
        over(new)
        kept.update(contents(folder))

    def stops(*args: Any) -> None:
        with frozen_before(before, take_over):
            run(*args)

    setattr(old, method, stops)
    try:
        end(old)
    except ServiceError as error:
        said = str(error)
    if kept:
        assert contents(folder) == kept, f"frozen before file operation {before}"
        assert said == "" or "timeline old is not the newest of the chain" in said
        new.start("last", new.newest() or 0)
        assert not list(folder.glob(".unfinished-*"))
    return bool(kept)


def count_operations(tmp_path: Path, *situation: Any) -> int:
    return next(before for before in itertools.count() if not freeze(tmp_path / str(before), before, *situation))


@pytest.mark.parametrize("goes_on_from", [0, 2, 4])
def test_a_trainer_frozen_in_retention_spares_its_successor(tmp_path: Path, goes_on_from: int) -> None:
    """The successor publishes another checkpoint of the version that was to be removed, or goes on from that one, or keeps it."""

    def end(old: Checkpoints) -> None:
        save(old, "old", 4)

    def over(new: Checkpoints) -> None:
        new.start("new", goes_on_from if goes_on_from in (0, *new.find_published()) else 4)  # 2 may be removed by now
        if goes_on_from == 0:
            save(new, "new", 2)

    assert count_operations(tmp_path, "_retain", 1, "old", end, over) > 10


def test_a_trainer_frozen_while_it_sets_aside_spares_its_successor(tmp_path: Path) -> None:
    """The successor publishes another checkpoint of the version that was abandoned."""

    def over(new: Checkpoints) -> None:
        new.start("new", 0)
        save(new, "new", 2)

    assert count_operations(tmp_path, "_set_aside", 3, "first", lambda old: old.start("old", 0), over) > 5


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob("step_*/**/*") if path.is_file()}


def test_a_start_sets_aside_what_was_abandoned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointingConfig(keep_top_k=None))
    checkpoints.start("old", 0)
    for version in (2, 4):
        checkpoints.begin(version, "old")
        checkpoints.publish(of("old", version), {})
    checkpoints.start("new", 2)
    assert checkpoints.find_published() == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["abandoned-step_4-old", "chain.jsonl", "step_2"]


def test_a_start_from_what_is_gone_or_abandoned_is_refused(tmp_path: Path) -> None:
    one, other = (Checkpoints(tmp_path, CheckpointingConfig(keep_top_k=1)) for _ in range(2))
    one.start("one", 0)
    save(one, "one", 2, 4, keep=[2])
    other.start("other", 2)  # 4 is abandoned
    save(other, "other", 6, 8)
    assert other.find_published() == [8]
    for version in (2, 4, 6):
        with pytest.raises(Restartable, match=rf"step_{version},.*gone"):
            one.start(f"late-{version}", version)
    assert other.find_published() == [8]
    other.require_newest("other")


def test_a_lock_that_another_holds_warns_and_keeps_nobody_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frozen, successor = (Checkpoints(tmp_path, CheckpointingConfig()) for _ in range(2))
    held = frozen.lock()
    assert caplog.text == ""
    taken = successor.lock()
    assert f"{tmp_path} is in use (process " in caplog.text
    assert "This one takes over" in caplog.text
    successor.start("new", 0)
    held.release()
    taken.release()
