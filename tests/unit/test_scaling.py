"""How many replicas a pipeline wants: bounds, what is no evidence, and that it comes to rest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.run.balance import Balance, Workload, propose_replicas, simulate
from headrace.run.scaling import Look, StepTime, Tried, Wanted, decide

LOOK = Look(replicas=2, open=10, waiting=0, finished=20, admitted=48, prompts=16)


def steps(count: int, waited_s: float, total_s: float = 10.0, first: int = 0) -> list[StepTime]:
    return [StepTime(first + step, total_s, waited_s) for step in range(count)]


def follow(look: Look, times: Sequence[StepTime], before: Wanted | None = None, **bounds: Any) -> Wanted:
    """Look once after each of these steps."""
    wanted = decide(dataclasses.replace(look, steps=[]), before, **bounds)
    for count in range(1, len(times) + 1):
        wanted = decide(dataclasses.replace(look, steps=times[:count]), wanted, **bounds)
    return wanted


def test_a_trainer_that_waits_gets_as_many_replicas_as_keep_pace() -> None:
    assert follow(LOOK, steps(1, 5.0)).replicas == 2
    assert follow(LOOK, steps(4, 5.0)).replicas == 4
    assert follow(LOOK, steps(4, 0.5)).replicas == 2


def test_a_trainer_with_finished_batches_gets_one_replica_less() -> None:
    assert follow(LOOK, steps(2, 0.0)).replicas == 2
    calm = follow(LOOK, steps(4, 0.0))
    assert calm.replicas == 1
    # until it is gone, and then the last one stays
    assert follow(LOOK, steps(9, 0.0)).replicas == 1
    assert follow(dataclasses.replace(LOOK, replicas=1), steps(9, 0.0, first=9), calm).replicas == 1


def test_a_large_fleet_loses_as_many_as_an_autoscaler_follows() -> None:
    """A HorizontalPodAutoscaler changes nothing where the ratio is within a tenth of one."""
    for fleet in (2, 9, 10, 20, 99):
        left = follow(dataclasses.replace(LOOK, replicas=fleet, admitted=200), steps(4, 0.0)).replicas
        assert left < 0.9 * fleet
        assert left >= 0.8 * fleet - 1


def test_a_fleet_that_is_still_growing_can_lose_a_replica() -> None:
    """The autoscaler's own bound is three, and training has become slower."""
    raised = follow(LOOK, steps(4, 7.5))
    assert raised.replicas == 8
    bounded = dataclasses.replace(LOOK, replicas=3)
    assert follow(bounded, steps(9, 0.0, 14.0, first=4), raised).replicas == 2


@pytest.mark.parametrize("changes", [{"finished": 15}, {"waiting": 1}, {"validating": 1}])
def test_a_busy_fleet_stays(changes: dict[str, int]) -> None:
    """Too little is finished, something waits to be generated, or a validation is."""
    assert follow(dataclasses.replace(LOOK, **changes), steps(9, 0.0)).replicas == 2


def test_only_a_new_step_is_evidence() -> None:
    """A trainer that is paused, saves or validates, or that has gone, takes none."""
    times = [*steps(1, 1.0), *steps(2, 0.0, first=1)]
    seen = follow(LOOK, times)
    for _ in range(20):
        seen = decide(dataclasses.replace(LOOK, steps=times), seen)
    assert seen.replicas == 2
    assert decide(dataclasses.replace(LOOK, steps=[*times, *steps(1, 0.0, first=3)]), seen).replicas == 1


def test_steps_of_another_fleet_are_no_evidence() -> None:
    """Else four replicas that have just come would be doubled for the waits of two."""
    raised = follow(LOOK, steps(4, 5.0))
    more = dataclasses.replace(LOOK, replicas=4, finished=0)
    times = [*steps(5, 5.0), *steps(5, 0.0, 5.0, first=5)]
    for count in range(4, len(times) + 1):
        raised = decide(dataclasses.replace(more, steps=times[:count]), raised)
        assert raised.replicas == 4


def test_replicas_that_do_not_help_are_given_back() -> None:
    raised = follow(LOOK, steps(4, 5.0))
    more = follow(dataclasses.replace(LOOK, replicas=4), steps(9, 5.0, first=4), raised)
    assert (more.replicas, more.enough) == (2, Tried(2, 10.0))
    back = follow(LOOK, steps(9, 5.0, first=20), more)
    assert back.replicas == 2
    # generation has become slower
    assert follow(LOOK, steps(9, 15.0, 20.0, first=40), back).replicas == 8


def test_a_number_that_was_too_few_is_not_tried_again() -> None:
    raised = follow(LOOK, steps(4, 3.0))
    assert raised.replicas == 3
    three = dataclasses.replace(LOOK, replicas=3)
    enough = follow(three, steps(9, 0.0, 7.0, first=4), raised)
    assert enough.replicas == 3
    # training has become slower
    assert follow(three, steps(9, 0.0, 14.0, first=20), enough).replicas == 2


def test_nothing_is_wanted_at_the_end_of_the_data() -> None:
    """But the trainer needs a replica until its last groups are in a checkpoint: it ends a run whose fleet is gone."""
    end = dataclasses.replace(LOOK, open=0, finished=0, closed=True)
    assert decide(dataclasses.replace(end, finished=3)).replicas == 1
    assert decide(dataclasses.replace(end, training=3)).replicas == 1
    assert decide(end).replicas == 0
    assert decide(end, least=1).replicas == 1
    assert decide(dataclasses.replace(end, open=1)).replicas == 1
    assert decide(dataclasses.replace(end, validating=5), Wanted(4, fleet=2)).replicas == 4


def test_a_fleet_that_is_gone_is_wanted_back() -> None:
    gone = dataclasses.replace(LOOK, replicas=0, open=0, waiting=10)
    assert decide(gone).replicas == 1
    assert follow(gone, steps(5, 9.0)).replicas == 1


def test_a_rewind_takes_back_what_was_seen() -> None:
    seen = follow(LOOK, steps(2, 0.0))
    assert (seen.seen, seen.calm) == (1, 2)
    rewound = decide(dataclasses.replace(LOOK, steps=steps(1, 0.0)), seen)
    assert (rewound.seen, rewound.calm) == (0, 0)


looks = st.builds(
    Look,
    replicas=st.integers(0, 12),
    open=st.integers(0, 40),
    waiting=st.integers(0, 40),
    finished=st.integers(0, 40),
    admitted=st.integers(1, 60),
    prompts=st.integers(1, 20),
    validating=st.integers(0, 10),
    closed=st.booleans(),
    steps=st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 1)), max_size=12).map(
        lambda times: [StepTime(step, total, total * share) for step, (total, share) in enumerate(times)]
    ),
)
tried = st.builds(Tried, st.integers(0, 12), st.floats(0, 100))
before = st.none() | st.builds(
    Wanted,
    st.integers(0, 12),
    st.integers(-1, 12),
    st.integers(0, 12),
    st.integers(-1, 12),
    st.integers(0, 4),
    tried,
    tried,
    tried,
)


@given(looks, before, st.integers(0, 4), st.none() | st.integers(4, 8))
def test_it_stays_within_its_bounds(look: Look, wanted: Wanted | None, least: int, most: int | None) -> None:
    found = decide(look, wanted, least, most)
    assert least <= found.replicas <= max(least, 8 if most is None else most) or most is None
    assert found == decide(look, wanted, least, most)
    if look.open + look.waiting + look.validating and most != 0:
        assert found.replicas >= 1


@given(looks, before, st.integers(0, 40))
def test_more_that_waits_never_wants_fewer(look: Look, wanted: Wanted | None, more: int) -> None:
    longer = dataclasses.replace(look, waiting=look.waiting + more)
    assert decide(longer, wanted).replicas >= decide(look, wanted).replicas


@pytest.mark.parametrize("begun", [1, 12])
@pytest.mark.parametrize(
    "changes",
    [
        {"age": 6},
        {"age": 6, "training_s": 8.0},
        {"age": 0},
        {"age": 1},
        {"age": 4, "scoring_s": 3.0, "scoring_places": 4},
    ],
    ids=["fast training", "slow training", "age 0", "age 1", "slow scores"],
)
def test_a_constant_load_comes_to_rest(begun: int, changes: dict[str, Any]) -> None:
    """It turns round a few times at most while it looks for its number, then never, and the trainer is about as busy as it can be."""
    keys = {"prompts": 8, "lengths": [(10.0,)], "token_s": 1.0, "training_s": 4.0, "places": 2, "replicas": begun}
    load = Workload(**{**keys, **changes})

    @functools.cache
    def run(replicas: int) -> Balance:
        return simulate(dataclasses.replace(load, replicas=replicas), steps=8)

    wanted, history, times = None, [begun], list[StepTime]()
    for step in range(120):
        found = run(history[-1])
        waited_s = 0.0 if load.scoring_places else found.step_s * (1 - found.busy)
        times = [*times, StepTime(step, found.step_s, waited_s)][-8:]
        ahead = 2 * load.prompts if waited_s < 0.01 else 0
        look = Look(history[-1], load.prompts, 0, ahead, load.prompts * (load.age + 1), load.prompts, steps=times)
        wanted = decide(look, wanted)
        history.append(wanted.replicas)
    assert len(set(history[60:])) == 1, history
    if not load.scoring_places:
        assert run(history[-1]).step_s <= run(propose_replicas(load).replicas).step_s * 1.2
