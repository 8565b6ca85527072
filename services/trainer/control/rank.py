"""The work of each trainer rank: load, step, probe, gather weights, save.

These are the commands of rank 0. Its `LeadRank` sends each command to the other ranks before it acts itself, so that all ranks enter the
same collective (`follow`). Each rank reads its own trajectories from the buffer. A thread of each rank writes what is saved, and enters no
collective.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import numpy as np
import torch

from headrace.base.errors import CodecError, HeadraceError, ServiceError
from headrace.config import Config
from headrace.records.origin import Origin, trace_origin
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Float32, Group
from headrace.replay import Reservation
from headrace.run.checkpoints import find_change

from ...refit.probe import rollout_dtype
from ...refit.states import StateReference
from ..distributed.ranks import Ranks, place_on_host
from ..learning.batch import Batch, BatchRejected, check_invariants, gather, reject_any
from ..learning.learner import TRAINING, Learner
from ..learning.optimizer import missing_parts
from ..learning.step import train_step
from ..telemetry.alarm import ReplicaDisagreement, error_by_replica, merge
from ..telemetry.metrics import Extent, TrajectoryReport
from .snapshots import Snapshots

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Read = Callable[[Sequence[str]], list[tuple[AnyTrajectory, Score] | CodecError]]


_DISMISS = "dismiss"
_COMMANDS: dict[str, Callable[..., Any]] = {}


def command(method: Callable[Concatenate[TrainerRank, P], T]) -> Callable[Concatenate[TrainerRank, P], T]:
    """Make a method of `TrainerRank` a command: rank 0 sends its name and its positional arguments to the other ranks, and each of them
    makes the same call. msgpack must be able to carry the arguments."""
    name = method.__name__
    _COMMANDS[name] = method

    @functools.wraps(method)
    def announced(self: TrainerRank, *arguments: P.args, **named: P.kwargs) -> T:
        assert not named
        self._announce(name, arguments)
        return method(self, *arguments, **named)

    return announced


@dataclasses.dataclass(frozen=True)
class TrainedStep:
    """The outcome of a step: `metrics` of the whole batch, and the number of completions in it that were `truncated` at the length limit.

    `trajectories` and `errors` (by replica, `alarm.error_by_replica`) are on rank 0 those of the whole batch, in its order, and elsewhere
    those of the rank's own part.
    """

    metrics: dict[str, float]
    truncated: int
    trajectories: list[TrajectoryReport]
    errors: dict[str, ReplicaDisagreement]

    @property
    def origins(self) -> dict[str, list[Origin]]:
        """The origins of the trajectories, by group id."""
        by_group: dict[str, list[Origin]] = {}
        for trajectory in self.trajectories:
            by_group.setdefault(trajectory.group_id, []).append(trajectory.origin)
        return by_group


class TrainerRank:
    """One rank. `read` fetches payloads from the buffer, `snapshots` are those of its host. Every command is a collective of all ranks."""

    def __init__(self, config: Config, ranks: Ranks, read: Read, snapshots: Snapshots | None = None) -> None:
        self.ranks = ranks
        self.snapshots = snapshots
        self._config = config
        self._read = read
        self._learner: Learner | None = None
        self._batch: Batch | None = None  # the newest step's
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._part: Future[None] | None = None

    @property
    def learner(self) -> Learner:
        """Raises `ServiceError` if a step has failed half-way: its weights are of no version, so they go nowhere."""
        if self._learner is None:
            raise ServiceError("the trainer was asked to work before it had loaded its model")
        if self._learner.broken is not None:
            raise ServiceError(self._learner.broken)
        return self._learner

    @property
    def batch(self) -> Batch:
        """This rank's trajectories of the newest step, with all columns that the step added."""
        assert self._batch is not None
        return self._batch

    @command
    def load(self, checkpoint: str | None) -> None:
        self._learner = Learner(self._config, Path(checkpoint) if checkpoint else None, self.ranks)

    @command
    def damage(self, checkpoint: str) -> str | None:
        """Return what is wrong with a checkpoint, as `checkpoints.find_change`: the same on every rank, also if only one finds it.
        The ranks of a host share the files, and each host reads all of them, because what one reads another may not."""
        problem = find_change(Path(checkpoint), *place_on_host())
        found = self.ranks.all_gather(problem or "", str)
        return next((each for each in found if each), None)

    @command
    def step(
        self, reservation: Reservation, multipliers: Sequence[float], shares: Sequence[Sequence[int]]
    ) -> TrainedStep:
        """Train on the reserved batch. `multipliers` are the groups' weights in the loss, `shares` each rank's places in the batch.

        The metrics are those of `train_step`, and `masked_tokens`, the number of policy tokens over age. Raises `BatchRejected` on every
        rank if what any rank read can't be trained on.
        """
        algorithm, step, places = self._config.algorithm, reservation.step, shares[self.ranks.rank]
        reserved = [reservation.trajectories[place] for place in places]
        problems: list[str] = []
        broken: dict[str, str] = {}
        trajectories: list[AnyTrajectory] = []
        scores: list[Score] = []
        try:
            for one, read in zip(reserved, self._read([one.key for one in reserved]), strict=True):
                if isinstance(read, CodecError):
                    broken[one.group_id] = (
                        f"step {step}: trajectory {one.group_id!r}[{one.index}] can't be read: {read!s:.500}"
                    )
                    continue
                trajectory, score = read
                problem = check_invariants(
                    one,
                    trajectory,
                    score,
                    step=step,
                    max_age=algorithm.max_age,
                    policy=algorithm.asynchrony.staleness_policy,
                )
                if problem:
                    broken[one.group_id] = problem
                trajectories.append(trajectory)
                scores.append(score)
        except HeadraceError as error:
            problems = [str(error) or type(error).__name__]
        self.ranks.raise_any(problems)
        reject_any(broken, self.ranks)
        groups = [place // algorithm.num_generations_per_prompt for place in places]
        self._batch = batch = Batch.of(
            trajectories,
            scores,
            places=places,
            groups=groups,
            multipliers=[multipliers[group] for group in groups],
            size=len(reservation.trajectories),
            step=step,
            max_age=algorithm.max_age,
        )
        metrics = train_step(self.learner, batch)
        truncated, masked = self.ranks.sum([float(batch.truncated.sum()), float((~batch.mask).sum())])
        return TrainedStep(
            metrics={**metrics, "masked_tokens": masked},
            truncated=int(truncated),
            trajectories=self._reports(batch),
            errors=merge(self.ranks.gather(error_by_replica(batch), dict[str, ReplicaDisagreement])),
        )

    def _reports(self, batch: Batch) -> list[TrajectoryReport]:
        """A collective: on rank 0 the reports of the whole batch, in its order, elsewhere those of the rank's own part."""
        own = [
            TrajectoryReport(
                place=int(batch.places[i]),
                group_id=trajectory.group_id,
                origin=trace_origin(trajectory, score, advantage),
                components=score.components,
                timings=score.timings,
                extent=Extent.of(trajectory, [batch.paths[path] for path in batch.paths_of([i])]),
            )
            for i, (trajectory, score, advantage) in enumerate(
                zip(batch.trajectories, batch.scores, batch.mean_advantages(), strict=True)
            )
        ]
        shares = self.ranks.gather(own, list[TrajectoryReport])
        return sorted((report for share in shares for report in share), key=lambda report: report.place)

    @command
    def gather_batch(self) -> Batch:
        """Return the newest step's whole batch with all its columns on rank 0, and the rank's own part elsewhere."""
        return gather(self.batch, self.ranks)

    @command
    def probe(self, token_ids: Sequence[int]) -> Float32:
        return self.learner.probe(np.asarray(token_ids, dtype=np.int32))

    @command
    def probe_rounded(self, token_ids: Sequence[int]) -> Float32 | None:
        return self.learner.probe_rounded(np.asarray(token_ids, dtype=np.int32))

    @command
    def probe_states(self, token_ids: Sequence[int]) -> StateReference | None:
        return self.learner.probe_states(np.asarray(token_ids, dtype=np.int32))

    @command
    def weights(self, adapter_alone: bool) -> Iterator[tuple[str, torch.Tensor]]:
        gathered_in = getattr(torch, rollout_dtype(self._config))
        for weight in self.learner.policy.weights(gathered_in, adapter_alone=adapter_alone):
            self.ranks.progress.mark()
            yield weight

    @property
    def part(self) -> Future[None]:
        """This rank's part of the checkpoint that was saved last. It is done once it is written."""
        assert self._part is not None
        return self._part

    @command
    def save(self, folder: str) -> None:
        """Take a snapshot, and begin to write it to `folder`. The previous snapshot must have been written (`is_saved`)."""
        self._part = self._writer.submit(self.learner.snapshot(), Path(folder))

    @command
    def save_in_memory(self, version: int, timeline: str) -> None:
        """Do as `save` does, but to a folder of each host's `snapshots`."""

        def begin(snapshots: Snapshots) -> None:
            snapshots.begin(version, timeline)

        self._on_each_host(begin)
        folder = self._require_snapshots().locate_unfinished(version, timeline)
        self._part = self._writer.submit(self.learner.snapshot(), folder)

    @command
    def list_snapshot(self, version: int, timeline: str) -> list[str]:
        """Return the paths of all files of a snapshot in memory, of all hosts."""
        return self._on_each_host(lambda snapshots: snapshots.list_files(version, timeline))

    @command
    def copy_snapshot(self, version: int, timeline: str, folder: str) -> None:
        """Copy the files of a snapshot in memory to `folder`, which the hosts share."""
        self._on_each_host(lambda snapshots: snapshots.copy(version, timeline, Path(folder)))

    @command
    def clear_snapshots(self) -> None:
        self._on_each_host(lambda snapshots: snapshots.clear())

    @command
    def remove_snapshots(self) -> None:
        self._on_each_host(lambda snapshots: snapshots.remove())

    @command
    def require_room_for_snapshots(self) -> None:
        """Raise `ServiceError` unless each host has room for what its ranks write of two: the newest stays until the next is complete."""
        self._on_each_host(lambda snapshots: self.learner.require_room(snapshots.folder, 2, of_host=True))

    def _require_snapshots(self) -> Snapshots:
        assert self.snapshots is not None
        return self.snapshots

    def _on_each_host(self, work: Callable[[Snapshots], list[str] | None]) -> list[str]:
        """Have the first rank of each host do this with the host's snapshots, and return what all of them returned. Raises `ServiceError`
        on every rank if any of them does."""
        found, problems = list[str](), list[str]()
        if place_on_host()[0] == 0:
            try:
                found = work(self._require_snapshots()) or []
            except ServiceError as error:
                problems = [str(error)]
        self.ranks.raise_any(problems)
        return [each for of_rank in self.ranks.all_gather(found, list[str]) for each in of_rank]

    @command
    def is_saved(self) -> bool:
        """Return whether every rank has written its part. Raises `ServiceError` on every rank if any rank fails to."""
        done = self.part.done()
        failed = self.part.exception() if done else None
        if failed is not None and not isinstance(failed, ServiceError):
            raise failed
        self.ranks.raise_any([] if failed is None else [str(failed)])
        return all(self.ranks.all_gather(done, bool))

    def _announce(self, name: str, arguments: Sequence[Any]) -> None:
        """Called before each command. Only the lead rank does anything here."""


class LeadRank(TrainerRank):
    """Rank 0: each command goes to the other ranks first. It blocks; call it from one thread at a time."""

    def is_saved(self) -> bool:
        return self.part.done() and super().is_saved()

    def adopt_snapshot(self) -> int | None:
        """Turn the newest snapshot to which the checkpoints lead into one of them, if the hosts still have all of it. Returns its version,
        None if there is none. Whatever is in memory is removed. Raises `ServiceError` as `Checkpoints.publish` does."""
        snapshots = self._require_snapshots()
        state = snapshots.newest()
        if state is not None:
            at = (state.version, state.timeline)
            files = {Path(name).name for name in self.list_snapshot(*at)}
            if missing := missing_parts(snapshots.locate(*at) / TRAINING, files):
                log.warning(
                    "the snapshot of version %d is no longer whole (%s: its host is gone), and the newest checkpoint is used",
                    state.version, ", ".join(missing),
                )  # fmt: skip
                state = None
            else:
                snapshots.checkpoints.adopt(state.version, lambda folder: self.copy_snapshot(*at, str(folder)))
                log.info("continuing from the snapshot of version %d, which is a checkpoint now", state.version)
        self.clear_snapshots()
        return None if state is None else state.version

    def _announce(self, name: str, arguments: Sequence[Any]) -> None:
        self.ranks.send(msgspec.msgpack.encode([name, *arguments]))


class Weights:
    """The policy's weights, or only its adapter, as a source for the weight channel. Each iteration is a collective and must run to its
    end."""

    def __init__(self, lead: LeadRank, *, adapter_alone: bool = False) -> None:
        self._lead = lead
        self._adapter_alone = adapter_alone

    def metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        shapes = self._lead.learner.policy.weight_shapes(adapter_alone=self._adapter_alone)
        return [(name, "float32", shape) for name, shape in shapes]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._lead.ranks.progress.working():
            yield from self._lead.weights(self._adapter_alone)


def dismiss(ranks: Ranks) -> None:
    """Rank 0: end the work of the other ranks."""
    ranks.send(msgspec.msgpack.encode([_DISMISS]))


def follow(rank: TrainerRank) -> None:
    """Ranks above 0: carry out rank 0's commands until it dismisses them."""
    while True:
        name, *arguments = msgspec.msgpack.decode(rank.ranks.receive())
        if name == _DISMISS:
            return
        if name not in _COMMANDS:
            raise ServiceError(f"rank 0 sent the unknown command {name!r}; start all ranks from one build")
        # loading takes as long as it takes: a model may have to be downloaded, and files have any size
        with contextlib.nullcontext() if name in ("load", "damage", "copy_snapshot") else rank.ranks.progress.working():
            _obey(rank, name, arguments)


def _obey(rank: TrainerRank, name: str, arguments: Sequence[Any]) -> None:
    _, *parameters = inspect.signature(_COMMANDS[name], eval_str=True).parameters.values()
    typed = [msgspec.convert(value, p.annotation) for value, p in zip(arguments, parameters, strict=True)]
    with contextlib.suppress(BatchRejected):  # rank 0 gives the batch back
        result = getattr(rank, name)(*typed)
        if isinstance(result, Iterator):
            collections.deque(result, maxlen=0)  # run it to its end


def check_reservation(reservation: Reservation, groups: Sequence[Group], prompts_per_step: int) -> None:
    """Check law 3 on a reservation: P groups, each with n trajectories of distinct indices, in order. Raises `ServiceError`."""
    if len(reservation.groups) != prompts_per_step or len(set(reservation.groups)) != prompts_per_step:
        raise ServiceError(
            f"step {reservation.step}: {len(reservation.groups)} groups were reserved, not {prompts_per_step} different ones "
            "(law 3)"
        )
    expected = [group.id for group in groups for _ in range(group.n)]
    found = [(t.group_id, t.index) for t in reservation.trajectories]
    if [group_id for group_id, _ in found] != expected or len(set(found)) != len(found):
        raise ServiceError(
            f"step {reservation.step}: the reserved trajectories are not those of complete groups (law 3)"
        )


def shard_batch(reservation: Reservation, config: Config, ranks: int) -> list[list[int]]:
    """Return the places in the batch that each rank gets, with about equally many policy tokens in every optimizer step. (How long an
    episode's other tokens are is known only once it has been read.)

    With `policy.share_prompts` a group's trajectories in an optimizer step go to one rank, so that they can share their prompt.
    """
    batch, size = reservation.trajectories, config.policy_batch
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for first in range(0, len(batch), size):
        mini_batch = batch[first : first + size]
        lengths = [trajectory.length for trajectory in mini_batch]
        if config.policy.share_prompts:
            split = split_groups(lengths, [trajectory.group_id for trajectory in mini_batch], ranks)
        else:
            split = split_evenly(lengths, ranks)
        for share, indices in zip(shares, split, strict=True):
            share.extend(first + index for index in indices)
    return shares


def split_groups(lengths: Sequence[int], groups: Sequence[str], ranks: int) -> list[list[int]]:
    """Return the indices for each rank. Each group goes to one rank: the longest group first, to the rank with the fewest tokens so far."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for own in sorted(members.values(), key=lambda own: -sum(lengths[i] for i in own)):
        rank = loads.index(min(loads))
        shares[rank].extend(own)
        loads[rank] += sum(lengths[i] for i in own)
    return [sorted(share) for share in shares]


def split_evenly(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices for each rank, dealt longest first, back and forth. The counts differ by at most one."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(index)
    return [sorted(share) for share in shares]
