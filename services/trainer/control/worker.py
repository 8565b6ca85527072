"""What every rank does with torch: load, step, probe, give its part of the weights, save.

Rank 0's `Lead` tells the others before it does a thing itself, so that all ranks enter the same collective; each rank reads
its own trajectories from the buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.config import Config
from headrace.errors import HeadraceError, ServiceError
from headrace.lineage import Origin, origin_of
from headrace.trajectory import Float32, Score, Trajectory
from services.trainer.control.laws import law_broken
from services.trainer.control.ranks import Ranks
from services.trainer.control.shares import Assignment
from services.trainer.learning.experience import Experience, Trace, experience_of
from services.trainer.learning.learner import Learner
from services.trainer.telemetry.samples import TrainingSample, sample_of

Read = Callable[[Sequence[str]], list[tuple[Trajectory, Score]]]


class Worker:
    """One rank. `read` fetches payloads from the buffer; every other method is a collective of all ranks."""

    def __init__(self, config: Config, ranks: Ranks, read: Read) -> None:
        self._config = config
        self._ranks = ranks
        self._read = read
        self._learner: Learner | None = None
        self._newest: list[tuple[Trajectory, Score]] = []
        self._origins: list[tuple[str, Origin]] = []  # of this rank's share of the newest step

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            raise ServiceError("the trainer was asked to work before it had loaded its model")
        return self._learner

    @property
    def ranks(self) -> int:
        return self._ranks.size

    def load(self, checkpoint: str | None) -> None:
        self._learner = Learner(self._config, Path(checkpoint) if checkpoint else None)

    def step(self, step: int, shares: Sequence[Sequence[Assignment]]) -> dict[str, float]:
        """Train on the batch; the learner's metrics, and `truncated`: completions that were cut off at the length limit,
        `masked_tokens`: tokens of the policy that were over age."""
        problem: str | None = None
        batch: list[Experience] = []
        try:
            self._origins, batch = self._experiences(step, shares[self._ranks.rank])
        except HeadraceError as error:
            problem = str(error) or type(error).__name__
        self._ranks.agree(problem)  # one that went on alone would wait for the others for ever
        metrics = self.learner.step(batch)
        truncated = float(sum(e.truncated for e in batch))
        masked = float(sum(np.count_nonzero(~e.mask) for e in batch))
        all_truncated, all_masked = self._ranks.sum([truncated, masked])
        return {**metrics, "truncated": all_truncated, "masked_tokens": all_masked}

    @property
    def traces(self) -> list[Trace]:
        """What the newest step knew of each token of this rank's trajectories."""
        return self.learner.traces

    def origins(self) -> dict[str, list[Origin]]:
        """Where the trajectories of the newest step come from, by group; on rank 0 those of all ranks, elsewhere the rank's own.

        The advantage of one is the mean over its tokens.
        """
        own = [
            (group_id, dataclasses.replace(origin, advantage=trace.mean_advantage))
            for (group_id, origin), trace in zip(self._origins, self.traces, strict=True)
        ]
        by_group: dict[str, list[Origin]] = {}
        for group_id, origin in (pair for share in self._ranks.gather(own) for pair in share):
            by_group.setdefault(group_id, []).append(origin)
        return by_group

    def samples(self) -> list[TrainingSample]:
        """What the newest step trained on, token by token; on rank 0 that of all ranks, elsewhere the rank's own."""
        own = [
            sample_of(trajectory, score, trace)
            for (trajectory, score), trace in zip(self._newest, self.traces, strict=True)
        ]
        return [sample for share in self._ranks.gather(own) for sample in share]

    def probe(self, token_ids: Sequence[int]) -> Float32:
        return self.learner.probe(np.asarray(token_ids, dtype=np.int32))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.learner.iter_weights()

    def save(self, folder: str) -> None:
        self.learner.save(Path(folder))

    def _experiences(self, step: int, share: Sequence[Assignment]) -> tuple[list[tuple[str, Origin]], list[Experience]]:
        """This rank's share: where each trajectory comes from, and what is trained on."""
        max_age, policy = self._config.algorithm.max_age, self._config.algorithm.asynchrony.staleness_policy
        read = self._newest = self._read([assignment.key for assignment in share])
        origins, batch = [], []
        for assignment, (trajectory, score) in zip(share, read, strict=True):
            broken = law_broken(assignment, trajectory, score, step, max_age, policy)
            if broken is not None:
                raise ServiceError(broken)
            origins.append((assignment.group_id, origin_of(trajectory, score)))
            batch.append(
                experience_of(
                    trajectory,
                    score,
                    group=assignment.group,
                    place=assignment.place,
                    step=step,
                    max_age=max_age,  # under the policies but `mask` no token is over it
                    multiplier=assignment.loss_multiplier,
                )
            )
        return origins, batch


class Lead(Worker):
    """Rank 0: every method has the other ranks do the same. Blocking; call it from one thread at a time."""

    def load(self, checkpoint: str | None) -> None:
        self._tell("load", checkpoint)
        super().load(checkpoint)

    def step(self, step: int, shares: Sequence[Sequence[Assignment]]) -> dict[str, float]:
        self._tell("step", step, [[dataclasses.astuple(a) for a in share] for share in shares])
        return super().step(step, shares)

    def origins(self) -> dict[str, list[Origin]]:
        self._tell("origins")
        return super().origins()

    def samples(self) -> list[TrainingSample]:
        self._tell("samples")
        return super().samples()

    def probe(self, token_ids: Sequence[int]) -> Float32:
        self._tell("probe", list(map(int, token_ids)))
        return super().probe(token_ids)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._tell("weights")
        yield from super().weights()

    def save(self, folder: str) -> None:
        self._tell("save", folder)
        super().save(folder)

    def _tell(self, do: str, *arguments: Any) -> None:
        self._ranks.tell({"do": do, "arguments": list(arguments)})


class Weights:
    """The policy's weights as the weight channel takes them: run to the end each time, all ranks taking part."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    def metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return self._lead.learner.weight_metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._lead.weights()


def dismiss(ranks: Ranks) -> None:
    """Rank 0: the other ranks' work is over."""
    ranks.tell({"do": "dismiss", "arguments": []})


def follow(worker: Worker, ranks: Ranks) -> None:
    """Ranks above 0: do what rank 0 tells until it dismisses them."""
    while True:
        command = ranks.listen()
        arguments = command["arguments"]
        match command["do"]:
            case "load":
                worker.load(*arguments)
            case "step":
                step, shares = arguments
                worker.step(step, [[Assignment(*fields) for fields in share] for share in shares])
            case "origins":
                worker.origins()
            case "samples":
                worker.samples()
            case "probe":
                worker.probe(*arguments)
            case "weights":
                for _ in worker.weights():
                    continue
            case "save":
                worker.save(*arguments)
            case "dismiss":
                return
            case unknown:
                raise ServiceError(
                    f"rank 0 sent {unknown!r}, which this build does not know; start all ranks from one build"
                )
