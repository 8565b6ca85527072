"""Where the loop's time goes: every action into one part of the step."""

from __future__ import annotations

import pytest

from headrace_services.trainer.control.decisions import Action, share_in_scoring
from headrace_services.trainer.control.recorder import step_times
from headrace_services.trainer.telemetry.throughput import StepTimes

# Training is timed by itself, and after the others there is no next step.
BETWEEN = [a for a in Action if a not in (Action.TRAIN, Action.STOP, Action.FINISH, Action.FAIL, Action.CONDEMN)]


@pytest.mark.parametrize("action", BETWEEN, ids=lambda action: action.name)
def test_whatever_the_loop_does_between_steps_is_no_upkeep(action: Action) -> None:
    assert step_times({}, 10.0, 5.0, {}, 0.0).upkeep == 5.0
    assert step_times({action: 2.0}, 10.0, 5.0, {}, 0.0).upkeep == 3.0


def test_each_action_goes_into_the_part_of_its_name() -> None:
    spent = {action: 2.0**power for power, action in enumerate(Action)}
    assert step_times(spent, 4096.0, 1024.0, {"policy_training": 512.0}, 0.5) == StepTimes(
        total=4096.0,
        training=1024.0,
        learner={"policy_training": 512.0},
        buffer_starvation=spent[Action.WAIT] + spent[Action.RESERVE],
        refit_bubble=spent[Action.REFIT] + spent[Action.OFFER],
        validation=sum(spent[action] for action in Action if "VALID" in action.name),
        checkpoint=spent[Action.CHECKPOINT] + spent[Action.SNAPSHOT],
        awaiting_scores=0.5,
    )


@pytest.mark.parametrize(
    ("counts", "share"),
    [
        ({}, 0.0),
        ({"queued": 9, "open": 4, "ready": 7}, 0.0),
        ({"queued": 9, "scoring": 4, "ready": 7}, 1.0),
        ({"open": 3, "scoring": 1}, 0.25),
    ],
)
def test_a_wait_is_for_what_the_groups_in_flight_lack(counts: dict[str, int], share: float) -> None:
    assert share_in_scoring(counts) == share
