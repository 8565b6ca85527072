"""What the trainer does next, from where it stands."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Config
from headrace.replay import End, Replica, Reservation, Waiting
from headrace_services.trainer.control.decisions import (
    LAST_BACKOFF_S,
    Action,
    Backoff,
    LoopState,
    Plan,
    behind,
    choose_validators,
    count_verified,
    decide,
    is_hopeless,
    may_work,
    next_backoffs,
    next_streaks,
    refit_due,
)

PLAN = Plan(
    last_version=10,
    save_period=2,
    must_save_by_s=None,
    val_period=5,
    val_start_at=-1,
    val_at_start=False,
    val_at_end=True,
    fleet_deadline_s=30.0,
    validation_deadline_s=20.0,
    max_failed_share=0.2,
)
# at version 3: refitted, waiting for a batch, with two verified replicas
AT_WORK = LoopState(
    now=100.0,
    stop=False,
    version=3,
    saved=False,
    refitted=True,
    validated=False,
    validating=None,
    awaited_since=None,
    members=2,
    healthy=2,
    refit_due=False,
    healthy_at=100.0,
    reply=Waiting(0, 2),
)


def at(**changes: object) -> Action:
    return decide(PLAN, dataclasses.replace(AT_WORK, **changes)).action


def test_a_batch_is_asked_for_then_trained_or_waited_for() -> None:
    assert at(reply=None) is Action.RESERVE
    assert at(reply=Reservation(3, (), ())) is Action.TRAIN
    assert at() is Action.WAIT


def test_a_checkpoint_is_published_before_the_fleet_gets_its_weights() -> None:
    fresh = {"version": 4, "refitted": False, "reply": None}
    assert at(**fresh) is Action.CHECKPOINT
    assert at(**fresh, saved=True) is Action.REFIT


def test_checkpoint_then_snapshot_then_weights_for_the_fleet() -> None:
    fresh = {"refitted": False, "reply": None, "snapshot_due": True}
    assert at(**fresh) is Action.SNAPSHOT
    assert at(**fresh, version=4) is Action.CHECKPOINT
    assert at(snapshot_due=True) is Action.SNAPSHOT  # what was being written before is on the disk
    assert at(snapshot_due=True, stop=True) is Action.CHECKPOINT


def test_a_version_is_offered_between_refit_and_step() -> None:
    assert at(offer_due=True, refitted=False, reply=None) is Action.REFIT
    assert at(offer_due=True, reply=None) is Action.OFFER
    assert at(offer_due=True, reply=Reservation(3, (), ())) is Action.OFFER
    assert at(offer_due=True) is Action.OFFER  # a replica that pulls has come while the trainer waits
    assert at(offer_due=True, version=5, healthy=0, reply=None) is Action.OFFER  # nobody else may be there to validate
    assert at(offer_due=True, stop=True) is Action.CHECKPOINT
    end = {"version": 10, "saved": True, "reply": None, "offer_due": True}
    assert at(**end) is Action.OFFER  # it is validated
    assert at(**end, validated=True) is Action.FINISH


def test_the_initial_model_needs_no_checkpoint() -> None:
    assert at(version=0, refitted=False, reply=None) is Action.REFIT
    assert dataclasses.replace(PLAN, save_period=1).saves(1, final=False)


def test_the_fleet_gets_a_version_before_it_is_validated_or_trained() -> None:
    assert at(version=5, refitted=False, reply=None) is Action.REFIT
    assert at(version=5, reply=None) is Action.VALIDATE
    assert at(version=5, reply=None, validated=True) is Action.RESERVE


def test_law_2_older_weights_are_replaced_before_a_validation() -> None:
    """Those that a replica validated beside training, when this version's refit could not reach it."""
    assert at(version=5, reply=None, refit_due=True) is Action.REFIT


def test_a_due_validation_waits_for_a_fleet_and_holds_the_step_back() -> None:
    assert at(version=5, healthy=0, reply=Reservation(5, (), ())) is Action.WAIT


def test_older_weights_are_not_replaced_while_they_are_validated() -> None:
    running = {"refitted": False, "reply": None, "validating": 2, "awaited_since": None}
    assert at(**running) is Action.AWAIT_VALIDATION
    assert at(**{**running, "validating": 2, "awaited_since": 81.0}) is Action.AWAIT_VALIDATION
    assert at(**{**running, "validating": 2, "awaited_since": 80.0}) is Action.ABANDON_VALIDATION
    assert at(version=5, reply=None, validating=2) is Action.AWAIT_VALIDATION  # one validation at a time


def test_a_validation_whose_fleet_died_is_given_up_at_once() -> None:
    assert at(refitted=False, reply=None, healthy=0, validating=2, awaited_since=None) is Action.ABANDON_VALIDATION


def test_a_validation_whose_fleet_died_waits_for_another_fleet() -> None:
    end = {"version": 10, "saved": True, "validated": True, "validating": 10, "healthy": 0}
    assert at(**end) is Action.WAIT
    assert at(**end, refit_due=True) is Action.REFIT
    assert at(**end, healthy_at=70.0) is Action.FAIL


def test_training_goes_on_while_its_own_version_is_validated() -> None:
    running = {"version": 5, "validated": True, "validating": 5, "awaited_since": None}
    assert at(**running, reply=Reservation(5, (), ())) is Action.TRAIN
    assert at(**running) is Action.WAIT


def test_a_validation_beside_training_holds_up_nothing_but_the_end() -> None:
    beside = {"validating": 2, "validators": 1}
    assert at(**beside, refitted=False, reply=None) is Action.REFIT
    assert at(**beside, reply=None) is Action.RESERVE
    assert at(**beside, reply=Reservation(3, (), ())) is Action.TRAIN
    assert at(**beside, version=5, reply=None) is Action.SKIP_VALIDATION  # one validation at a time
    end = {**beside, "version": 10, "saved": True}
    assert at(**end, refitted=False) is Action.AWAIT_VALIDATION
    assert at(**end) is Action.AWAIT_VALIDATION
    assert at(**end, awaited_since=80.0) is Action.ABANDON_VALIDATION
    assert at(**{**end, "validators": 0}) is Action.ABANDON_VALIDATION


def test_a_validation_ends_with_its_replicas_or_if_no_other_trains() -> None:
    beside = {"validating": 2, "validators": 1}
    assert at(**{**beside, "validators": 0}) is Action.ABANDON_VALIDATION
    assert at(**beside, healthy=0) is Action.ABANDON_VALIDATION
    assert at(**beside, healthy=0, refitted=False) is Action.REFIT  # the others get the newest weights


def test_replicas_behind_are_refitted_while_there_is_no_batch() -> None:
    assert at(refit_due=True) is Action.REFIT
    assert at(refit_due=True, reply=Reservation(3, (), ())) is Action.TRAIN


def test_an_empty_fleet_is_waited_for_up_to_the_deadline() -> None:
    nobody = {"refitted": False, "members": 0, "healthy": 0}
    assert at(**nobody, healthy_at=70.1) is Action.WAIT
    assert at(**nobody, healthy_at=70.0) is Action.FAIL
    assert at(refitted=False, members=1, healthy=0, healthy_at=0.0) is Action.REFIT
    assert at(healthy_at=0.0) is Action.WAIT  # a fleet that is there, however long the look at it took


def test_the_failure_names_the_key_and_the_step() -> None:
    decision = decide(PLAN, dataclasses.replace(AT_WORK, healthy=0, healthy_at=0.0))
    assert decision.action is Action.FAIL
    assert "30 s (trainer.fleet_deadline_s) at step 3" in decision.reason


def test_episodes_that_nobody_runs_are_waited_for_up_to_the_deadline() -> None:
    nobody = {"episodes": 2, "runners": 0}
    assert at(**nobody, runner_at=70.1) is Action.WAIT
    assert at(**nobody, runner_at=70.0) is Action.FAIL
    assert at(**nobody, runner_at=70.0, reply=Reservation(3, (), ())) is Action.TRAIN
    assert at(**{**nobody, "runners": 1}, runner_at=70.0) is Action.WAIT
    assert at(**{**nobody, "episodes": 0}, runner_at=70.0) is Action.WAIT
    reason = decide(PLAN, dataclasses.replace(AT_WORK, **nobody, runner_at=0.0)).reason
    assert "no runner for 30 s (trainer.fleet_deadline_s) at step 3, and 2 groups" in reason


def test_a_validation_of_episodes_that_nobody_runs_ends_the_run() -> None:
    validating = {"refitted": False, "reply": None, "validating": 2, "awaited_since": None, "episodes": 1}
    assert at(**validating, runner_at=70.1) is Action.AWAIT_VALIDATION
    assert at(**validating, runner_at=70.0) is Action.FAIL


@pytest.mark.parametrize(
    "end",
    [
        {"version": 10, "reply": None},
        {"version": 3, "reply": End(unused=1)},
        {"version": 3, "reply": Reservation(3, (), ()), "target_reached": True},
    ],
)
def test_the_end_is_saved_validated_and_then_finished(end: dict[str, object]) -> None:
    assert at(**end, refitted=False) is Action.CHECKPOINT
    assert at(**end, refitted=False, saved=True) is Action.REFIT
    assert at(**end, saved=True) is Action.VALIDATE
    validating = {**end, "saved": True, "validated": True}
    assert at(**validating, validating=end["version"], awaited_since=None) is Action.AWAIT_VALIDATION
    assert at(**validating) is Action.FINISH


def test_the_end_without_a_validation_needs_no_fleet() -> None:
    plan = dataclasses.replace(PLAN, val_at_end=False, val_period=None)
    state = dataclasses.replace(AT_WORK, version=10, saved=True, refitted=False, members=0, healthy=0, reply=None)
    assert decide(plan, state).action is Action.FINISH


def test_without_checkpoints_none_is_published() -> None:
    plan = dataclasses.replace(PLAN, save_period=None, val_at_end=False, val_period=0)
    state = dataclasses.replace(AT_WORK, version=10, refitted=False, reply=None)
    assert decide(plan, state).action is Action.FINISH


def test_a_stop_comes_before_everything() -> None:
    assert at(stop=True, version=4, refitted=False, saved=True) is Action.STOP
    assert at(stop=True, version=0, refitted=False) is Action.STOP


def test_a_stop_saves_what_was_trained_since_the_last_checkpoint() -> None:
    assert at(stop=True, version=3, refitted=False) is Action.CHECKPOINT  # no version of save_period
    state = dataclasses.replace(AT_WORK, stop=True, version=4)
    assert decide(dataclasses.replace(PLAN, save_period=None), state).action is Action.STOP


def test_when_versions_are_validated() -> None:
    due = [version for version in range(12) if PLAN.validates(version, final=version == 11)]
    assert due == [5, 10, 11]
    assert dataclasses.replace(PLAN, val_at_start=True).validates(0, final=False)
    assert not dataclasses.replace(PLAN, val_period=0, val_at_end=False).validates(5, final=True)
    assert dataclasses.replace(PLAN, val_period=0).validates(7, final=True)
    assert dataclasses.replace(PLAN, val_period=1).validates(7, final=False)
    late = dataclasses.replace(PLAN, val_start_at=10, val_at_start=True)
    assert [version for version in range(12) if late.validates(version, final=version == 11)] == [0, 10, 11]


def test_a_checkpoint_comes_early_where_time_runs_out() -> None:
    assert at(must_save=True) is Action.CHECKPOINT
    assert at(must_save=True, saved=True, reply=Reservation(3, (), ())) is Action.TRAIN
    assert at(must_save=True, version=0) is Action.WAIT  # the initial model needs none


def test_time_runs_out_when_a_step_like_the_last_would_end_too_late() -> None:
    plan = dataclasses.replace(PLAN, must_save_by_s=100.0)
    assert not plan.must_save_now(89.0, 10.0)
    assert plan.must_save_now(90.0, 10.0)
    assert plan.must_save_now(1000.0, 0.0)
    assert not PLAN.must_save_now(1e9, 10.0)


# As the loop counts them: a replica that holds the weights verified is a live one, and so is one that is behind.
fleets = st.integers(0, 3).flatmap(
    lambda members: st.fixed_dictionaries(
        {
            "members": st.just(members),
            "healthy": st.integers(0, members),
            "refit_due": st.booleans() if members else st.just(False),
        }
    )
)
states = st.builds(
    lambda fleet, validation, **other: LoopState(**fleet, **validation, **other),
    fleet=fleets,
    validation=st.just({"validating": None})
    | st.fixed_dictionaries({"validating": st.integers(0, 10), "validators": st.none() | st.integers(0, 2)}),
    now=st.just(100.0),
    stop=st.booleans(),
    version=st.integers(0, 10),
    saved=st.booleans(),
    refitted=st.booleans(),
    validated=st.booleans(),
    awaited_since=st.none() | st.floats(0, 100),
    healthy_at=st.floats(0, 100),
    reply=st.sampled_from([None, Waiting(0, 2), Reservation(3, (), ()), End(0)]),
    target_reached=st.booleans(),
    must_save=st.booleans(),
    offer_due=st.booleans(),
)


@given(states)
def test_nothing_is_trained_on_weights_that_the_fleet_was_not_offered(state: LoopState) -> None:
    action = decide(PLAN, state).action
    if action is Action.TRAIN:
        assert state.refitted or not state.members
    if action is Action.REFIT and not state.refitted:
        assert state.validating is None or not state.healthy or state.validators
    if action is Action.VALIDATE:
        assert not state.refit_due
        assert state.healthy
        assert state.validating is None
    if action in (Action.SKIP_VALIDATION, Action.ABANDON_VALIDATION):
        assert state.validating is not None
    if action is Action.FINISH:
        assert state.validating is None
        assert state.saved or state.version == 0


def replica(
    name: str, state: str, version: int, timeline: str = "now", leases: int = 0, *, validates: bool = False
) -> Replica:
    return Replica(name, state, version, timeline, {}, leases, 0.0, validates=validates)  # type: ignore[arg-type]


def test_who_holds_a_version_and_who_is_behind() -> None:
    fleet = [
        replica("good", "HEALTHY", 4),
        replica("old", "HEALTHY", 3),
        replica("of another timeline", "HEALTHY", 4, "before"),
        replica("new", "STALE", -1),
        replica("dead", "DEAD", 4),
        replica("quarantined", "QUARANTINED", -1),
        replica("validates", "HEALTHY", 3, validates=True),
    ]
    assert count_verified(fleet, 4, "now") == 1
    assert behind(fleet, 4, "now") == ["old", "of another timeline", "new"]
    pulling = [msgspec.structs.replace(one, pulls=True) for one in fleet]
    assert behind(pulling, 4, "now") == []  # nobody sends them anything
    assert count_verified(pulling, 4, "now") == 1


@pytest.mark.parametrize(
    ("changes", "works"),
    [
        ({}, True),
        ({"version": 5}, True),
        ({"version": 2}, False),
        ({"state": "STALE"}, False),
        ({"timeline": "before"}, False),
        ({"pulls": False}, False),
    ],
)
def test_one_that_pulls_works_under_older_weights(changes: dict[str, object], works: bool) -> None:
    it = msgspec.structs.replace(replica("far", "HEALTHY", 3), **{"pulls": True, **changes})
    assert may_work([it, replica("loading", "LOADING", -1)], 3, "now") is works


def test_some_replicas_validate_and_one_at_least_goes_on_training() -> None:
    fleet = [
        replica("busy", "HEALTHY", 4, leases=9),
        replica("idle", "HEALTHY", 4),
        replica("less busy", "HEALTHY", 4, leases=2),
        replica("old", "HEALTHY", 3),
        replica("new", "STALE", -1),
    ]
    assert choose_validators(fleet, (), 0, 4, "now") == []
    assert choose_validators(fleet, (), 1, 4, "now") == ["idle"]
    assert choose_validators(fleet, (), 9, 4, "now") == ["idle", "less busy"]
    assert choose_validators(fleet, (), 1, 3, "now") == []
    assert choose_validators(fleet, (), 1, 4, "before") == []
    pulls = [msgspec.structs.replace(each, pulls=True) for each in fleet]
    assert choose_validators([*fleet[:1], *pulls[1:]], (), 1, 4, "now") == []  # they take newer weights by themselves
    # of two that were chosen one is gone
    assert choose_validators(fleet, {"idle", "gone"}, 2, 4, "now") == ["less busy"]
    assert choose_validators(fleet, {"idle", "less busy"}, 2, 4, "now") == []
    assert choose_validators(fleet, {"idle", "less busy"}, 3, 4, "now") == []


def test_a_replica_that_keeps_refusing_is_tried_less_often() -> None:
    backoffs: dict[str, Backoff] = {}
    assert refit_due(["a"], backoffs, 0.0)
    waits = []
    for _ in range(10):
        backoffs = next_backoffs(["a"], backoffs, 0.0)
        waits.append(backoffs["a"].until)
        assert not refit_due(["a"], backoffs, waits[-1] - 0.5)
        assert refit_due(["a"], backoffs, waits[-1])
        assert refit_due(["a", "newcomer"], backoffs, 0.0)
    assert waits[:3] == [1.0, 2.0, 4.0]
    assert waits[-1] == LAST_BACKOFF_S
    # of 60 s each, these are 17 hours
    assert next_backoffs(["a"], {"a": Backoff(1024, 0.0)}, 0.0) == {"a": Backoff(1025, LAST_BACKOFF_S)}
    assert next_backoffs([], backoffs, 0.0) == {}


def test_what_a_replica_did_in_a_row_ends_when_it_does_well() -> None:
    streaks: dict[str, int] = {}
    streaks = next_streaks(streaks, well=["a"], ill=["b", "c"])
    streaks = next_streaks(streaks, well=["c"], ill=["b"])
    assert streaks == {"b": 2}
    assert next_streaks(streaks, well=["a"], ill=["c"]) == {"b": 2, "c": 1}  # of b nothing was heard


@pytest.mark.parametrize(
    ("counts", "condemned"),
    [
        ({"failed": 99}, False),
        ({"failed": 100}, True),
        ({"failed": 20, "trained": 40, "reserved": 20, "filtered": 20, "queued": 7, "open": 9}, False),
        ({"failed": 21, "trained": 40, "reserved": 20, "filtered": 20}, True),
        ({"failed": 0, "trained": 1000}, False),
    ],
)
def test_a_run_too_many_of_whose_prompts_failed_ends_as_an_error(counts: dict[str, int], condemned: bool) -> None:
    assert (at(counts=counts) is Action.CONDEMN) == condemned
    assert at(counts=counts, stop=True, saved=True) is Action.STOP


def test_a_run_that_bears_no_failure_goes_on_without_one() -> None:
    plan = dataclasses.replace(PLAN, max_failed_share=0.0)
    assert decide(plan, dataclasses.replace(AT_WORK, counts={"trained": 100})).action is Action.WAIT
    assert decide(plan, dataclasses.replace(AT_WORK, counts={"trained": 99, "failed": 1})).action is Action.CONDEMN


def test_the_error_says_how_many_failed_and_what_to_do() -> None:
    reason = decide(PLAN, dataclasses.replace(AT_WORK, counts={"failed": 60, "trained": 60})).reason
    assert "60 of the 120 prompts" in reason
    assert "run.max_failed_share 0.2" in reason
    assert "headrace groups retry" in reason


def test_a_run_that_trained_nothing_ends_as_an_error() -> None:
    nothing = dataclasses.replace(AT_WORK, version=0, reply=End(3), validated=True, counts={"failed": 5, "unused": 3})
    decision = decide(PLAN, nothing)
    assert decision.action is Action.CONDEMN
    assert "5 failed, 3 unused" in decision.reason
    assert decide(PLAN, dataclasses.replace(nothing, version=1, saved=True)).action is Action.FINISH
    # a validation of the initial model was all that it took
    assert decide(PLAN, dataclasses.replace(nothing, target_reached=True)).action is Action.FINISH


def test_a_run_that_only_evaluates_ends_with_its_validation() -> None:
    config = Config.model_validate(
        {"data": {"evaluate": {"validation": None}}, "grpo": {"val_period": 0, "val_at_end": True}}
    )
    plan = Plan.of(config, can_validate=True)
    begun = dataclasses.replace(AT_WORK, version=0, refitted=False, reply=None)

    def then(**changes: object) -> Action:
        return decide(plan, dataclasses.replace(begun, **changes)).action

    assert then() is Action.REFIT
    assert then(refitted=True) is Action.VALIDATE
    asked = {"refitted": True, "validated": True}
    assert then(**asked, validating=0, awaited_since=-1e9) is Action.AWAIT_VALIDATION
    assert then(**asked, validating=0, healthy=0) is Action.WAIT
    assert then(**asked) is Action.FINISH


@pytest.mark.parametrize("enabled", [True, False])
def test_a_plan_has_no_checkpoints_or_validations_that_are_off(enabled: bool) -> None:
    saving = {"enabled": enabled, "save_period": 3, "checkpoint_must_save_by": "00:00:01:00"}
    config = Config.model_validate(
        {
            "checkpointing": saving,
            "grpo": {"val_period": 7},
            "data": {"validation": None},
            "trainer": {"validation_deadline_s": 8},
        }
    )
    plan = Plan.of(config, can_validate=enabled)
    assert (plan.save_period, plan.must_save_by_s, plan.val_period) == ((3, 60.0, 7) if enabled else (None, None, None))
    assert plan.validation_deadline_s == 8


@pytest.mark.parametrize(
    ("states", "failed", "expected", "after", "hopeless"),
    [
        (["STALE"], [3], 1, 3, True),
        (["STALE"], [2], 1, 3, False),
        (["STALE"], [9], 1, None, False),  # never given up
        (["STALE", "QUARANTINED"], [3, 0], 2, 3, True),
        (["STALE"], [3], 2, 3, False),  # another is still to come
        (["STALE", "STALE"], [3, 2], 2, 3, False),
        (["STALE", "STALE"], [1], 2, 1, False),  # of one nothing was heard
        (["STALE", "LOADING"], [3, 0], 1, 3, False),  # one more than expected is still to come
        (["STALE", "DEAD"], [3, 0], 2, 3, False),
        ([], [], 1, 3, False),
    ],
)
def test_a_fleet_is_hopeless_once_all_of_it_has_failed_often_enough(
    states: list[str], failed: list[int], expected: int, after: int | None, hopeless: bool
) -> None:
    fleet = [replica(str(i), state, -1) for i, state in enumerate(states)]
    failures = {str(i): times for i, times in enumerate(failed)}
    assert is_hopeless(fleet, failures, expected, after) is hopeless
