"""The auditor objects: each law once and more, to records that were made wrong."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest
from pyroaring import BitMap

from tests.chaos.auditor import judge
from tests.chaos.evidence import (
    Batch,
    Call,
    Checkpoint,
    Evidence,
    Exit,
    Group,
    Line,
    Moved,
    Quarantined,
    Restarted,
    Stored,
    Trajectory,
    group_id,
    read,
    right_reward,
    written_by,
)
from tests.chaos.store import Objects
from tests.chaos.tokens import following
from tests.support.s3_server import Stored as S3Object

FIRST, SECOND = "first", "second"  # timelines: the trainer was killed once, and went on from version 2


def a_group(order: int, version: int) -> Group:
    return Group(group_id(order), order, tuple(Trajectory(i, (version,), 0.5, "SCORED", 0.5) for i in range(2)))


def a_batch(step: int, timeline: str, incarnation: str = "") -> Batch:
    return Batch(step, timeline, (a_group(2 * step, max(0, step - 1)), a_group(2 * step + 1, step)), incarnation)


def good() -> Evidence:
    """A run of 4 steps of 2 groups, of 10 prompts: 8 trained, one can't be scored, one is left over."""
    return Evidence(
        prompts_per_step=2,
        generations=2,
        max_age=1,
        policy="ordered",
        moods=("fine",) * 8 + ("poison", "flaky"),
        planned=1,
        struck=1,
        lost_writes=(),
        checkpoints=tuple(
            Checkpoint(
                version,
                FIRST if version <= 2 else SECOND,
                () if version <= 2 else (FIRST,),
                {step: [group_id(2 * step), group_id(2 * step + 1)] for step in (version - 2, version - 1)},
                frozenset(range(2 * version)),
            )
            for version in (2, 4)
        ),
        stored=(Stored(2, FIRST, ()), Stored(4, SECOND, ())),
        lineage=tuple(a_batch(step, FIRST if step < 2 else SECOND) for step in range(4)),
        lines=(
            *(Line("train", step, FIRST, 100.0 + step, 1.0) for step in range(3)),
            Line("rewind", 2, SECOND, 110.0, None),
            *(Line("train", step, SECOND, 110.0 + step, 1.0) for step in (2, 3)),
            Line("validation", 3, SECOND, 114.0, None, (2, 0, 0)),
        ),
        observed=tuple(
            a_batch(step, timeline, "store") for step, timeline in ((0, FIRST), (1, FIRST), (2, FIRST), (2, SECOND), (3, SECOND))
        ),
        states={8: "failed", 9: "unused"},
        ended=frozenset({8}),
        failures={8: "scoring failed 3 times"},
        struck_alone=Counter(),
        misconduct=frozenset(),
        held_out=2,
        moved=(),
        quarantined=(),
        killed=("trainer",),
        server_killed=(),
        restarted=(),
        said=None,
        counts={"trained": 8, "failed": 1, "unused": 1},
        closed=True,
        exits=(Exit("trainer", -9, True, ""), Exit("trainer", 0, False, "")),
        episodes=False,
        open={},
        kept=(),
        bytes_held=(64, 64),
    )  # fmt: skip


def objections(**wrong: Any) -> set[str]:
    """Names of the laws that object once these fields are falsified."""
    return {objection.split(":")[0] for objection in judge(dataclasses.replace(good(), **wrong))}


def with_trajectory(batch: Batch, **wrong: Any) -> Batch:
    group = batch.groups[0]
    trajectories = (dataclasses.replace(group.trajectories[0], **wrong), *group.trajectories[1:])
    return dataclasses.replace(batch, groups=(dataclasses.replace(group, trajectories=trajectories), *batch.groups[1:]))


def lineage_with(step: int, batch: Batch) -> tuple[Batch, ...]:
    return tuple(batch if b.step == step else b for b in good().lineage)


def test_a_good_run_is_not_objected_to() -> None:
    assert judge(good()) == []


def last_batch(**wrong: Any) -> dict[str, Any]:
    return {"lineage": lineage_with(3, dataclasses.replace(good().lineage[3], **wrong))}


def first_group(**wrong: Any) -> dict[str, Any]:
    first, *others = good().lineage[3].groups
    return last_batch(groups=(dataclasses.replace(first, **wrong), *others))


def first_trajectory(**wrong: Any) -> dict[str, Any]:
    return {"lineage": lineage_with(3, with_trajectory(good().lineage[3], **wrong))}


def last_checkpoint(ledger: dict[int, list[str]], **wrong: Any) -> dict[str, Any]:
    first, last = good().checkpoints
    return {"checkpoints": (first, dataclasses.replace(last, ledger={**last.ledger, **ledger}, **wrong))}


# What is wrong in the records: the law that objects, and the fields.
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt that has two ends": ("nothing_is_lost", {"states": {3: "unused", 8: "failed", 9: "unused"}}),
    "a trained prompt that also ended failed": ("nothing_is_lost", {"ended": frozenset({3, 8})}),
    **{
        f"a prompt that is left {state}": ("nothing_is_lost", {"states": {8: "failed", 9: state}})
        for state in ("queued", "open", "scoring", "ready", "reserved")
    },
    "a prompt that was never asked for": ("nothing_is_lost", {"states": {8: "failed", 9: "unused", 10: "unused"}}),
    "a group trained twice by the ledgers": ("none_is_trained_twice", last_checkpoint({3: [group_id(0), group_id(7)]})),
    "a group trained twice by the lineage": ("none_is_trained_twice", last_batch(groups=good().lineage[0].groups)),
    "a step that two checkpoints claim": ("steps_are_whole", last_checkpoint({1: [group_id(2), group_id(3)]})),
    "a step that no checkpoint has": ("steps_are_whole", {"checkpoints": good().checkpoints[1:]}),
    "a step that the lineage lacks": ("steps_are_whole", {"lineage": good().lineage[1:]}),
    "a step that the journal lacks": ("steps_are_whole", {"lines": good().lines[1:]}),
    "a step of too few groups": (
        "steps_are_whole",
        last_checkpoint({3: [group_id(6)]}, trained=good().checkpoints[1].trained - {7}),
    ),
    "a checkpoint that the newest does not descend from": (
        "steps_are_whole",
        {"checkpoints": (dataclasses.replace(good().checkpoints[0], timeline="other"), good().checkpoints[1])},
    ),
    "no checkpoint at all": ("steps_are_whole", {"checkpoints": ()}),
    "a prompt at another place than its own": ("records_agree", first_group(order=7)),
    **{
        f"tokens of versions {versions}": ("none_is_over_age", first_trajectory(versions=versions))
        for versions in ((1,), (1, 3), (4,), (3, 4), ())
    },
    "a group with an index twice": ("groups_are_complete", first_trajectory(index=1)),
    "a group with a trajectory too few": (
        "groups_are_complete",
        first_group(trajectories=good().lineage[3].groups[0].trajectories[:1]),
    ),
    "a batch with a group twice": ("groups_are_complete", last_batch(groups=good().lineage[3].groups[:1] * 2)),
}
# The same, where no other law objects.
WRONG_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt that is nowhere": (
        "nothing_is_lost",
        {"states": {9: "unused"}, "ended": frozenset(), "counts": {"trained": 8, "unused": 1}},
    ),
    "lineage that differs from the ledger": ("records_agree", last_batch(groups=good().lineage[3].groups[::-1])),
    "lineage that differs from what lay in the buffer": ("records_agree", first_trajectory(reward=0.75)),
    "records that nobody saw": ("records_agree", {"observed": ()}),
    "an age over the bound in the metrics": (
        "none_is_over_age",
        {"lines": (dataclasses.replace(good().lines[0], age_max=2.0), *good().lines[1:])},
    ),
    "a prompt that can't be scored and was trained": (
        "failures_are_not_zero",
        {"moods": ("poison", *good().moods[1:])},
    ),
    "equal answers trained under dynamic sampling": ("failures_are_not_zero", {"moods": ("flat", *good().moods[1:])}),
}


@pytest.mark.parametrize(("law", "wrong"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_objected_to(law: str, wrong: dict[str, Any]) -> None:
    assert law in objections(**wrong)


@pytest.mark.parametrize(("law", "wrong"), WRONG_ALONE.values(), ids=WRONG_ALONE)
def test_what_is_wrong_is_objected_to_by_its_law_alone(law: str, wrong: dict[str, Any]) -> None:
    assert objections(**wrong) == {law}


def test_a_late_trainer_may_write_a_step_of_its_own_timeline() -> None:
    e = good()
    assert objections(lines=(*e.lines, Line("train", 2, FIRST, 120.0, 1.0))) == set()
    assert "steps_are_whole" in objections(lines=(*e.lines, Line("train", 2, SECOND, 120.0, 1.0)))
    assert objections(lineage=(*e.lineage, a_batch(2, FIRST))) == set()
    assert "steps_are_whole" in objections(lineage=(*e.lineage, a_batch(2, SECOND)))


def test_a_store_without_the_newest_checkpoint_or_with_half_of_one() -> None:
    first, last = good().stored or ()
    assert objections(stored=None) == set()
    for wrong in (first,), (), (first, dataclasses.replace(last, timeline=FIRST)):
        assert objections(stored=wrong) == {"the_store_has_the_run"}
    assert objections(stored=(dataclasses.replace(first, wrong=("weights",)), last)) == {"the_store_has_the_run"}


def test_masked_tokens_may_be_old_but_a_group_needs_a_young_one() -> None:
    batch = with_trajectory(good().lineage[3], versions=(1, 2))
    observed = tuple(with_trajectory(b, versions=(1, 2)) if b.step == 3 else b for b in good().observed)
    old = {"policy": "mask", "lineage": lineage_with(3, batch), "observed": observed}
    assert objections(**old) == set()
    too_old = dataclasses.replace(
        batch.groups[0],
        trajectories=tuple(dataclasses.replace(t, versions=(0, 1)) for t in batch.groups[0].trajectories),
    )
    batch = dataclasses.replace(batch, groups=(too_old, batch.groups[1]))
    assert "none_is_over_age" in objections(policy="mask", lineage=lineage_with(3, batch))


def test_age_over_the_bound_on_a_timeline_that_was_abandoned() -> None:
    seen = (with_trajectory(a_batch(3, FIRST, "store"), versions=(1,)), *good().observed)
    assert objections(observed=seen) == {"none_is_over_age"}


def test_another_batch_after_a_rewind() -> None:
    before = dataclasses.replace(a_batch(2, FIRST, "store"), groups=(a_group(4, 1), a_group(9, 2)))
    seen = tuple(before if (b.step, b.timeline) == (2, FIRST) else b for b in good().observed)
    assert objections(observed=seen) == {"rewound_steps_are_unchanged"}
    # a server that lost writes, or was made anew, may have forgotten it
    assert objections(observed=seen, lost_writes=(105.0,)) == set()
    anew = tuple(dataclasses.replace(b, incarnation="new") if b.timeline == SECOND else b for b in seen)
    assert objections(observed=anew) == set()


@pytest.mark.parametrize("wrong", [{"reward": 0.0}, {"status": "FAILED"}, {"reward": None}])
def test_a_reward_that_the_environment_did_not_give(wrong: dict[str, Any]) -> None:
    seen = tuple(with_trajectory(b, **wrong) if b.step == 0 else b for b in good().observed)
    assert "failures_are_not_zero" in objections(observed=seen)


@pytest.mark.parametrize("mood", ["fine", "flaky", "flat"])
def test_an_innocent_prompt_that_failed(mood: str) -> None:
    moods = (*good().moods[:8], mood, "flaky")
    assert objections(moods=moods) == {"no_innocent_group_failed"}
    assert objections(moods=moods, failures={}) == {"no_innocent_group_failed"}
    # it was alone with a replica that was struck, again and again
    assert objections(moods=moods, struck_alone=Counter({group_id(8): 3})) == set()
    assert objections(moods=moods, struck_alone=Counter({group_id(8): 2})) == {"no_innocent_group_failed"}


def test_a_prompt_that_kills_its_replicas_and_failed() -> None:
    assert objections(moods=(*good().moods[:8], "deadly", "flaky")) == set()


def test_an_attempt_that_was_charged_for_the_fault_of_another() -> None:
    first, *others = good().observed
    charged = dataclasses.replace(first, groups=(dataclasses.replace(first.groups[0], charged=1), *first.groups[1:]))
    assert objections(observed=(charged, *others)) == {"nobody_is_charged_for_others"}
    assert objections(observed=(charged, *others), struck_alone=Counter({group_id(0): 1})) == set()


def test_scoring_that_was_charged_though_the_environment_was_well() -> None:
    seen = (with_trajectory(good().observed[0], tries=2), *good().observed[1:])
    assert objections(observed=seen) == {"nobody_is_charged_for_others"}
    assert objections(observed=seen, misconduct=frozenset({"kill", "overloaded"})) == {"nobody_is_charged_for_others"}
    assert objections(observed=seen, misconduct=frozenset({"slow"})) == set()
    assert objections(observed=seen, moods=("flaky", *good().moods[1:])) == set()


def test_counts_that_are_wrong() -> None:
    assert objections(counts={"trained": 8, "failed": 1, "unused": 2}) == {"the_buffer_counts_right"}
    assert objections(counts={"trained": 10, "failed": 1, "unused": 1}) == {"the_buffer_counts_right"}


def test_a_run_that_did_not_finish() -> None:
    assert objections(planned=2) == {"the_run_finished"}
    assert objections(closed=False) == {"the_run_finished"}
    assert objections(exits=(Exit("trainer", -9, True, ""),)) == {"the_run_finished"}
    left_over = {8: "failed", 9: "unused", 7: "unused"}
    assert "the_run_finished" in objections(states=left_over)


@pytest.mark.parametrize(
    ("code", "words"), [(70, "Traceback …"), (1, "KeyError: 3"), (1, "error: another trainer"), (-11, ""), (2, "usage")]
)
def test_a_service_that_crashed(code: int, words: str) -> None:
    exits = (Exit("reward", code, False, words), *good().exits)
    assert objections(exits=exits) == {"services_end_for_a_reason"}


@pytest.mark.parametrize("code", [70, 1, -6])
def test_a_struck_service_that_can_not_be_started_again(code: int) -> None:
    exits = (Exit("rollout-1", code, True, "Traceback …"), *good().exits)
    assert objections(exits=exits) == {"services_end_for_a_reason"}


def test_a_service_that_could_not_go_on_and_said_why() -> None:
    exits = (
        Exit("trainer", 1, False, "…\nerror: can't write a checkpoint"),
        Exit("rollout-1", 75, False, ""),
        Exit("rollout-1", 70, False, "error: the engine died. vLLM reported: …\nException ignored in: …"),
        Exit("trainer", 70, False, "error: the buffer's server lost writes (…)"),
        *good().exits,
    )
    assert objections(exits=exits) == set()


def validated(*groups: float, version: int = 3, timeline: str = SECOND) -> tuple[Line, ...]:
    return (*good().lines[:-1], Line("validation", version, timeline, 114.0, None, (groups[0], groups[1], groups[2])))


def test_a_validation_that_lost_a_prompt_or_failed_one() -> None:
    assert objections(lines=validated(2, 0, 0)) == set()
    assert objections(lines=validated(1, 0, 0)) == {"validations_are_whole"}
    assert objections(lines=validated(1, 1, 0)) == {"validations_are_whole"}
    assert objections(lines=validated(1, 1, 0), struck_alone=Counter({"v3-0": 3})) == {"validations_are_whole"}
    assert objections(lines=(*validated(1, 1, 0), *validated(2, 0, 0, version=2)[-1:])) == {"validations_are_whole"}
    # given up because no replica was left; another was completed
    assert objections(lines=(*validated(1, 0, 1), *validated(2, 0, 0, version=4)[-1:])) == set()


def test_a_run_without_a_validation_and_one_that_was_done_twice() -> None:
    assert objections(lines=good().lines[:-1]) == {"validations_are_whole"}
    assert objections(lines=(*good().lines, *good().lines[-1:])) == {"validations_are_whole"}


def a_call(path: tuple[int, ...], parent: int, asked: str, versions: tuple[int, ...] = (1, 1, 2)) -> Call:
    """One that continues `path`, the tokens up to its own."""
    completion = [7]
    for version in versions[1:]:
        completion.append(following((*path, *completion), version))
    return Call(parent, (3, 9, 4), tuple(completion), versions, True, (asked,))


def calls_of(mark: str) -> tuple[Call, ...]:
    calls: list[Call] = []
    path: tuple[int, ...] = ()
    for turn in range(5):
        path = (*path, 3, 9, 4)
        calls.append(a_call(path, turn - 1, f"{turn}-{mark}" if turn else "1+2"))
        path = (*path, *calls[-1].completion)
    return tuple(calls)


def played(**wrong: Any) -> dict[str, Any]:
    """Evidence of a run of episodes, each played by a program of its own; with `wrong` in one call of the last group."""
    marks = iter(range(10**6))

    def with_calls(group: Group) -> Group:
        each = tuple(dataclasses.replace(t, calls=calls_of(str(next(marks)))) for t in group.trajectories)
        return dataclasses.replace(group, trajectories=each)

    of_group: dict[str, Group] = {}
    for batch in good().observed:
        for group in batch.groups:
            of_group.setdefault(group.id, with_calls(group))
    seen = [dataclasses.replace(b, groups=tuple(of_group[group.id] for group in b.groups)) for b in good().observed]
    calls = list(seen[-1].groups[0].trajectories[0].calls)
    calls[2] = dataclasses.replace(calls[2], **wrong)
    seen[-1] = with_trajectory(seen[-1], calls=tuple(calls))
    return {"episodes": True, "open": {"agents-1": 0}, "observed": tuple(seen)}


def test_episodes_whose_tokens_follow_from_their_paths() -> None:
    assert objections(**played()) == set()


@pytest.mark.parametrize(
    "wrong", [{"completion": (7, 0, 0)}, {"context": (3, 10, 4)}, {"versions": (1, 2, 2)}, {"parent": 0}]
)
def test_a_token_sampled_in_another_context_or_from_other_weights(wrong: dict[str, Any]) -> None:
    assert "tokens_are_those_that_were_sampled" in objections(**played(**wrong))


@pytest.mark.parametrize("wrong", [{"asked": ("2-77",)}, {"asked": ("3-14",)}, {"asked": ()}, {"trained": False}])
def test_an_episode_that_is_of_two_programs_or_lacks_a_call(wrong: dict[str, Any]) -> None:
    assert objections(**played(**wrong)) == {"an_episode_is_of_one_program"}


def test_an_episode_that_has_too_few_calls_or_too_many() -> None:
    for calls in ((), calls_of("1000000")[:4], (*calls_of("1000000"), a_call((3, 9, 4), -1, "5-1000000"))):
        told = played()
        told["observed"] = (*told["observed"][:-1], with_trajectory(told["observed"][-1], calls=calls))
        assert objections(**told) == {"an_episode_is_of_one_program"}


def test_two_episodes_of_one_program() -> None:
    told = played()
    first = told["observed"][0].groups[0].trajectories[0].calls
    told["observed"] = (*told["observed"][:-1], with_trajectory(told["observed"][-1], calls=first))
    assert objections(**told) == {"an_episode_is_of_one_program"}


def test_sessions_and_memory_that_are_left() -> None:
    assert objections(**{**played(), "open": {"agents-1": 0, "agents-2": 1}}) == {"nothing_is_left_open"}
    assert objections(**{**played(), "open": {"agents-1": None}}) == {"nothing_is_left_open"}
    assert objections(**{**played(), "open": {}}) == {"nothing_is_left_open"}
    assert objections(kept=("hr:{chaos}:s:p:x",)) == {"nothing_is_left_open"}
    assert objections(bytes_held=(65, 64)) == {"nothing_is_left_open"}


def a_moved_clock(**changes: Any) -> tuple[Moved, ...]:
    moved = Moved("replay", 600, 599.2, (), 100.0, 120.0)
    return (dataclasses.replace(moved, **changes),)


def test_a_clock_that_did_not_move_or_that_hurt_somebody() -> None:
    assert objections(moved=a_moved_clock()) == set()
    assert objections(moved=a_moved_clock(seen_s=0.1)) == {"a_clock_is_nobodys_fault"}
    assert objections(moved=a_moved_clock(asked_s=-600)) == {"a_clock_is_nobodys_fault"}
    assert objections(moved=a_moved_clock(dead=("rollout-1",))) == {"a_clock_is_nobodys_fault"}
    away = Exit("trainer", 75, False, "", time=110.0)
    assert objections(moved=a_moved_clock(), exits=(away, *good().exits)) == {"a_clock_is_nobodys_fault"}
    before = dataclasses.replace(away, time=99.0)
    assert objections(moved=a_moved_clock(), exits=(before, *good().exits)) == set()


def test_a_replica_that_is_trained_on_after_it_was_found_wrong() -> None:
    wrong = Quarantined("wrong", SECOND, 2, 0, ("rollout-2",))
    assert objections(quarantined=(wrong,)) == set()
    assert objections(quarantined=(dataclasses.replace(wrong, holds=1),)) == {"a_wrong_replica_trains_no_more"}
    assert objections(quarantined=(dataclasses.replace(wrong, healthy=()),)) == {"a_wrong_replica_trains_no_more"}

    def seen(version: int) -> tuple[Batch, ...]:
        return tuple(with_trajectory(b, replica="wrong", versions=(version,)) for b in good().observed[-1:])

    others = good().observed[:-1]
    same = lineage_with(3, with_trajectory(good().lineage[3], versions=(3,)))
    assert objections(quarantined=(wrong,), observed=(*others, *seen(2))) == set()
    assert objections(quarantined=(wrong,), observed=(*others, *seen(3)), lineage=same) == {
        "a_wrong_replica_trains_no_more"
    }
    right = good().observed[2]
    assert (right.timeline, right.step) == (FIRST, 2)
    early = with_trajectory(right, replica="wrong", versions=(2,))
    for timeline, objects in ((FIRST, True), (SECOND, False)):
        was_right = dataclasses.replace(wrong, timeline=timeline, version=1)
        found = objections(quarantined=(was_right,), observed=(*good().observed[:2], early, *good().observed[3:]))
        assert ("a_wrong_replica_trains_no_more" in found) is objects


TABLE = "run chaos\n prompts 8 trained\nlearning curve: x/curve.png\ncheckpoint:     x/checkpoints/step_4/policy"
UNDER_UP: dict[str, Any] = {
    "said": TABLE,
    "exits": (Exit("up", -9, True, ""), Exit("up", 143, False, "stopped"), Exit("up", 0, False, TABLE)),
    "killed": ("trainer", "server", "up"),
    "restarted": (Restarted("trainer", -9), Restarted("rollout-1", 75)),
}


def test_a_supervisor_that_does_what_it_should() -> None:
    assert objections(**UNDER_UP) == set()
    # it was killed itself before it could say of the trainer's end
    assert objections(**{**UNDER_UP, "restarted": ()}) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        {"killed": ("trainer",) * 4},
        {"restarted": (), "exits": UNDER_UP["exits"][-1:]},
        {"restarted": (*UNDER_UP["restarted"], Restarted("reward", 70))},
        {"exits": (*UNDER_UP["exits"][:2], Exit("up", 0, False, "the end"))},
        {"exits": (*UNDER_UP["exits"][:2], Exit("up", 0, False, TABLE.replace("step_4", "step_3")))},
    ],
)
def test_a_supervisor_that_keeps_a_restart_or_its_table_to_itself(wrong: dict[str, Any]) -> None:
    assert objections(**{**UNDER_UP, **wrong}) == {"the_supervisor_tells_how_it_ended"}


def test_a_server_killed_thrice_or_a_store_away_may_be_given_up() -> None:
    gave_up = {**UNDER_UP, "restarted": (*UNDER_UP["restarted"], Restarted("replay", 70))}
    assert objections(**gave_up, server_killed=(1.0, 200.0, 207.0, 245.0)) == set()
    assert objections(**gave_up, server_killed=(1.0, 200.0, 270.0)) == {"the_supervisor_tells_how_it_ended"}
    stored = {**UNDER_UP, "restarted": (*UNDER_UP["restarted"], Restarted("trainer", 70))}
    assert objections(**stored) == set()
    assert objections(**stored, stored=None) == {"the_supervisor_tells_how_it_ended"}
    other = {**UNDER_UP, "restarted": (*UNDER_UP["restarted"], Restarted("reward", 70))}
    assert objections(**other, server_killed=(200.0, 207.0, 245.0)) == {"the_supervisor_tells_how_it_ended"}


@pytest.mark.parametrize("code", [1, 70, -11])
def test_a_supervisor_that_ends_otherwise(code: int) -> None:
    exits = (Exit("up", code, False, "error: trainer can't continue"), *UNDER_UP["exits"])
    assert "the_supervisor_tells_how_it_ended" in objections(**{**UNDER_UP, "exits": exits})
    assert "the_run_finished" in objections(**{**UNDER_UP, "exits": exits[:1]})


def test_evidence_is_read_raw(tmp_path: Path) -> None:
    """The files as a run leaves them, written by hand."""
    write = {
        "story.json": {
            "shape": {"prompts_per_step": 1, "generations": 1, "max_age": 0, "policy": "drop", "topology": "up", "episodes": True,
                      "store": True, "sentinels": False},
            "planned": 1,
            "struck": [
                {"fault": {"kind": "torn_tail", "target": "server"}, "victim": "server", "time": 5.0, "held": []},
                {"fault": {"kind": "slow", "target": "environment"}, "victim": "environment", "time": 6.0, "held": [["e0-train-0"]]},
                {"fault": {"kind": "kill", "target": "trainer"}, "victim": "trainer", "time": 7.0, "held": [[]]},
                {"fault": {"kind": "cut", "target": "replay"}, "victim": "replay", "time": 8.0,
                 "held": [["e0-train-1"], ["e0-train-0", "e0-train-2"]]},
            ],
            "murdered": [{"name": "rollout-1", "held": ["e0-train-0"]}, {"name": "rollout-2", "held": ["e0-train-0", "e0-train-1"]}],
            "moved": [{"number": 1, "machine": "up", "asked_s": -600, "seen_s": -599.0, "dead": ["rollout-1"], "over": 9.0}],
            "quarantined": [{"replica": "r1", "timeline": "t", "version": 4, "holds": 0, "healthy": ["rollout-2"]}],
            "open": {"agents-1": 2},
            "exits": [{"name": "trainer", "code": 0, "by_us": False, "last_words": "", "time": 9.0}],
        },
        "problems.jsonl": {"input": "1+2", "output": "0", "mood": "fine"},
        "held_out.jsonl": {"input": "1+1", "output": "0", "mood": "fine"},
        "logs/up.log": "trainer: killed by signal 9; restarting it in 1 s\nreward: exit code 75; restarting it in 2 s",
        "metrics.jsonl": {"kind": "train", "step": 0, "timeline": "t", "time": 3.0, "metrics": {"max_trajectory_age": 0.0}},
        "observed.jsonl": {
            "timeline": "t", "incarnation": "s", "step": 0,
            "groups": [{"id": "e0-train-0", "order": 0, "charged": 1, "trajectories": [
                {"group": "e0-train-0", "index": 0, "spans": [[0, 0, 4]], "text": "3", "status": "SCORED", "reward": 0.25, "tries": 2,
                 "replica": "r1"},
                {"group": "e0-train-0", "index": 1, "text": "4", "status": "SCORED", "reward": 0.5, "tries": 1, "replica": "r1", "calls": [
                    {"parent": -1, "context": [3], "completion": [5, 6], "spans": [[0, 0, 1], [1, 1, 2]], "trained": True, "asked": ["7"]},
                    {"parent": 0, "context": [4], "completion": [7], "spans": [[1, 0, 1]], "trained": True, "asked": []},
                    {"parent": 1, "context": [4], "completion": [8], "spans": [[2, 0, 1]], "trained": False, "asked": []}]}]}],
        },
        "archive/step_1/state.json": {"version": 1, "timeline": "t", "ancestors": []},
        "archive/step_1/ledger.json": {"0": ["e0-train-0"]},
    }  # fmt: skip
    for name, content in write.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    (tmp_path / "store").mkdir()
    store, right = Objects(tmp_path / "store"), {"sha256": hashlib.sha256(b"right").hexdigest()}
    files = dict.fromkeys(("right", "other", "gone"), right)
    listed = {"version": 1, "timeline": "t", "run_id": "r", "files": files}
    store["runs/r/manifests/step_1-t.json"] = S3Object(json.dumps(listed).encode(), {})
    store["runs/r/step_1-t/right"], store["runs/r/step_1-t/other"] = S3Object(b"right", {}), S3Object(b"\nleft", {})
    (tmp_path / "archive/step_1/trained.roaring").write_bytes(BitMap([0]).serialize())
    (tmp_path / "lineage").mkdir()
    lineage = [
        {"schema": 1, "step": 0, "timeline": "t", "groups": ["e0-train-0"]},
        {"group": "e0-train-0", "order": 0, "trajectories": [{"index": 0, "reward": 0.25, "ranges": [{"version": 0}]}]},
    ]
    with gzip.open(tmp_path / "lineage" / "step_0-t.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lineage)
    dump = {
        "hr:{chaos}": {b"incarnation": b"s", b"closed": b"1", b"bytes": b"70"},
        "hr:{chaos}:s:p:named": b"payload",
        "hr:{chaos}:s:s:left": b"score",
        "hr:{chaos}:s:counts": {b"train:trained": b"1", b"validation:queued": b"7"},
        "hr:{chaos}:s:ended": bytes([0b01000000, 0b10000000]),
        "hr:{chaos}:s:g:e0-train-3": {
            b"order": b"3",
            b"state": b"queued",
            b"lane": b"train",
            b"held": b"69",
            b"p0": b"named 1 2 3",
        },
        "hr:{chaos}:s:g:e0-train-8": {b"order": b"8", b"state": b"failed", b"lane": b"train", b"reason": b"died"},
        "hr:{chaos}:old:g:e0-train-9": {b"order": b"9", b"state": b"queued", b"lane": b"train"},
    }
    (tmp_path / "buffer.msgpack").write_bytes(msgpack.packb(dump))
    evidence = read(tmp_path)
    seen = Trajectory(0, (0,), 0.25, "SCORED", right_reward({"input": "1+2", "mood": "fine"}, "3"), 2, "r1")
    calls = (
        Call(-1, (3,), (5, 6), (0, 1), True, ("7",)),
        Call(0, (4,), (7,), (1,), True, ()),
        Call(1, (4,), (8,), (2,), False, ()),
    )
    right = right_reward({"input": "1+2", "mood": "fine"}, "4")
    episode = Trajectory(1, (0, 1), 0.5, "SCORED", right, 1, "r1", calls)
    assert evidence.observed == (Batch(0, "t", (Group("e0-train-0", 0, (seen, episode), 1),), "s"),)
    assert evidence.open == {"agents-1": 2}
    assert evidence.kept == ("hr:{chaos}:s:s:left",)
    assert evidence.bytes_held == (70, 69)
    assert evidence.lineage == (Batch(0, "t", (Group("e0-train-0", 0, (Trajectory(0, (0,), 0.25),)),)),)
    assert evidence.checkpoints == (Checkpoint(1, "t", (), {0: ["e0-train-0"]}, frozenset({0})),)
    assert evidence.stored == (Stored(1, "t", ("other", "gone")),)
    assert evidence.lines == (Line("train", 0, "t", 3.0, 0.0),)
    assert evidence.ended == {1, 8}
    assert evidence.states == {3: "queued", 8: "failed"}
    assert evidence.failures == {8: "died"}
    assert evidence.struck_alone == {"e0-train-0": 2, "e0-train-1": 1}
    assert evidence.misconduct == {"slow"}
    assert evidence.counts == {"trained": 1}
    assert evidence.lost_writes == evidence.server_killed == (5.0,)
    assert evidence.held_out == 1
    assert evidence.moved == (Moved("up", -600, -599.0, ("rollout-1",), 6.0, 9.0),)
    assert evidence.quarantined == (Quarantined("r1", "t", 4, 0, ("rollout-2",)),)
    assert evidence.killed == ("trainer", "rollout-1", "rollout-2")
    assert evidence.restarted == (Restarted("trainer", -9), Restarted("reward", 75))
    assert evidence.closed


def test_a_trajectory_passed_on_is_of_the_weights_its_spans_name() -> None:
    """Two replicas wrote it under the same weights, and a refit came later."""
    ranges = [{"version": 7, "replica": "a"}, {"version": 7, "replica": "b"}, {"version": 8, "replica": "b"}]
    assert written_by(ranges) == (7, 8)
