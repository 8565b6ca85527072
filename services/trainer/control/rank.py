"""The work of each trainer rank: load, step, probe, gather weights, save. A thread of each writes what is saved; it enters no collective.

Rank 0's `LeadRank` sends each command to the others before it acts itself, so that all ranks enter the same collective. Each rank reads
its own trajectories from the buffer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.config import Config
from headrace.errors import CodecError, HeadraceError, ServiceError
from headrace.lineage import Origin, origin_of
from headrace.replay import Reservation
from headrace.trajectory import AnyTrajectory, Float32, Group, Score
from headrace.weights.probe import rollout_dtype
from headrace_services.trainer.distributed import Ranks
from headrace_services.trainer.learning.batch import Batch, BatchRejected, check_invariants, gather, reject_any
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.telemetry.alarm import ReplicaDisagreement, error_by_replica, merged
from headrace_services.trainer.telemetry.metrics import Extent, Scored

Read = Callable[[Sequence[str]], list[tuple[AnyTrajectory, Score] | CodecError]]


class TrainerRank:
    """One rank. `read` fetches payloads from the buffer; every other method is a collective of all ranks."""

    def __init__(self, config: Config, ranks: Ranks, read: Read) -> None:
        self.ranks = ranks
        self._config = config
        self._read = read
        self._learner: Learner | None = None
        self._batch: Batch | None = None  # of the newest step
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._part: Future[None] | None = None

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            raise ServiceError("the trainer was asked to work before it had loaded its model")
        return self._learner

    @property
    def batch(self) -> Batch:
        """This rank's trajectories of the newest step, with all columns that the step added."""
        assert self._batch is not None
        return self._batch

    def load(self, checkpoint: str | None) -> None:
        self._learner = Learner(self._config, Path(checkpoint) if checkpoint else None, self.ranks)

    def step(
        self, reservation: Reservation, multipliers: Sequence[float], shares: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        """Train on the reserved batch. `multipliers` are the groups' weights in the loss, `shares` each rank's places in the batch.

        Returns the metrics of `train_step`, plus `truncated`, the number of completions cut off at the length limit, and
        `masked_tokens`, the number of policy tokens over age. Raises `BatchRejected` on every rank if what any rank read
        can't be trained on.
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
        return {**metrics, "truncated": truncated, "masked_tokens": masked}

    def origins(self) -> dict[str, list[Origin]]:
        """The origins of the newest step's trajectories, by group id: on rank 0 those of all ranks, elsewhere the rank's own.

        The advantage of a trajectory is the mean over its tokens.
        """
        batch = self.batch
        own = [
            (trajectory.group_id, dataclasses.replace(origin_of(trajectory, score), advantage=advantage))
            for trajectory, score, advantage in zip(
                batch.trajectories, batch.scores, batch.mean_advantages(), strict=True
            )
        ]
        by_group: dict[str, list[Origin]] = {}
        for group_id, origin in (pair for share in self.ranks.gather(own, list[tuple[str, Origin]]) for pair in share):
            by_group.setdefault(group_id, []).append(origin)
        return by_group

    def scored(self) -> list[Scored]:
        """What the environments said of the newest step's trajectories: on rank 0 of all of them, in the batch's order, elsewhere of the
        rank's own."""
        batch = self.batch
        own = [(int(p), s.components, s.timings) for p, s in zip(batch.places, batch.scores, strict=True)]
        shares = self.ranks.gather(own, list[tuple[int, dict[str, float], dict[str, float]]])
        everyone = sorted((one for share in shares for one in share), key=lambda one: one[0])
        return [Scored(components, timings) for _, components, timings in everyone]

    def extents(self) -> list[Extent]:
        """How much of a model the newest step's trajectories take: on rank 0 of all of them, in the batch's order, elsewhere of the rank's
        own."""
        batch = self.batch
        own = [
            (int(place), Extent.of(trajectory, [batch.paths[path] for path in batch.paths_of([i])]))
            for i, (place, trajectory) in enumerate(zip(batch.places, batch.trajectories, strict=True))
        ]
        shares = self.ranks.gather(own, list[tuple[int, Extent]])
        return [extent for _, extent in sorted(one for share in shares for one in share)]

    def error_by_replica(self) -> dict[str, ReplicaDisagreement]:
        """How far the log-probabilities of each replica are from the trainer's, in the newest step: on rank 0 of the whole batch, elsewhere
        of the rank's own."""
        own = error_by_replica(self.batch)
        return merged(self.ranks.gather(own, dict[str, ReplicaDisagreement]))

    def gather_batch(self) -> Batch:
        """On rank 0 the whole batch of the newest step with all its columns, elsewhere the rank's own."""
        return gather(self.batch, self.ranks)

    def probe(self, token_ids: Sequence[int]) -> Float32:
        return self.learner.probe(np.asarray(token_ids, dtype=np.int32))

    def weights(self, adapter_alone: bool) -> Iterator[tuple[str, torch.Tensor]]:
        gathered_in = getattr(torch, rollout_dtype(self._config))
        for weight in self.learner.iter_weights(gathered_in, adapter_alone=adapter_alone):
            self.ranks.progress.mark()
            yield weight

    @property
    def part(self) -> Future[None]:
        """This rank's part of the checkpoint that was saved last; done once it is written."""
        assert self._part is not None
        return self._part

    def save(self, folder: str) -> None:
        """Take a snapshot, and begin to write it to `folder`. The one before has been written (`saved`)."""
        self._part = self._writer.submit(self.learner.snapshot().write, Path(folder))

    def saved(self) -> bool:
        """Whether every rank has written its part. Raises `ServiceError` on every rank if any can't."""
        done = self.part.done()
        failed = self.part.exception() if done else None
        if failed is not None and not isinstance(failed, ServiceError):
            raise failed
        self.ranks.raise_any([] if failed is None else [str(failed)])
        return all(self.ranks.all_gather(done, bool))


class LeadRank(TrainerRank):
    """Rank 0: each method first makes the other ranks do the same. It blocks; call it from one thread at a time."""

    def load(self, checkpoint: str | None) -> None:
        self._send("load", checkpoint)
        super().load(checkpoint)

    def step(
        self, reservation: Reservation, multipliers: Sequence[float], shares: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        self._send("step", msgspec.to_builtins(reservation), list(multipliers), shares)
        return super().step(reservation, multipliers, shares)

    def origins(self) -> dict[str, list[Origin]]:
        self._send("origins")
        return super().origins()

    def scored(self) -> list[Scored]:
        self._send("scored")
        return super().scored()

    def extents(self) -> list[Extent]:
        self._send("extents")
        return super().extents()

    def error_by_replica(self) -> dict[str, ReplicaDisagreement]:
        self._send("error_by_replica")
        return super().error_by_replica()

    def gather_batch(self) -> Batch:
        self._send("gather_batch")
        return super().gather_batch()

    def probe(self, token_ids: Sequence[int]) -> Float32:
        self._send("probe", list(map(int, token_ids)))
        return super().probe(token_ids)

    def weights(self, adapter_alone: bool) -> Iterator[tuple[str, torch.Tensor]]:
        self._send("weights", adapter_alone)
        yield from super().weights(adapter_alone)

    def save(self, folder: str) -> None:
        self._send("save", folder)
        super().save(folder)

    def saved(self) -> bool:
        if not self.part.done():
            return False
        self._send("saved")
        return super().saved()

    def _send(self, do: str, *arguments: Any) -> None:
        self.ranks.send(msgspec.msgpack.encode([do, *arguments]))


class Weights:
    """The policy's weights, or its adapter alone, as a source for the weight channel. Each iteration is a collective and must run to its
    end."""

    def __init__(self, lead: LeadRank, *, adapter_alone: bool = False) -> None:
        self._lead = lead
        self._adapter_alone = adapter_alone

    def metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return self._lead.learner.weight_metadata(adapter_alone=self._adapter_alone)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._lead.ranks.progress.working():
            yield from self._lead.weights(self._adapter_alone)


def dismiss(ranks: Ranks) -> None:
    """Rank 0: end the work of the other ranks."""
    ranks.send(msgspec.msgpack.encode(["dismiss"]))


def follow(rank: TrainerRank) -> None:
    """Ranks above 0: carry out rank 0's commands until it dismisses them."""
    while True:
        match msgspec.msgpack.decode(rank.ranks.receive()):
            case ["load", checkpoint]:  # as long as it takes: a model may have to be downloaded
                rank.load(checkpoint)
            case ["dismiss"]:
                return
            case command:
                with rank.ranks.progress.working():
                    _obey(rank, command)


def _obey(rank: TrainerRank, command: list[Any]) -> None:
    match command:
        case ["step", reservation, multipliers, shares]:
            with contextlib.suppress(BatchRejected):  # rank 0 gives the batch back
                rank.step(msgspec.convert(reservation, Reservation), multipliers, shares)
        case ["weights", adapter_alone]:
            for _ in rank.weights(adapter_alone):
                continue
        case [
            ("origins" | "scored" | "extents" | "error_by_replica" | "gather_batch" | "probe" | "save" | "saved") as do,
            *arguments,
        ]:
            getattr(rank, do)(*arguments)
        case unknown:
            raise ServiceError(
                f"rank 0 sent {unknown!r}, which this build does not know; start all ranks from one build"
            )


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
    """The places in the batch that each rank gets: in every optimizer step, about equally many tokens that the policy wrote. (What else the
    episodes hold, the ranks know once they have read them.)

    With `policy.share_prompts` the trajectories of a group in an optimizer step go to one rank, so that they can share their prompt.
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
    """Indices for each rank, with each of the `groups` on one rank: the longest group first, each to the rank with the fewest tokens."""
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
    """Indices for each rank, dealt longest first, back and forth; the counts differ by at most one."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(index)
    return [sorted(share) for share in shares]
