"""The pure parts of the trainer's loop: start, feed, ledger, laws on what was read, validation, metrics, patience."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ReplayUnavailable, ServiceError, WrongTimeline
from headrace.replay import Ended, Evaluated, Reservation, ReservedTrajectory, RunState
from headrace.trajectory import Group, Sampling, Score, Span, Trajectory
from services.trainer.control.checkpoint import State
from services.trainer.control.feeder import Demand, Feed, next_feed
from services.trainer.control.laws import check_batch, law_broken
from services.trainer.control.ledger import Ledger, Orders, orders_of
from services.trainer.control.patience import Patience
from services.trainer.control.shares import Assignment, assign
from services.trainer.control.start import Restore, Rewind, Standing, choose_start, lost_writes
from services.trainer.control.validation import Tally, reaches, summarise
from services.trainer.telemetry.metrics import (
    Gauges,
    Journal,
    Line,
    batch_metrics,
    sampling_metrics,
    surviving,
    total_lengths,
)
from services.trainer.telemetry.plot import draw_curve


def run_state(**changes: object) -> RunState:
    state = RunState(
        "r", "now", "home", next_step=6, committed=4, enqueued=20, closed=False, counts={},
        timelines=(("first", 0), ("line", 2), ("now", 4)),
    )  # fmt: skip
    return dataclasses.replace(state, **changes)


CHECKPOINT = State(version=4, timeline="line", incarnation="home", cursor=8, run_id="r")


def test_start_rewinds_where_the_buffer_knows_what_led_to_the_checkpoint() -> None:
    assert choose_start(CHECKPOINT, run_state()) == Rewind(4)
    # one that was set back to an older checkpoint
    assert choose_start(CHECKPOINT, run_state(next_step=9, committed=8)) == Rewind(4)
    assert choose_start(None, run_state(committed=-1, next_step=3)) == Rewind(0)
    assert choose_start(None, run_state(committed=0, next_step=0)) == Rewind(0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": "other", "next_step": 0, "committed": -1}, "another incarnation"),
        ({"next_step": 3, "committed": 2}, "3 steps, fewer than the 4"),
        ({"timelines": (("first", 0), ("other", 2))}, "does not come from timeline line"),
        ({"timelines": (("first", 0), ("line", 4))}, "does not come from timeline line"),
        ({"timelines": ()}, "does not come from timeline line"),
    ],
)
def test_start_restores_where_the_buffer_lost_writes(changes: dict[str, object], reason: str) -> None:
    start = choose_start(CHECKPOINT, run_state(**changes))
    assert isinstance(start, Restore)
    assert start.version == 4
    assert reason in start.reason


def test_start_refuses_a_run_whose_checkpoints_are_gone() -> None:
    with pytest.raises(ServiceError, match="has published version 4"):
        choose_start(None, run_state())


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"next_step": 6}, True),  # its own timeline, at an earlier step
        ({"next_step": 7}, False),  # it holds the step, and refuses all the same
        ({"timeline": "before"}, True),  # its rewind is gone
        ({"timeline": "line"}, True),  # so are those before it
        ({"timeline": "fresh", "committed": -1, "next_step": 0}, True),  # an empty volume
        ({"timeline": "other"}, False),
        ({"timeline": "other", "committed": 0}, False),
    ],
)
def test_a_buffer_that_lost_writes_is_told_from_one_that_another_trainer_took_over(
    changes: dict[str, object], lost: bool
) -> None:
    standing = Standing(
        version=4, timeline="now", ancestors=("first", "line"), incarnation="home", ledger=Ledger(), ended=Orders(),
        enqueued=20, refill=False, before="before",
    )  # fmt: skip
    assert lost_writes(standing, run_state(**changes), reserved=7) is lost


DEMAND = Demand(ahead=6, total=100, trained=20)


@pytest.mark.parametrize(
    ("enqueued", "counts", "expected"),
    [
        (-1, {}, Feed(0, 6, False)),
        (5, {"queued": 2, "open": 4}, Feed(6, 10, False)),
        (5, {"queued": 9}, Feed(6, 6, False)),
        (17, {"trained": 18}, Feed(18, 20, False)),
        (19, {"trained": 18, "open": 2}, Feed(20, 20, False)),
        (19, {"trained": 18, "failed": 1, "filtered": 2}, Feed(20, 23, False)),
    ],
)
def test_the_feeder_keeps_ahead_and_replaces_what_was_lost(
    enqueued: int, counts: dict[str, int], expected: Feed
) -> None:
    assert next_feed(DEMAND, run_state(enqueued=enqueued, counts=counts)) == expected


def test_the_feeder_closes_after_the_last_prompt_only() -> None:
    demand = Demand(ahead=6, total=10, trained=1000)
    assert next_feed(demand, run_state(enqueued=3, counts={})) == Feed(4, 10, True)
    assert next_feed(demand, run_state(enqueued=9, counts={"queued": 6})) == Feed(10, 10, True)
    assert next_feed(demand, run_state(enqueued=3, counts={"queued": 1})) == Feed(4, 9, False)


@given(st.sets(st.integers(0, 60)), st.randoms())
def test_the_ledger_holds_exactly_what_was_put_in(places: set[int], rng: object) -> None:
    orders = Orders()
    shuffled = sorted(places, key=lambda _: rng.random())  # type: ignore[attr-defined]
    for place in shuffled:
        orders.add(place)
    assert {place for place in range(62) if place in orders} == places
    assert len(orders) == len(places)
    assert orders.last == max(places, default=-1)
    assert list(orders.missing(62, Orders([3, 61]))) == sorted(set(range(63)) - places - {3, 61})
    assert list(Orders.decode(orders.encode())) == sorted(places)


@given(st.sets(st.integers(0, 60)))
def test_the_ended_are_read_from_the_buffer_s_bitmap(places: set[int]) -> None:
    bitmap = bytearray(8)
    for place in places:
        bitmap[place // 8] |= 128 >> place % 8
    assert list(orders_of(Ended(len(places), 0, bytes(bitmap)))) == sorted(places)
    with pytest.raises(ServiceError, match=f"holds the places of {len(places)}"):
        orders_of(Ended(len(places), 1, bytes(bitmap)))


def test_the_ledger_of_prompts_trained_in_any_order_stays_small() -> None:
    """A bit a place at the most, where half of them are trained."""
    places = sorted(random.Random(1).sample(range(1_000_000), 500_000))
    assert len(Orders(places).encode()) < 1_000_000 / 8 * 1.1
    assert len(Orders(range(1_000_000)).encode()) < 1000


def test_law_1_the_ledger_refuses_a_prompt_that_comes_again() -> None:
    ledger = Ledger(Orders(range(4)))
    ledger.record(2, ["a", "b"], [4, 6])
    with pytest.raises(ServiceError, match="prompt 4 of the run's order came to the trainer a second time"):
        ledger.record(3, ["c"], [4])


@pytest.mark.parametrize("data", [b"", b"x", Orders(range(0, 90, 7)).encode()[:-3]])
def test_a_ledger_that_is_damaged_is_refused(data: bytes) -> None:
    with pytest.raises(ServiceError, match="ledger can't be read"):
        Orders.decode(data)


def trajectory(**changes: object) -> Trajectory:
    base = Trajectory(
        group_id="g",
        attempt=1,
        index=0,
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        completion_token_ids=np.array([3, 4], dtype=np.int32),
        logprobs=np.array([-1.0, -2.0], dtype=np.float32),
        loss_mask=np.ones(2, dtype=np.uint8),
        spans=(Span(4, 0, 1), Span(5, 1, 2)),
        finish_reason="stop",
        text="34",
        replica="r",
    )
    return msgspec.structs.replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "score", "step", "law"),
    [
        ({}, Score("SCORED", 1.0), 5, None),
        ({}, Score("SCORED", 1.0), 4, "law 2"),
        ({"index": 1}, Score("SCORED", 1.0), 5, "law 3"),
        ({"group_id": "h"}, Score("SCORED", 1.0), 5, "law 3"),
        ({}, Score("FAILED", message="no"), 5, "law 7"),
        ({}, Score("SCORED", 0.0), 5, "law 7"),
    ],
)
@pytest.mark.parametrize("policy", ["ordered", "drop", "mask"])
def test_laws_2_3_and_7_on_what_was_read(
    changes: dict[str, object], score: Score, step: int, law: str | None, policy: str
) -> None:
    assignment = Assignment("key", "g", 0, 1.0, 1.0, 0, 0)
    broken = law_broken(assignment, trajectory(**changes), score, step, 1, policy)
    assert broken is None if law is None else law in (broken or "")


@pytest.mark.parametrize(("policy", "refused"), [("ordered", True), ("drop", True), ("mask", False)])
def test_law_2_a_token_over_age_is_refused_unless_it_is_masked(policy: str, refused: bool) -> None:
    assignment = Assignment("key", "g", 0, 1.0, 1.0, 0, 0)
    broken = law_broken(assignment, trajectory(), Score("SCORED", 1.0), 6, 1, policy)
    assert ("law 2" in (broken or "")) is refused


def group(name: str, n: int = 2, task: str = "sums") -> Group:
    return Group(
        id=name,
        lane="train",
        order=0,
        task_name=task,
        env_name="e",
        messages=(),
        prompt_token_ids=np.array([1], dtype=np.int32),
        extra_env_info={},
        dataset_index=0,
        n=n,
        sampling=Sampling(1.0, 4),
    )


def reservation(*groups: str) -> Reservation:
    rows = [
        ReservedTrajectory(name, index, f"{name}{index}", float(index), 10 * at + index + 1, 3, 4)
        for at, name in enumerate(groups)
        for index in range(2)
    ]
    return Reservation(4, groups, tuple(rows))


def test_law_3_a_batch_is_complete_groups() -> None:
    whole = reservation("a", "b")
    check_batch(whole, [group("a"), group("b")], 2)
    for wrong, groups in (
        (reservation("a"), [group("a")]),
        (reservation("a", "a"), [group("a"), group("a")]),
        (whole, [group("a"), group("b", n=3)]),
        (dataclasses.replace(whole, trajectories=whole.trajectories[::-1]), [group("a"), group("b")]),
    ):
        with pytest.raises(ServiceError, match="law 3"):
            check_batch(wrong, groups, 2)


def test_every_trajectory_goes_to_one_rank_and_keeps_its_place_and_group() -> None:
    batch = reservation("a", "b", "c")
    shares = assign(batch, [group(name) for name in "abc"], ranks=2, optimizer_step=6)
    dealt = {a.key: (a.place, a.group) for share in shares for a in share}
    assert dealt == {"a0": (0, 0), "a1": (1, 0), "b0": (2, 1), "b1": (3, 1), "c0": (4, 2), "c1": (5, 2)}
    assert [len(share) for share in shares] == [3, 3]


def test_batch_metrics_say_what_the_batch_was_like() -> None:
    batch, groups = reservation("a", "b"), [group("a", task="sums"), group("b", task="words")]
    metrics = batch_metrics(batch, groups, truncated=1.0)
    assert metrics["environment_reward"] == 0.5
    assert metrics["environment_reward/sums"] == 0.5
    assert (metrics["avg_trajectory_age"], metrics["max_trajectory_age"]) == (1.0, 1.0)
    prompt = groups[0].prompt_token_ids.size
    assert metrics["mean_prompt_length"] == prompt
    assert metrics["total_num_tokens"] == 1 + 2 + 11 + 12 + 4 * prompt == sum(total_lengths(batch, groups))
    assert (metrics["min_gen_tokens_per_sample"], metrics["max_gen_tokens_per_sample"]) == (1, 12)
    assert metrics["truncation_rate"] == 0.25


def test_dynamic_sampling_says_how_many_batches_were_generated_for_one() -> None:
    batch = dataclasses.replace(reservation("a", "b"), scored=9, filtered=7)
    assert sampling_metrics(batch, generation_batch=3.0) == {
        "dynamic_sampling_num_gen_batches": 3.0,
        "dynamic_sampling_scored_groups": 9,
        "dynamic_sampling_filtered_groups": 7,
    }


def evaluated(name: str, reward: float, version: int, task: str = "sums") -> Evaluated:
    written = trajectory(group_id=name, spans=(Span(version, 0, 2),))
    return Evaluated(group(name, 1, task), ((written, Score("SCORED", reward)),))


def test_law_7_failed_and_pending_validation_groups_are_counts_never_zeros() -> None:
    tallies = [Tally.of(evaluated("a", 1.0, 4)), Tally.of(evaluated("b", 0.0, 4, "words"))]
    metrics = summarise(tallies, failed=2, pending=3)
    assert metrics["accuracy"] == 0.5
    assert (metrics["evaluated"], metrics["failed"], metrics["pending"]) == (2, 2, 3)
    assert (metrics["version_min"], metrics["version_max"]) == (4, 4)
    assert (metrics["accuracy/sums"], metrics["accuracy/words"]) == (1.0, 0.0)
    assert summarise([], failed=2, pending=0) == {"evaluated": 0, "failed": 2, "pending": 0}
    assert "pass_k" not in metrics


def test_pass_k_is_the_share_of_prompts_that_any_completion_solves() -> None:
    rewards = [(0.0, 1.0), (0.0, 0.0), (-1.0, 0.5), (-1.0, -1.0)]
    tallies = [Tally("a", of_prompt, (1, 1), 0, frozenset({3})) for of_prompt in rewards]
    metrics = summarise(tallies, failed=0, pending=0)
    assert (metrics["pass_k"], metrics["accuracy"]) == (0.5, -1.5 / 8)


@pytest.mark.parametrize(
    ("metric", "threshold", "ends"),
    [
        ("accuracy", 0.5, True),
        ("val:accuracy", 0.5, True),
        ("accuracy", 0.51, False),
        ("pass_k", 0.1, False),
        (None, None, False),
    ],
)
def test_a_validation_ends_the_run_at_its_threshold_and_never_without_its_metric(
    metric: str | None, threshold: float | None, ends: bool
) -> None:
    assert reaches({"accuracy": 0.5}, metric, threshold) is ends


def line(kind: str, step: int, timeline: str = "a") -> Line:
    return Line(kind, step, timeline, 0.0, {"reward": 0.5, "accuracy": 0.25})  # type: ignore[arg-type]


def test_lines_of_abandoned_steps_are_superseded() -> None:
    first = [line("validation", 0), line("train", 0), line("train", 1), line("validation", 2), line("train", 2)]
    again = [line("rewind", 2, "b"), line("train", 2, "b"), line("validation", 3, "b")]
    kept = surviving([*first, *again])
    assert [(k.kind, k.step, k.timeline) for k in kept] == [
        ("validation", 0, "a"),
        ("train", 0, "a"),
        ("train", 1, "a"),
        ("validation", 2, "a"),
        ("train", 2, "b"),
        ("validation", 3, "b"),
    ]


def test_half_a_line_of_a_killed_trainer_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    Journal(path).append("train", 0, "a", {"reward": 1.0})
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    journal = Journal(path)
    journal.append("train", 1, "a", {"reward": 2.0})
    assert [(entry.step, entry.metrics) for entry in journal.read()] == [(0, {"reward": 1.0}), (1, {"reward": 2.0})]


@pytest.mark.parametrize("text", ["nonsense", json.dumps({"kind": "train"}), "[]"])
def test_a_line_that_is_not_metrics_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    with pytest.raises(ServiceError, match=r"metrics.jsonl:1: not a line of metrics"):
        Journal(tmp_path / "metrics.jsonl").read()


def test_gauges_hold_the_newest_value_of_each_metric() -> None:
    gauges = Gauges()
    gauges.update("train", 3, {"reward": 0.5, "reward/sums": 1.0})
    gauges.update("train", 4, {"reward": 0.75})
    gauges.update("validation", 4, {"accuracy": 1.0})
    found = {family.name: family.samples[0].value for family in gauges.collect()}
    assert found == {
        "headrace_trainer_step": 4,
        "headrace_trainer_reward": 0.75,
        "headrace_trainer_reward_sums": 1.0,
        "headrace_trainer_validation_step": 4,
        "headrace_trainer_validation_accuracy": 1.0,
    }


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_the_curve_is_a_picture_however_long_the_run(tmp_path: Path, steps: int) -> None:
    lines = [line(kind, step) for step in range(steps) for kind in ("train", "validation")]
    draw_curve(lines, tmp_path / "curve.png", "a run")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_patience_outlasts_a_server_that_comes_back() -> None:
    clock, calls = Clock(), 0

    async def call() -> str:
        nonlocal calls
        calls += 1
        if clock.now < 9.0:
            raise ReplayUnavailable("away")
        return "back"

    assert await Patience(10.0, clock, clock.sleep)(call) == "back"
    assert calls > 3


async def test_patience_ends_at_its_deadline_and_never_covers_a_refusal() -> None:
    clock = Clock()

    async def away() -> None:
        raise ReplayUnavailable("away")

    async def refused() -> None:
        raise WrongTimeline("another")

    with pytest.raises(ReplayUnavailable):
        await Patience(10.0, clock, clock.sleep)(away)
    assert clock.now >= 10.0
    with pytest.raises(WrongTimeline):
        await Patience(10.0, clock, clock.sleep)(refused)
