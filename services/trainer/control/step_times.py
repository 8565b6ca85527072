"""Which part of a step's time each of the loop's actions goes into."""

from __future__ import annotations

from collections.abc import Mapping

from services.trainer.control.decisions import Action
from services.trainer.telemetry.throughput import StepTimes


def step_times(spent: Mapping[Action, float], total: float, training: float, learner: Mapping[str, float]) -> StepTimes:
    """Where the `total` seconds of a step went: `training` took so many, of which `learner` has the parts, and each of the loop's
    other actions what `spent` says."""

    def over(*actions: Action) -> float:
        return sum(spent.get(action, 0.0) for action in actions)

    return StepTimes(
        total=total,
        training=training,
        learner=learner,
        buffer_starvation=over(Action.WAIT, Action.RESERVE),
        refit_bubble=over(Action.REFIT),
        validation=over(Action.AWAIT_VALIDATION, Action.VALIDATE, Action.ABANDON_VALIDATION),
        checkpoint=over(Action.CHECKPOINT),
    )
