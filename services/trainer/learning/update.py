"""Optimizer steps of a model over the mini-batches of a batch, and the metrics of all of them together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from headrace.errors import ServiceError
from services.trainer.learning.experience import Trace
from services.trainer.learning.losses import MetricNames
from services.trainer.learning.optimizer import Trained
from services.trainer.learning.passes import LossOf, Passes, Totals
from services.trainer.learning.tokens import GlobalCounts
from services.trainer.learning.world import World


@dataclasses.dataclass(frozen=True)
class Moved:
    """One optimizer step: its metrics, the 2-norm of its gradients before they were clipped, and its rate."""

    totals: Totals
    grad_norm: float
    lr: float


class NotFinite(ServiceError):
    """A loss or gradient that is not finite. The optimizer step it is of was not taken; those before it in the same trainer step were."""


@dataclasses.dataclass(frozen=True)
class Update:
    """What optimizer steps of one model are made with. `model` is what messages call it; `version` the trainer step."""

    world: World
    passes: Passes
    trained: Trained
    names: MetricNames
    traces: Sequence[Trace]
    model: str
    version: int

    def move(self, chosen: Sequence[int], loss: LossOf) -> Moved:
        """A collective: one optimizer step on the `chosen` sequences of all ranks.

        Raises `NotFinite` naming the trajectories that cause it, with weights and optimizer as they were before this call.
        """
        totals = self.passes.backward(chosen, self.names, loss)
        norm = self.trained.norm()
        if not (math.isfinite(totals.sums["loss"]) and math.isfinite(norm)):
            self.trained.forget()
            raise self._diagnosis(chosen, loss, totals.sums["loss"], norm)
        lr = self.trained.lr
        self.trained.move(norm)
        return Moved(totals, norm, lr)

    def _diagnosis(self, chosen: Sequence[int], loss: LossOf, value: float, norm: float) -> NotFinite:
        """Find out which trajectories do it, one backward pass each."""
        guilty = []
        for rank, names in enumerate(self.world.gather([self.traces[i].experience.name for i in chosen])):
            for turn, name in enumerate(names):
                index = chosen[turn] if rank == self.world.rank else None
                alone = self.passes.backward_alone(index, self.names, loss)
                if not (math.isfinite(alone.sums["loss"]) and math.isfinite(self.trained.norm())):
                    guilty.append(name)
                self.trained.forget()
        return NotFinite(
            f"step {self.version}: loss {value} and gradient norm {norm} of the {self.model} model are not both finite, because of "
            f"{', '.join(guilty) or 'no trajectory alone'}; no step was taken with them. Look at these trajectories' "
            f"log-probabilities, or lower {self.model}.optimizer.kwargs.lr and start again from the last checkpoint"
        )


def counts_of(world: World, traces: Sequence[Trace], mini_batches: Sequence[Sequence[int]]) -> list[GlobalCounts]:
    """A collective: of each mini-batch, over all ranks."""
    own = []
    for chosen in mini_batches:
        here = [traces[i] for i in chosen if traces[i].experience.tokens.policy_tokens]
        tokens = [float(trace.experience.mask.sum()) * trace.multiplier for trace in here]
        positive = sum(t for t, trace in zip(tokens, here, strict=True) if trace.reward > 0)
        own += [sum(tokens), sum(trace.multiplier for trace in here), positive]
    whole = iter(world.sums(own))
    return [GlobalCounts(*three) for three in zip(whole, whole, whole, strict=True)]


def summary(moves: Sequence[Moved]) -> dict[str, float]:
    """Metrics of several optimizer steps: means, but the least of minima and the greatest of maxima; these are -1 where no
    token counted, as in NeMo RL."""
    metrics = {
        name: sum(move.totals.sums[name] for move in moves) / len(moves) for name in sorted(moves[0].totals.sums)
    }
    for name in sorted(moves[0].totals.minima):
        metrics[name] = _or_none(min(move.totals.minima[name] for move in moves))
    for name in sorted(moves[0].totals.maxima):
        metrics[name] = _or_none(max(move.totals.maxima[name] for move in moves))
    metrics["grad_norm"] = sum(move.grad_norm for move in moves) / len(moves)
    metrics["lr"] = sum(move.lr for move in moves) / len(moves)
    return metrics


def _or_none(extreme: float) -> float:
    return extreme if math.isfinite(extreme) else -1.0
