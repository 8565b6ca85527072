"""Dynamic sampling: groups whose rewards are all equal are filtered, and others are trained in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from headrace.base.errors import InvalidCall, SamplingStarved
from headrace.config import Config
from headrace.records.score import Score
from headrace.replay import Limits, ReplayClient, Waiting
from headrace_services.replay.main import make_limits
from tests.support.buffer import (
    begin,
    enqueue,
    healthy_replica,
    lease_one,
    make_group,
    push_all,
    refit,
    reserve,
    rewind,
    total,
)

pytestmark = pytest.mark.limits(filter_equal=True)


async def generate(replay: ReplayClient, replica: str, rewards: Sequence[Sequence[float]]) -> list[str]:
    """Lease a group for each row of rewards, push it, and score trajectory i with entry i."""
    leases = await replay.lease(replica, len(rewards))
    wanted = {lease.group.id: row for lease, row in zip(leases, rewards, strict=True)}
    for lease in leases:
        await push_all(replay, lease)
    for job in await replay.take_scoring({"math": 64}):
        await replay.score(job, Score("SCORED", wanted[job.group.id][job.trajectory.index]))
    return list(wanted)


async def test_law_1_conservation_equal_rewards_are_filtered_and_replaced(replay: ReplayClient) -> None:
    replica = await begin(replay, 6)
    await generate(replay, replica, [[1, 1], [0, 1], [0, 0], [0, 0]])
    assert (await replay.state()).counts == {"queued": 2, "open": 0, "scoring": 0, "ready": 1, "filtered": 3}
    assert await replay.reserve(0, (await replay.state()).timeline) == Waiting(1, 2)
    # the filtered groups have left the line: two more may be leased, and the first of them completes the batch
    await generate(replay, replica, [[0.25, 0.5], [1, 0]])
    batch = await reserve(replay, 0)
    assert batch.groups == ("e0-train-1", "e0-train-4")
    assert (batch.scored, batch.filtered) == (6, 3)
    assert await total(replay) == 6
    await replay.commit(1, (await replay.state()).timeline)
    held = await replay.group("e0-train-0")
    assert held is None
    assert {key async for key in replay.redis.scan_iter(match=f"hr:{{{replay.run_id}}}:*:p:*")} == {
        trajectory["key"].encode() for trajectory in ((await replay.group("e0-train-5")) or {})["trajectories"]
    }


async def test_law_1_conservation_a_filtered_group_never_comes_back(replay: ReplayClient) -> None:
    await generate(replay, await begin(replay, 2), [[1, 1]])
    state = await rewind(replay, 0)
    assert await replay.enqueue([make_group(0), make_group(1)], state.timeline, refill=True) == 0
    assert (await replay.state()).counts["filtered"] == 1


async def test_rewards_are_compared_after_clamping(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, reward_min=0.0, reward_max=1.0))
    replica = await begin(replay, 4)
    await generate(replay, replica, [[1.0, 7.5], [-3.0, 0.0], [-3.0, 7.5], [0.1, 0.1001]])
    assert {"ready": 2, "filtered": 2}.items() <= (await replay.state()).counts.items()
    assert (await reserve(replay, 0)).groups == ("e0-train-2", "e0-train-3")


@pytest.mark.parametrize("by_components", [False, True])
async def test_rewards_that_differ_by_rounding_are_equal(
    replay: ReplayClient, limits: Limits, by_components: bool
) -> None:
    """As the trainer says: the advantages would be 0. NeMo RL's rewards are float32, which has no 0.1 + 0.2."""
    await replay.open_run(dataclasses.replace(limits, max_age=3, filter_components=by_components))
    rows = [[0.1 + 0.2, 0.3], [-1e-9, 1e-9], [1e8, 1e8 + 1], [0.3, 0.30001], [-0.3, 0.3], [0.0, 0.0]]
    replica = await begin(replay, len(rows))
    if by_components:
        groups = [[{"a": reward} for reward in row] for row in rows]
        assert await score_components(replay, replica, groups) == [3, 3]
    else:
        await generate(replay, replica, rows)
    held = [await replay.group(f"e0-train-{order}") for order in range(len(rows))]
    assert [group is None for group in held] == [True, False, True, False, False, True]


async def test_rounding_of_large_rewards_in_narrow_bounds_is_none(replay: ReplayClient, limits: Limits) -> None:
    """Scaling makes 0 and 0.5 of these."""
    await replay.open_run(dataclasses.replace(limits, reward_min=1e6, reward_max=1e6 + 1))
    await generate(replay, await begin(replay, 1), [[1e6, 1e6 + 0.5]])
    assert (await replay.state()).counts["ready"] == 1


async def score_components(
    replay: ReplayClient, replica: str, groups: Sequence[Sequence[dict[str, float]]]
) -> list[int]:
    """Lease a group for each row, score trajectory i with the components in entry i, and their sum as its reward; how many groups are
    ready and filtered then."""
    leases = await replay.lease(replica, len(groups))
    wanted = {lease.group.id: row for lease, row in zip(leases, groups, strict=True)}
    for lease in leases:
        await push_all(replay, lease)
    for job in await replay.take_scoring({"math": 64}):
        components = wanted[job.group.id][job.trajectory.index]
        metadata = {"detail": {"of": [1, "two", None, 2**40]}}
        await replay.score(job, Score("SCORED", sum(components.values()), components, metadata))
    counts = (await replay.state()).counts
    return [counts.get("ready", 0), counts.get("filtered", 0)]


async def test_by_components_a_group_is_filtered_only_if_all_are_equal(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, filter_components=True, reward_min=0.0, reward_max=1.0))
    await enqueue(replay, range(4))
    equal = [{"a": 1.0, "b": 0.25}, {"b": 0.25, "a": 7.5}]  # after clamping
    one_differs = [{"a": 1.0, "b": 0.25}, {"a": 1.0, "b": 0.5}]
    same_sum = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]
    more_names = [{"a": 1.0}, {"a": 1.0, "b": 0.0}]
    replica = await healthy_replica(replay)
    assert await score_components(replay, replica, [equal, one_differs, same_sum, more_names]) == [3, 1]
    assert (await replay.state()).counts["ready"] == 3


@pytest.mark.parametrize(("estimator", "by_components"), [("grpo", False), ("gdpo", True)])
def test_under_gdpo_groups_are_filtered_by_components(estimator: str, by_components: bool) -> None:
    grpo = {"use_dynamic_sampling": True, "adv_estimator": {"name": estimator}}
    found = make_limits(Config.model_validate({"grpo": grpo}))
    assert (found.filter_equal, found.filter_components) == (True, by_components)


async def test_by_components_a_group_without_any_goes_on_to_the_trainer(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, filter_components=True))
    assert await score_components(replay, await begin(replay, 1), [[{}, {}]]) == [1, 0]


async def test_by_components_a_malformed_record_is_refused(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, filter_components=True))
    lease = await lease_one(replay)
    await push_all(replay, lease)
    job = (await replay.take_scoring({"math": 64}))[0]
    score = {
        "group": job.group.id,
        "index": job.trajectory.index,
        "token": job.token,
        "status": "SCORED",
        "reward": 1.0,
        "build": "",
    }
    for record in (b"\xc1", b"", b"\x01", b"\x80"):
        with pytest.raises(InvalidCall, match="filtered by"):
            await replay._connection.call("score", record, scores=[score])
    await replay.score(job, Score("SCORED", 1.0, {"a": 1.0, "b": 0.0}))


async def test_validation_is_never_filtered(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    await replay.enqueue([make_group(0, lane="validation")], timeline)
    await generate(replay, await healthy_replica(replay), [[1, 1]])
    done, failed, unknown = await replay.read_evaluated(["e0-validation-0"])
    assert (len(done), failed, unknown) == (1, {}, [])


async def test_without_dynamic_sampling_equal_rewards_are_trained(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, filter_equal=False))
    await generate(replay, await begin(replay, 2), [[1, 1], [0, 0]])
    assert (await reserve(replay, 0)).filtered == 0


async def test_surplus_valid_groups_stay_for_the_next_step(replay: ReplayClient) -> None:
    replica = await begin(replay, 4)
    await generate(replay, replica, [[0, 1], [0, 1], [0, 1], [1, 1]])
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-1")
    await refit(replay, 1, [replica])
    assert await replay.reserve(1, (await replay.state()).timeline) == Waiting(1, 2)
    await enqueue(replay, [4])
    await generate(replay, replica, [[0, 1]])
    batch = await reserve(replay, 1)
    assert batch.groups == ("e0-train-2", "e0-train-4")
    assert (batch.scored, batch.filtered) == (1, 0)


async def test_reserving_again_tells_the_same_counts(replay: ReplayClient) -> None:
    replica = await begin(replay, 3)
    await generate(replay, replica, [[1, 1], [0, 1], [0, 1]])
    assert await reserve(replay, 0) == await reserve(replay, 0)


async def test_a_batch_that_takes_too_many_groups_is_refused_by_name(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, max_scored_per_step=4))
    replica = await begin(replay, 12)
    timeline = (await replay.state()).timeline
    await generate(replay, replica, [[1, 1], [0, 0], [1, 1], [0, 1]])
    assert isinstance(await replay.reserve(0, timeline), Waiting)  # exactly the limit
    await generate(replay, replica, [[1, 1]])
    with pytest.raises(SamplingStarved, match=r"5 groups.*more than 4.*4 of them"):
        await replay.reserve(0, timeline)
    # what is ready after all is handed out, and the count begins anew
    await generate(replay, replica, [[0, 1]])
    assert (await reserve(replay, 0)).scored == 6
    await refit(replay, 1, [replica])
    await generate(replay, replica, [[1, 1]])
    assert isinstance(await replay.reserve(1, timeline), Waiting)


async def test_ready_groups_in_line_do_not_count_against_the_limit(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, max_scored_per_step=2, max_age=3))
    replica = await begin(replay, 8)
    (straggler,) = await replay.lease(replica, 1)
    await generate(replay, replica, [[0, 1]] * 7)
    timeline = (await replay.state()).timeline
    assert isinstance(await replay.reserve(0, timeline), Waiting)
    await replay.release(straggler, "engine died", failed=True)
    assert (await reserve(replay, 0)).scored == 7


async def test_law_6_liveness_the_limit_begins_anew_with_a_rewind(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, max_scored_per_step=2))
    replica = await begin(replay, 12)
    await generate(replay, replica, [[1, 1]] * 3)
    with pytest.raises(SamplingStarved):
        await replay.reserve(0, (await replay.state()).timeline)
    state = await rewind(replay, 0)
    assert isinstance(await replay.reserve(0, state.timeline), Waiting)


async def test_law_4_fencing_a_lease_of_a_filtered_group_is_over(replay: ReplayClient) -> None:
    replica = await begin(replay, 1)
    (lease,) = await replay.lease(replica, 1)
    await push_all(replay, lease)
    for job in await replay.take_scoring({"math": 64}):
        await replay.score(job, Score("SCORED", 1.0))
    assert (await replay.heartbeat(replica, [lease.token])).lost == (lease.token,)
    assert (await replay.stats())["bytes"] == 0
    assert (await replay.stats())["leases"] == 0
