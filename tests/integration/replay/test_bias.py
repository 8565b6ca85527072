"""The meters of selection bias: what is pushed in is read back, at each end a trajectory can come to, and once."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.cli.status import show
from headrace.records.score import Score
from headrace.replay import Limits, ReplayClient
from headrace.replay.bias import Distribution, TrajectoryMeter, beyond, skews
from tests.support.buffer import (
    enqueue,
    generate,
    healthy_replica,
    lease_one,
    make_trajectory,
    push_all,
    refit,
    reserve,
    rewind,
    tighten,
)
from tests.support.replay_service import config_of, serving
from tests.support.waiting import eventually

# Lengths and rewards of four groups of two, with sums that floats hold exactly.
LENGTHS = (1, 2, 3, 8, 100, 128, 4096, 5000)
REWARDS = (0.0, 1.0, -1.0, 0.5, -0.375, 2.0**-12, -(2.0**-12), 1000.0)


async def make(replay: ReplayClient, replica: str, lengths: Sequence[int], rewards: Sequence[float]) -> list[str]:
    """A group of two for each pair of values, generated and scored."""
    await enqueue(replay, range(len(lengths) // 2))
    leases = await replay.lease(replica, len(lengths) // 2)
    assert len(leases) == len(lengths) // 2
    values = {}
    for i, lease in enumerate(leases):
        for index in range(2):
            values[lease.group.id, index] = rewards[2 * i + index]
            await replay.push(lease, make_trajectory(lease, index, length=lengths[2 * i + index]))
    while jobs := await replay.take_scoring({"math": 256}):
        scores = [(job, Score("SCORED", values[job.group.id, job.trajectory.index])) for job in jobs]
        assert not any(await replay.score_many(scores))
    return [lease.group.id for lease in leases]


def check(found: Distribution, values: Sequence[float]) -> None:
    """Counts and sums to the last bit; every bucket has what lies between its bound and the one before."""
    assert (found.count, found.sum, found.squares) == (len(values), sum(values), sum(v * v for v in values))
    assert found.mean == np.mean(values)
    bounds = [bound for bound, _ in found.buckets]
    assert bounds == sorted(set(bounds))
    counts = [sum(low < v <= high for v in values) for low, high in zip([-math.inf, *bounds], bounds, strict=False)]
    assert [count for _, count in found.buckets] == counts
    assert sum(counts) == len(values)
    for (bound, _), before in zip(found.buckets, [-math.inf, *bounds], strict=False):
        nearest = max(v for v in values if before < v <= bound)
        assert abs(bound - nearest) <= max(abs(bound) * (1 - 2**-0.5) + 1e-9, 2**-10)


async def test_lengths_and_rewards_are_read_back_exactly(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=4)
    timeline = (await replay.state()).timeline
    assert await replay.bias() == dict.fromkeys(await replay.bias(), TrajectoryMeter())
    await make(replay, await healthy_replica(replay), LENGTHS, REWARDS)
    await reserve(replay, 0)
    meters = await replay.bias()
    assert meters["generated"].trajectories == 8
    check(meters["generated"].length, LENGTHS)
    check(meters["generated"].reward, REWARDS)
    assert meters["generated"].age == Distribution(8, 0, 0, ((0.0, 8),))
    assert meters["trained"] == TrajectoryMeter()

    await replay.commit(1, timeline)
    await replay.commit(1, timeline)
    await reserve(replay, 1)
    meters = await replay.bias()
    assert meters["trained"].trajectories == 4
    check(meters["trained"].length, LENGTHS[:4])
    check(meters["trained"].reward, REWARDS[:4])
    await replay.commit(2, timeline)
    meters = await replay.bias()
    check(meters["trained"].length, LENGTHS)
    check(meters["trained"].reward, REWARDS)
    assert meters["trained"].latency.count == 8
    assert meters["trained"].latency.sum >= 0
    # the second step was made with the weights it was not trained by
    assert meters["trained"].age == Distribution(8, 4, 4, ((0.0, 4), (1.0, 4)))
    others = ("masked", "expired", "filtered", "failed", "surplus")
    assert [meters[moment] for moment in others] == [TrajectoryMeter()] * 5  # type: ignore[index]


async def test_latency_counts_from_the_lease_to_each_push(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    moments = [await replay.redis.time()]
    for index in range(2):
        await replay.redis.blpop(f"nothing-{replay.run_id}", timeout=0.05)
        await replay.push(lease, make_trajectory(lease, index))
        moments.append(await replay.redis.time())
    group = await replay.group(lease.group.id)
    assert group is not None
    first, second = [trajectory["latency_s"] for trajectory in group["trajectories"]]
    begun, one, two = [seconds + micro / 1e6 for seconds, micro in moments]
    assert 0.05 <= first <= one - begun + 1
    assert second >= first + 0.05
    assert second <= two - begun + 1


async def test_a_step_taken_back_counts_once_unless_it_is_made_anew(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=4, retain_steps=2)
    timeline = (await replay.state()).timeline
    replica = await healthy_replica(replay)
    await make(replay, replica, LENGTHS, REWARDS)
    for step in range(2):
        await reserve(replay, step)
    await replay.commit(2, timeline)
    state = await rewind(replay, 0)
    assert state.counts["trained"] == 0
    await replay.end_refill(state.timeline)
    for step in range(2):
        await reserve(replay, step)
    await replay.commit(2, state.timeline)
    assert (await replay.bias())["trained"].trajectories == 8
    check((await replay.bias())["trained"].length, LENGTHS)

    # payloads that went under memory pressure before there was a checkpoint were metered when they went
    await refit(replay, 2, [replica])
    await replay.enqueue([], state.timeline)
    await enqueue(replay, range(4, 12))
    await generate(replay, replica)
    await reserve(replay, 2)
    await reserve(replay, 3)
    await tighten(replay, limits, max_age=4, max_bytes=1)
    await enqueue(replay, range(12, 14))
    await replay.lease(replica, 1)
    assert (await replay.read_held_batch(2))[0] == [3]
    assert (await replay.bias())["trained"].trajectories == 12
    # a rewind has them made anew: these are other trajectories
    await tighten(replay, limits, max_age=4)
    state = await rewind(replay, 2)
    await refit(replay, 2, [replica])
    await generate(replay, replica)
    trained = {group for step in range(2, 6) for group in (await reserve(replay, step)).groups}
    assert trained == {f"e0-train-{order}" for order in range(4, 12)}
    await replay.commit(6, state.timeline)
    assert (await replay.bias())["trained"].trajectories == 12 + 16


async def test_expired_and_masked_trajectories_are_metered_with_ages(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, staleness_policy="mask", max_age=1, ahead_steps=9)
    timeline = (await replay.state()).timeline
    replica = await healthy_replica(replay)
    await enqueue(replay, range(6))
    await generate(replay, replica, 4)
    old, mixed = await replay.lease(replica, 2)
    await push_all(replay, old)
    await reserve(replay, 0)
    await reserve(replay, 1)
    await refit(replay, 2, [replica])
    await push_all(replay, mixed, versions=[0, 1])
    for job in await replay.take_scoring({"math": 64}):
        await replay.score(job, Score("SCORED", 0.5))
    assert not hasattr(await replay.reserve(2, timeline), "groups")
    meters = await replay.bias()
    # the first was made with weights 0 alone, of age 2 at step 2
    assert meters["expired"].trajectories == 2
    check(meters["expired"].age, [2, 2])
    check(meters["expired"].length, [4, 4])
    check(meters["expired"].reward, [0.5, 0.5])
    await generate(replay, replica, 1)
    assert mixed.group.id in (await reserve(replay, 2)).groups
    for _ in range(2):
        await replay.record_masked(2, timeline, 8)
    await replay.commit(3, timeline)
    meters = await replay.bias()
    assert (meters["masked"].trajectories, meters["masked"].tokens) == (2, 8)
    check(meters["masked"].length, [8, 8])
    check(meters["masked"].age, [2, 2])
    assert meters["trained"].trajectories == 12


async def test_filtered_failed_and_surplus_trajectories_are_metered(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, filter_equal=True, redundant=1, max_age=9, max_scoring_attempts=1)
    await enqueue(replay, range(4), n=2)
    equal, doomed, rest = await replay.lease(await healthy_replica(replay), 3)
    for index, length in ((0, 5), (2, 7), (1, 9)):
        await replay.push(equal, make_trajectory(equal, index, length=length))
    scored = await replay.take_scoring({"math": 2})
    for job in scored:
        await replay.score(job, Score("SCORED", 0.25))
    # which two of three pushed in the same millisecond are taken first is open
    lengths = sorted(job.trajectory.completion_token_ids.size for job in scored)
    (surplus,) = {5, 7, 9} - set(lengths)
    meters = await replay.bias()
    assert meters["generated"].trajectories == meters["filtered"].trajectories == 2
    check(meters["filtered"].length, lengths)
    check(meters["filtered"].reward, [0.25, 0.25])
    assert meters["surplus"].trajectories == 1
    check(meters["surplus"].length, [surplus])
    assert meters["surplus"].reward == Distribution()

    await replay.push(doomed, make_trajectory(doomed, 0, length=3))
    await replay.abandon(doomed, 1, "no")
    await replay.reject(doomed, "never")
    meters = await replay.bias()
    # one that was never finished, and one that went with its group
    assert meters["failed"].trajectories == 2
    check(meters["failed"].length, [3])
    for index in range(3):
        await replay.push(rest, make_trajectory(rest, index, length=20 + index))
    jobs = {job.trajectory.index: job for job in await replay.take_scoring({"math": 3})}
    scores = [(jobs[1], Score("FAILED", message="no")), (jobs[0], Score("SCORED", 1.0))]
    assert await replay.score_many(scores) == [None, None]
    await replay.score(jobs[2], Score("SCORED", 0.0))
    meters = await replay.bias()
    assert meters["failed"].trajectories == 3
    check(meters["failed"].length, [3, 21])
    check(meters["generated"].length, [*lengths, 20, 22])
    assert meters["surplus"].trajectories == 1


# A hundred groups of two with different rewards, then a hundred longer ones with equal rewards, which dynamic sampling filters.
MIXED_LENGTHS = [4] * 200 + [12] * 200
MIXED_REWARDS = [0.0, 1.0] * 100 + [0.0, 0.0, 1.0, 1.0] * 50


async def test_what_is_trained_is_compared_with_all_that_came_to_an_end(replay: ReplayClient, limits: Limits) -> None:
    """Long trajectories that never get trained show as a length bias; the rewards, alike, as none."""
    await tighten(replay, limits, prompts_per_step=100, max_age=4, generations_per_prompt=2, filter_equal=True)
    await make(replay, await healthy_replica(replay), MIXED_LENGTHS, MIXED_REWARDS)
    await reserve(replay, 0)
    assert skews(await replay.bias()) == []  # nothing is trained so far
    await replay.commit(1, (await replay.state()).timeline)
    length, reward = skews(await replay.bias())
    assert (length.quantity, length.trained, length.ended, length.deviations) == ("length", 4, 8, -1)
    assert (reward.quantity, reward.deviations) == ("reward", 0)
    assert beyond([length, reward], 0.99) == [length]
    assert beyond([length, reward], 1.0) == []
    assert beyond([length, reward], None) == []


async def test_what_still_waits_is_no_selection(replay: ReplayClient, limits: Limits) -> None:
    """Under `ordered` nothing is dropped: while rewards rise there is no bias, though what was generated last is better."""
    await tighten(replay, limits, prompts_per_step=100, max_age=4, generations_per_prompt=2)
    await make(replay, await healthy_replica(replay), [3, 5] * 100 + [12] * 200, [0.0, 1.0] * 100 + [1.0] * 200)
    await reserve(replay, 0)
    await replay.commit(1, (await replay.state()).timeline)
    assert [skew.deviations for skew in skews(await replay.bias())] == [0, 0]


async def test_the_service_warns_once_and_shows_the_bias_everywhere(
    replay: ReplayClient, limits: Limits, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await tighten(replay, limits, prompts_per_step=100, max_age=4, filter_equal=True)
    await make(replay, await healthy_replica(replay), MIXED_LENGTHS, MIXED_REWARDS)
    await reserve(replay, 0)
    await replay.commit(1, (await replay.state()).timeline)
    config = config_of(tmp_path, redis_url=redis_url, bias_warning=0.9)
    config = config.model_copy(update={"run": config.run.model_copy(update={"id": replay.run_id})})
    async with serving(config) as (http, _):

        async def shown() -> bool:
            return "headrace_replay_selection_bias{" in (await http.get("/metrics")).text

        await eventually(shown)
        before = (await replay.redis.info("commandstats"))["cmdstat_fcall"]["calls"]

        async def looked_again() -> bool:
            return (await replay.redis.info("commandstats"))["cmdstat_fcall"]["calls"] > before + 6

        await eventually(looked_again)  # and it is still biased
        metrics = (await http.get("/metrics")).text
        told = (await http.get("/v1/bias")).json()
    for line in (
        'headrace_replay_selection_bias{quantity="length"} -1.0',
        'headrace_replay_selection_bias{quantity="reward"} 0.0',
        'headrace_replay_trajectories_total{moment="generated"} 400.0',
        'headrace_replay_trajectory_length_tokens_bucket{le="4.0",moment="generated"} 200.0',
        'headrace_replay_trajectory_length_tokens_bucket{le="16.0",moment="generated"} 400.0',
        'headrace_replay_trajectory_length_tokens_sum{moment="trained"} 800.0',
        'headrace_replay_trajectory_reward_bucket{le="0.0",moment="trained"} 100.0',
        'headrace_replay_trajectory_reward_mean{moment="trained"} 0.5',
    ):
        assert line in metrics
    assert told["meters"]["generated"]["length"]["mean"] == 8
    assert told["meters"]["generated"]["length"]["buckets"][0] == [4, 200]
    assert told["meters"]["failed"]["reward"] == {"count": 0, "mean": None, "deviation": None, "buckets": []}
    assert told["skews"][0] == {"quantity": "length", "deviations": -1, "trained": 4, "ended": 8}
    said = "mean length of trained trajectories 4, of all that have ended 8: -1.00 standard deviations"
    events = [fields for _, fields in await replay.events("0", 1.0) if fields["kind"] == "selection bias"]
    assert [(event["quantity"], event["message"]) for event in events] == [("length", said)]
    assert [said in record.getMessage() for record in caplog.records if "bias" in record.getMessage()] == [True]

    out = io.StringIO()
    show(out, await replay.state(), [], [], await replay.bias(), 0.9)
    lines = out.getvalue().splitlines()
    assert f"bias          {said}" in lines
    assert any(line.startswith("trained       200 trajectories, length 4 ± 0, reward 0.5 ± 0.5") for line in lines)
