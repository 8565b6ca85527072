"""Recomputes a trained step from the checkpoint it started from and the trajectories that the buffer retained.

A step draws no random numbers, so the recomputed values equal the logged ones up to rounding. A difference means that the checkpoint, the
trajectories, the configuration or the program are not those that the step was trained with.
"""

from __future__ import annotations

import dataclasses

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.replay import ReplayClient, Reservation
from headrace.run.journal import JOURNAL, Line, read_journal, surviving
from headrace.run.lineage import FOLDER, LineageFiles

from .control.checkpoint import Checkpoints
from .control.rank import TrainerRank, check_reservation
from .distributed.ranks import Ranks

COMPARED = ("loss", "grad_norm", "critic/loss", "critic/grad_norm", "reward")
# Differences are relative to the logged value, but at least to this: the loss of an on-policy step is about 0.
SMALLEST = 0.01


@dataclasses.dataclass(frozen=True)
class ReplayedStep:
    """The result of a replay. `values` has (name, logged value, recomputed value) of each of `COMPARED` that the step has."""

    step: int
    weights: str
    groups: int
    trajectories: int
    values: tuple[tuple[str, float, float], ...]

    def differing(self, tolerance: float) -> list[str]:
        return [
            name for name, logged, now in self.values if not abs(now - logged) <= tolerance * max(abs(logged), SMALLEST)
        ]


async def main(config: Config, replay: ReplayClient, step: int) -> ReplayedStep:
    """Recompute step `step`. Raises `ServiceError` that names what is missing and which steps can be replayed."""
    checkpoints = Checkpoints(config.checkpoint_folder, config.checkpointing)
    lines = {line.step: line for line in surviving(read_journal(config.run_folder / JOURNAL)) if line.kind == "train"}
    held, reservation = await replay.read_held_batch(step)
    # version 0 is the initial model, which needs no checkpoint
    versions = {0, *checkpoints.find_published()}
    if reservation is None or step not in lines or step not in versions:
        raise ServiceError(_missing(step, set(held), set(lines), versions))
    _check_history(config, lines[step], reservation)
    groups = await replay.read_groups(reservation.groups)
    check_reservation(reservation, groups, config.algorithm.num_prompts_per_step)
    keys = [t.key for t in reservation.trajectories]
    payloads = dict(zip(keys, await replay.read(keys), strict=True))
    checkpoint = checkpoints.path(step) if step in checkpoints.find_published() else None
    rank = TrainerRank(config, Ranks(), lambda keys: [payloads[key] for key in keys])
    rank.load(None if checkpoint is None else str(checkpoint))
    now = rank.step(reservation, [group.loss_multiplier for group in groups], [list(range(len(keys)))]).metrics
    logged = lines[step].metrics
    return ReplayedStep(
        step=step,
        weights=str(checkpoint or config.policy.model_name),
        groups=len(groups),
        trajectories=len(keys),
        values=tuple((name, logged[name], now[name]) for name in COMPARED if name in logged),
    )


def _missing(step: int, held: set[int], logged: set[int], versions: set[int]) -> str:
    if step not in logged:
        why = f"step {step} is not one of the steps that led to the newest weights"
    elif step not in held:
        why = f"the buffer no longer holds the trajectories of step {step} (it keeps those of the newest replay.retain_steps steps)"
    else:
        why = f"there is no checkpoint of version {step}, the weights that step {step} started from (see checkpointing.save_period)"
    replayable = sorted(held & logged & versions)
    return f"{why}; steps that can be replayed: {', '.join(map(str, replayable)) or 'none'}"


def _check_history(config: Config, line: Line, reservation: Reservation) -> None:
    """Raise `ServiceError` unless the logged and the held step are the same."""
    trained = LineageFiles(config.checkpoint_folder / FOLDER).read(line.step)
    if [group.group for group in trained] != list(reservation.groups) or trained[0].timeline != line.timeline:
        raise ServiceError(
            f"step {line.step} was trained on timeline {line.timeline}, and the buffer holds another batch of that step, because of a "
            "rewind. Resume the run, and the step is trained again"
        )
