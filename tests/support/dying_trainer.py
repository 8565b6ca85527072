"""A trainer as a process, with one fault injected. Arguments: the configuration as JSON, the fault (`none`, or `name:version`).

Each fault is SIGKILL at one point: after `reserve` has answered, between the last file of a checkpoint and its rename, between its
publication and `commit`, in the middle of a broadcast of weights, on rank 1 before it reads its share of a step, on rank 1 or all before
the gradients are summed over the ranks, on rank 1 while a snapshot is taken, before and after a snapshot is complete and has become a
checkpoint, after a part of a
refill, between a refill and the word that it is done, and between the last file of a checkpoint in the store and its manifest
(`in_upload:version`). By then the checkpoint before is committed. Others are SIGSTOP before the publication of a checkpoint
(`frozen_in_checkpoint:version`), a disk that is full from the publication of one on (`full_disk:version`), a successor while a batch is
about to be read (`superseded_before_reading:step`), and batches that can't be trained on as they are read (`broken_batches:number`;
`overwritten_payloads`, one of each kind).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from unittest import mock

import msgspec
import numpy as np
import torch

from headrace.base.errors import HeadraceError
from headrace.config import Config
from headrace.net import tracing
from headrace.records.trajectory import Group, Trajectory
from headrace.replay import ReplayClient, Reservation
from headrace.run.object_store import Manifest, RunStore
from headrace_services.refit.sender import WeightSender
from headrace_services.trainer.control.checkpoint import Checkpoints, CheckpointState
from headrace_services.trainer.control.context import Dependencies
from headrace_services.trainer.control.loop import Loop
from headrace_services.trainer.control.snapshots import Snapshots
from headrace_services.trainer.control.uploads import Uploads
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.optimizer import ModelOptimizer
from headrace_services.trainer.main import main
from headrace_services.trainer.telemetry import plots
from tests.support.waiting import eventually

T = TypeVar("T")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def checkpoint_committed(replay: ReplayClient, step: int, period: int) -> None:
    """Return once the checkpoint before `step` is: it is written while training goes on."""

    async def committed() -> bool:
        return (await replay.state()).committed >= step - step % period

    await eventually(committed)


class DyingReplay(ReplayClient):
    after_reserve = before_commit = -1
    period = 1

    async def reserve(self, step: int, timeline: str) -> Any:
        reply = await super().reserve(step, timeline)
        if isinstance(reply, Reservation) and step == self.after_reserve:
            await checkpoint_committed(self, step, self.period)
            die()
        return reply

    async def commit(self, version: int, timeline: str, trained: Mapping[int, Sequence[str]] | None = None) -> None:
        if version == self.before_commit:
            die()
        await super().commit(version, timeline, trained)


class DyingRefill(ReplayClient):
    async def enqueue(self, groups: Sequence[Group], timeline: str, refill: bool = False) -> int:
        if not refill:
            return await super().enqueue(groups, timeline)
        await super().enqueue(groups[:1], timeline, refill=True)
        die()
        return 0


class DyingAfterRefill(ReplayClient):
    async def end_refill(self, timeline: str) -> None:
        die()


class DyingReader(ReplayClient):
    step = -1  # any

    async def read_each(self, keys: Sequence[str]) -> Any:
        if os.environ["RANK"] == "1" and self.step in (-1, (await self.state()).next_step - 1):
            die()
        return await super().read_each(keys)


class BrokenReplay(ReplayClient):
    """Of the first `times` batches of step 2 or later, the score of one trajectory is another than the one that was reserved."""

    times = 0

    async def read_each(self, keys: Sequence[str]) -> Any:
        found = await super().read_each(keys)
        trajectory, score = found[0]
        if (await self.state()).next_step > 2 and self.times and "-train-" in trajectory.group_id:
            type(self).times -= 1
            found[0] = trajectory, msgspec.structs.replace(score, reward=score.reward + 1)
        return found


class SupersededReplay(ReplayClient):
    """Before it reads the batch of a step, another trainer has gone on from an earlier version, trained that step and committed it."""

    step = -1
    period = 1

    async def read_each(self, keys: Sequence[str]) -> Any:
        if (await self.state()).next_step - 1 == self.step:
            await checkpoint_committed(self, self.step, self.period)
            await self.rewind(self.step - 1, "another")
            await self.redis.delete(keys[0])
        return await super().read_each(keys)


class OverwrittenReplay(ReplayClient):
    """Of the first batch of the steps 1, 2 and 3, other bytes are in the place of a payload: of no trajectory, of one with a token that the
    model does not have, of one that is longer than any sequence may be."""

    todo: ClassVar = {1, 2, 3}

    async def read_each(self, keys: Sequence[str]) -> Any:
        step = (await self.state()).next_step - 1
        good = Trajectory.decode(await self.redis.get(keys[0])) if step in self.todo else None
        if good is not None and "-train-" in good.group_id:  # a validation is read in between
            self.todo.remove(step)
            outside = np.full_like(good.completion_token_ids, 10**6)
            changed = {"completion_token_ids": outside} if step == 2 else {"prompt_token_ids": np.ones(99, np.int32)}
            await self.redis.set(keys[0], b"\xc1" if step == 1 else msgspec.structs.replace(good, **changed).encode())
        return await super().read_each(keys)


class FrozenCheckpoints(Checkpoints):
    """Stops its process between the last file of a checkpoint and its publication."""

    version = -1

    def publish(
        self, state: CheckpointState, ledger: Mapping[int, Sequence[str]], keep: Any = (), files: Any = None
    ) -> Path:
        if state.version == self.version:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().publish(state, ledger, keep, files)


class DyingCheckpoints(Checkpoints):
    version = -1

    def publish(
        self, state: CheckpointState, ledger: Mapping[int, Sequence[str]], keep: Any = (), files: Any = None
    ) -> Path:
        if state.version == self.version:
            die()
        return super().publish(state, ledger, keep, files)


class DyingAdoption(Checkpoints):
    """Dies before a snapshot becomes a checkpoint, or right after."""

    after = False

    def _complete(self, version: int, timeline: str, keep: Any = ()) -> Path:
        if not timeline.startswith("snapshot-") or self.after:
            super()._complete(version, timeline, keep)
        if timeline.startswith("snapshot-"):
            die()
        return self.path(version)


def die_in(kind: type, name: str, ranks: Collection[int], is_time: Callable[..., bool], *, after: bool = False) -> None:
    """From now on these ranks die at the begin of a call of this method, or `after` it, if it is the time."""
    method = getattr(kind, name)

    def dying(self: Any, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named) if after else None
        if int(os.environ.get("RANK", "0")) in ranks and is_time(self, *arguments):
            die()
        return result if after else method(self, *arguments, **named)

    setattr(kind, name, dying)


def let_ranks_die(fault: str, version: int) -> None:
    """Faults of several ranks, or between checkpoints. Before each step, the snapshot of its weights is complete."""
    train = Loop._train

    async def train_after_snapshot(loop: Loop, reservation: Reservation) -> None:
        await loop._writer.finish()
        await train(loop, reservation)

    def in_step(optimizer: ModelOptimizer, *_: Any) -> bool:
        return optimizer.rate.steps == version

    def of_version(_: Any, state: CheckpointState, *__: Any) -> bool:
        return state.version == version

    Loop._train = train_after_snapshot  # type: ignore[method-assign]
    match fault:
        case "rank_1_in_all_reduce":
            die_in(ModelOptimizer, "grad_norm", {1}, in_step)
        case "all_in_all_reduce":
            die_in(ModelOptimizer, "grad_norm", {0, 1}, in_step)
        case "rank_1_in_snapshot":
            die_in(Learner, "snapshot", {1}, lambda learner: learner.version == version, after=True)
        case "before_snapshot" | "after_snapshot":
            die_in(Snapshots, "publish", {0}, of_version, after=fault == "after_snapshot")


class FullDisk(Checkpoints):
    version = -1

    def _make_way(self, version: int, timeline: str) -> None:
        if version == self.version and self.locate_unfinished(version, timeline).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._make_way(version, timeline)


class DyingStore(RunStore):
    version = -1

    def write_manifest(self, manifest: Manifest) -> None:
        if manifest.version == self.version:
            die()
        super().write_manifest(manifest)


def uploads(config: Config, store: type[RunStore] = RunStore) -> Uploads | None:
    """A trainer that is killed is not waited for long."""
    opened = store.of(config)
    return None if opened is None else Uploads(config, opened, silence_s=0.5)


@dataclasses.dataclass
class DyingSource:
    source: Any

    def metadata(self) -> Any:
        return self.source.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(self.source):
            if number == 3:
                die()
            yield item


class DyingSender(WeightSender):
    version = -1
    period = 1

    async def refit(self, version: int, timeline: str, source: Any, *probe: Any, **others: Any) -> Any:
        if version == self.version:
            await checkpoint_committed(self._replay, version, self.period)
            source = DyingSource(source)
        return await super().refit(version, timeline, source, *probe, **others)


def changed(kind: type[T], **attributes: object) -> type[T]:
    """`kind` with other values of its attributes."""
    return type(kind.__name__, (kind,), attributes)


def dependencies(fault: str, version: int, period: int) -> Dependencies:
    """`period` is that of the checkpoints."""
    if fault == "after_reserve":
        return Dependencies(replay=changed(DyingReplay, after_reserve=version, period=period).connect)
    if fault == "before_commit":
        return Dependencies(replay=changed(DyingReplay, before_commit=version).connect)
    if fault == "in_refill":
        return Dependencies(replay=DyingRefill.connect)
    if fault == "before_refilled":
        return Dependencies(replay=DyingAfterRefill.connect)
    if fault == "rank_1_reads":
        return Dependencies(replay=changed(DyingReader, step=version).connect)
    if fault == "broken_batches":
        return Dependencies(replay=changed(BrokenReplay, times=version).connect)
    if fault == "superseded_before_reading":
        return Dependencies(replay=changed(SupersededReplay, step=version, period=period).connect)
    if fault == "overwritten_payloads":
        return Dependencies(replay=OverwrittenReplay.connect)
    faulty = {
        "in_checkpoint": changed(DyingCheckpoints, version=version),
        "frozen_in_checkpoint": changed(FrozenCheckpoints, version=version),
        "full_disk": changed(FullDisk, version=version),
        "in_adoption": DyingAdoption,
        "after_adoption": changed(DyingAdoption, after=True),
    }
    if fault in faulty:
        dying = faulty[fault]
        return Dependencies(checkpoints=lambda config: dying(config.checkpoint_folder, config.checkpointing))
    if fault == "in_refit":
        return Dependencies(sender=changed(DyingSender, version=version, period=period))
    if fault == "in_upload":
        return Dependencies(uploads=lambda config: uploads(config, changed(DyingStore, version=version)))
    return Dependencies(uploads=uploads)


def run(settings: str, fault: str, hosts: Sequence[str] = ()) -> None:
    """`hosts` are the folders in the memory of each rank's host; without them all ranks are on one."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    name, _, at = fault.partition(":")
    try:
        given = json.loads(settings)
        if hosts:
            given["checkpointing"]["snapshot_dir"] = hosts[int(os.environ["RANK"])]
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        config = Config.model_validate(given)
        if config.checkpointing.snapshot_dir is not None:
            let_ranks_die(name, int(at or -1))
        exporting = tracing.exporting(config.telemetry, "trainer", config.run.id or "")  # as `headrace trainer` does
        # all charts would be a third of what a short run computes
        with exporting, mock.patch.object(plots, "CHARTS", plots.CHARTS[:2]):
            main(config, dependencies(name, int(at or -1), config.checkpointing.save_period))
    except HeadraceError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
