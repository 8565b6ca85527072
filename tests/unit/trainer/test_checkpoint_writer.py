"""Checkpoints that are written while training goes on: what depends on one waits for it, and what fails ends the run."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import shutil
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.errors import Restartable, ServiceError, WrongStep
from headrace.config.services import CheckpointingConfig
from headrace.run.checkpoints import cannot_write_checkpoint
from headrace_services.trainer.control.checkpoint import Checkpoints, CheckpointState
from headrace_services.trainer.control.checkpoint_writer import CheckpointWriter
from headrace_services.trainer.control.lineage_writer import LineageWriter
from headrace_services.trainer.control.rank import LeadRank
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.network.backbone import Write


class Disk:
    """Writes of a checkpoint's largest file: each waits until it may, and then fails if it is to."""

    def __init__(self) -> None:
        self.reached, self.may_write = threading.Event(), threading.Event()
        self.error: OSError | None = None

    def write(self, folder: Path) -> None:
        self.reached.set()
        assert self.may_write.wait(60)
        if self.error is not None:
            raise self.error
        folder.mkdir()
        (folder / "weights").write_text("w")


class Learner:
    """One whose snapshots are written to `disk`."""

    broken = None

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.snapshots: list[weakref.ref[Write]] = []

    def snapshot(self) -> Write:
        assert all(snapshot() is None for snapshot in self.snapshots), "one is in memory at a time"

        def write(folder: Path) -> None:
            try:
                self._disk.write(folder / "policy")
            except OSError as error:
                raise cannot_write_checkpoint(folder, error) from error

        self.snapshots.append(weakref.ref(write))
        return write


class Buffer:
    """What is committed to it, and what was published by then."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self.commits: list[tuple[int, dict[int, list[str]], list[int]]] = []
        self.refuses = False
        self._told = 0  # checkpoints before whose commit its history was written to the folder

    async def write_all(self) -> None:
        self._told += 1

    async def commit(self, version: int, timeline: str, trained: Mapping[int, Sequence[str]]) -> None:
        assert self._told > len(self.commits), (
            "what the checkpoint was trained on is in the history before it is committed"
        )
        if self.refuses:
            raise WrongStep("only steps below 0 were reserved")
        self.commits.append(
            (version, {step: [*ids] for step, ids in trained.items()}, self._checkpoints.find_published())
        )


@dataclasses.dataclass
class Case:
    disk: Disk
    lead: Any
    checkpoints: Checkpoints
    buffer: Buffer
    writer: CheckpointWriter

    async def save(self, version: int, keep: Sequence[int] = ()) -> None:
        state = CheckpointState(version=version, timeline="t", cursor=9, run_id="r")
        await self.writer.save(state, {version - 1: [f"g{version}"]}, keep, {"ended": b""})

    async def saved(self, *versions: int) -> None:
        """These are published before anything happens."""
        self.disk.may_write.set()
        for version in versions:
            await self.save(version)
            await self.writer.finish()
        self.disk.may_write.clear()
        self.disk.reached.clear()


def case_of(folder: Path, kind: type[Checkpoints] = Checkpoints, **settings: Any) -> Case:
    checkpoints = kind(folder, CheckpointingConfig(**{"metric_name": "val:accuracy", "keep_top_k": 1, **settings}))
    checkpoints.start("t", 0)
    disk, buffer, thread = Disk(), Buffer(checkpoints), ThreadPoolExecutor(1)
    lead = LeadRank(None, Ranks(), lambda keys: [])  # type: ignore[arg-type]
    lead._learner = Learner(disk)  # type: ignore[assignment]

    async def torch(work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    async def retry(call: Callable[[], Awaitable[Any]]) -> Any:
        return await call()

    lineage = LineageWriter(folder / "lineage", "t")
    context: Any = SimpleNamespace(
        lead=lead, checkpoints=checkpoints, replay=buffer, history=buffer, retry=retry, lineage=lineage, torch=torch,
        clock=time.monotonic, uploads=None,
    )  # fmt: skip
    return Case(disk, lead, checkpoints, buffer, CheckpointWriter(context, "t"))


def polled(writer: CheckpointWriter) -> asyncio.Event:
    """Set once `writer` has been polled three times."""
    poll, polls, event = writer.poll, iter(range(3)), asyncio.Event()

    async def counted() -> None:
        await poll()
        if next(polls, None) is None:
            event.set()

    writer.poll = counted  # type: ignore[method-assign]
    return event


async def reached(disk: Disk) -> None:
    await asyncio.to_thread(disk.reached.wait)


async def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    case = case_of(tmp_path)
    await case.save(2)
    await reached(case.disk)
    await case.writer.poll()  # the loop's turns go on
    assert (case.checkpoints.find_published(), case.buffer.commits, case.writer.take_metrics()) == ([], [], {})
    case.disk.may_write.set()
    await case.writer.finish()
    assert case.checkpoints.ledger(2) == {1: ["g2"]}
    assert case.buffer.commits == [(2, {1: ["g2"]}, [2])]
    assert case.writer.take_metrics()["timing/train/checkpoint_write"] > 0
    assert case.writer.take_metrics() == {}


async def test_a_second_checkpoint_waits_until_the_first_is_committed(tmp_path: Path) -> None:
    case = case_of(tmp_path, keep_top_k=None)
    await case.save(1)
    await reached(case.disk)

    async def second() -> None:
        await case.writer.finish()
        assert [version for version, *_ in case.buffer.commits] == [1]
        await case.save(2)

    several_polls = polled(case.writer)
    saving = asyncio.create_task(second())
    await several_polls.wait()
    assert not saving.done()
    case.disk.may_write.set()
    await saving
    await case.writer.finish()
    assert case.buffer.commits == [(1, {0: ["g1"]}, [1]), (2, {1: ["g2"]}, [1, 2])]


async def test_metrics_of_a_version_being_written_come_into_its_checkpoint(tmp_path: Path) -> None:
    case = case_of(tmp_path)
    await case.saved(1)
    case.writer.add_metrics(1, {"val:accuracy": 0.5})
    await case.writer.finish()
    await case.save(2)
    case.writer.add_metrics(2, {"val:accuracy": 0.25})
    case.disk.may_write.set()
    await case.writer.finish()
    assert case.checkpoints.state(2).metrics == {"val:accuracy": 0.25}
    assert case.checkpoints.find_published() == [1, 2], "the best and the newest"
    await case.save(3, keep=[2])
    case.writer.add_metrics(2, {"val:accuracy": 0.75})  # a validation that ends while the next checkpoint is written
    await case.writer.finish()
    assert case.checkpoints.find_published() == [2, 3]
    case.writer.add_metrics(7, {"val:accuracy": 1.0})  # a version without a checkpoint
    await case.writer.finish()
    assert case.checkpoints.find_published() == [2, 3]


class Unwritable(Checkpoints):
    """Its publications fail with `error`, if there is one."""

    error: OSError | None = None

    def _make_way(self, version: int, timeline: str) -> None:
        super()._make_way(version, timeline)
        if self.error is not None:
            raise self.error


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def part_fails(case: Case) -> None:
    case.disk.error = FULL


def publication_fails(case: Case) -> None:
    case.checkpoints.error = OSError(errno.EACCES, os.strerror(errno.EACCES))  # type: ignore[attr-defined]


def folder_is_lost(case: Case) -> None:
    shutil.rmtree(case.checkpoints.locate_unfinished(2, "t"))


async def polls(writer: CheckpointWriter) -> None:
    while True:
        await writer.poll()
        await asyncio.sleep(0)


@pytest.mark.parametrize("notice", [CheckpointWriter.finish, polls], ids=["waits", "polls"])
@pytest.mark.parametrize("fail", [part_fails, publication_fails, folder_is_lost])
async def test_a_write_that_fails_ends_the_run_and_keeps_the_earlier_one(
    tmp_path: Path, fail: Callable[[Case], None], notice: Callable[[CheckpointWriter], Awaitable[None]]
) -> None:
    case = case_of(tmp_path, Unwritable)
    await case.saved(1)
    await case.save(2)
    await reached(case.disk)
    fail(case)
    case.disk.may_write.set()
    with pytest.raises(ServiceError, match=r"write a checkpoint.*untouched"):
        await notice(case.writer)
    assert case.checkpoints.find_published() == [1]
    assert [version for version, *_ in case.buffer.commits] == [1]


async def test_metrics_that_can_t_be_added_are_the_run_s_error_too(tmp_path: Path) -> None:
    case = case_of(tmp_path)
    await case.saved(1)
    (case.checkpoints.path(1) / ".metrics-t.json").mkdir()
    case.writer.add_metrics(1, {"val:accuracy": 0.5})
    with pytest.raises(ServiceError, match="can't write a checkpoint"):
        await case.writer.finish()


async def test_a_buffer_that_lost_the_steps_is_said_to_have(tmp_path: Path) -> None:
    case = case_of(tmp_path)
    case.buffer.refuses = True
    case.disk.may_write.set()
    await case.save(1)
    with pytest.raises(Restartable, match="lost a step"):
        await case.writer.finish()
    assert case.checkpoints.find_published() == [1]


@pytest.mark.parametrize("written", [False, True], ids=["its folder is gone", "its library makes the folder again"])
async def test_law_4_a_trainer_with_a_successor_publishes_nothing(tmp_path: Path, written: bool) -> None:
    case = case_of(tmp_path)
    await case.saved(1)
    await case.save(2)
    await reached(case.disk)
    successor = Checkpoints(tmp_path, CheckpointingConfig())
    successor.start("new", 1)
    if written:
        case.checkpoints.locate_unfinished(2, "t").mkdir()
    case.disk.may_write.set()
    with pytest.raises(ServiceError, match=r"timeline t is not the newest.*another trainer"):
        await case.writer.finish()
    assert successor.find_published() == [1]
    assert [version for version, *_ in case.buffer.commits] == [1]


@pytest.mark.parametrize("fails", [False, True])
async def test_after_another_error_what_is_being_written_is_completed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    case = case_of(tmp_path)
    await case.save(1)
    case.disk.error = FULL if fails else None
    closing = asyncio.create_task(case.writer.close())
    await reached(case.disk)
    case.disk.may_write.set()
    await closing
    assert case.checkpoints.find_published() == ([] if fails else [1])
    assert ("can't write a checkpoint" in caplog.text) == fails


# -- several ranks


class TwoRanks(LeadRank):
    """Rank 0 of two: `others` is what the second has said when they are asked."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(None, Ranks(), lambda keys: [])  # type: ignore[arg-type]
        self._learner = Learner(disk)  # type: ignore[assignment]
        self.ranks.size = 2
        self.others: bool | ServiceError = False

    def _announce(self, name: str, arguments: Sequence[Any]) -> None:
        pass

    def is_saved(self) -> bool:
        if isinstance(self.others, ServiceError):
            raise self.others
        return self.part.done() and self.others


async def two_ranks(tmp_path: Path) -> tuple[Case, TwoRanks]:
    case = case_of(tmp_path)
    lead = TwoRanks(case.disk)
    case.writer._context.lead = lead  # type: ignore[misc]
    await case.save(1)
    case.disk.may_write.set()
    lead.part.result()
    return case, lead


async def test_a_checkpoint_is_published_once_every_rank_has_written(tmp_path: Path) -> None:
    case, lead = await two_ranks(tmp_path)
    several_polls = polled(case.writer)
    finishing = asyncio.create_task(case.writer.finish())
    await several_polls.wait()
    assert (finishing.done(), case.checkpoints.find_published()) == (False, [])
    lead.others = True
    await finishing
    assert case.buffer.commits == [(1, {0: ["g1"]}, [1])]


async def test_what_another_rank_can_t_write_is_the_run_s_error(tmp_path: Path) -> None:
    case, lead = await two_ranks(tmp_path)
    lead.others = ServiceError("can't write a checkpoint")
    with pytest.raises(ServiceError, match="can't write a checkpoint"):
        await case.writer.poll()
    await case.writer.close()  # waits for nobody
    assert case.checkpoints.find_published() == []
