"""Replicas that validate beside training: they keep the version, they alone lease its groups, and nothing waits for them."""

from __future__ import annotations

import pytest

from headrace.base.errors import LeaseLost
from headrace.replay import Lease, ReplayClient
from tests.support.buffer import (
    enqueue,
    group_of,
    healthy_replicas,
    make_group,
    make_trajectory,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
)
from tests.support.wake_ups import WakeUps

ALL = 64  # groups that each replica asks for


@pytest.fixture
async def fleet(replay: ReplayClient) -> list[str]:
    """Three verified replicas, and prompts for two steps."""
    replicas = await healthy_replicas(replay, 3)
    await enqueue(replay, range(8))
    return replicas


async def validate(replay: ReplayClient, version: int, validators: list[str], prompts: int = 2) -> None:
    """Begin the validation of a version by these replicas."""
    timeline = (await replay.state()).timeline
    await replay.drop_validation(timeline, version, validators)
    groups = [make_group(i, n=1, lane="validation", group_id=f"v{version}-{i}") for i in range(prompts)]
    assert await replay.enqueue(groups, timeline, validation=version) == prompts


async def leased(replay: ReplayClient, replica: str) -> list[str]:
    return [lease.group.id for lease in await replay.lease(replica, ALL)]


async def states(replay: ReplayClient) -> dict[str, tuple[str, int, bool]]:
    return {replica.id: (replica.state, replica.version, replica.validates) for replica in await replay.replicas()}


async def train(replay: ReplayClient, leases: list[Lease], step: int) -> None:
    for lease in leases:
        await push_all(replay, lease)
    await score_all(replay)
    await reserve(replay, step)


async def test_law_2_a_validator_keeps_the_version_until_all_is_evaluated(
    replay: ReplayClient, fleet: list[str], woken: WakeUps
) -> None:
    first, second, third = fleet
    await validate(replay, 0, [first])
    assert (await replay.state()).validation == 0
    validation = await replay.lease(first, ALL)
    assert [lease.group.id for lease in validation] == ["v0-0", "v0-1"]
    await train(replay, await replay.lease(second, 2), 0)
    await refit(replay, 1, fleet)  # it is not asked
    assert await states(replay) == {
        first: ("HEALTHY", 0, True),
        second: ("HEALTHY", 1, False),
        third: ("HEALTHY", 1, False),
    }
    for lease in validation:
        await push_all(replay, lease)
    assert (await states(replay))[first] == ("HEALTHY", 0, True)  # the scores are missing
    await woken.take()
    await score_all(replay)
    assert "work" in await woken.take(), "a replica that may train again is woken"
    assert (await states(replay))[first] == ("HEALTHY", 0, False)
    evaluated, _, _ = await replay.read_evaluated(["v0-0", "v0-1"])
    assert {t.newest_version for one in evaluated for t, _ in one.trajectories} == {0}
    await refit(replay, 1, [first])
    assert (await states(replay))[first] == ("HEALTHY", 1, False)
    assert await leased(replay, first) != []


async def test_law_2_who_validated_older_weights_takes_no_part_in_the_next(
    replay: ReplayClient, fleet: list[str]
) -> None:
    """It is still verified, since no epoch was for it, when the next validation begins."""
    first, second, _ = fleet

    async def finish_all(replica: str) -> list[str]:
        leases = await replay.lease(replica, ALL)
        for lease in leases:
            await push_all(replay, lease)
        await score_all(replay)
        return [lease.group.id for lease in leases if lease.group.lane == "validation"]

    await validate(replay, 0, [first])
    await train(replay, await replay.lease(second, 2), 0)
    await refit(replay, 1, fleet)
    assert await finish_all(first) == ["v0-0", "v0-1"]
    await validate(replay, 1, [])
    assert (await states(replay))[first] == ("HEALTHY", 0, False)
    assert await finish_all(first) == []
    orphan, suspect = await replay.lease(second, 2)
    assert [orphan.group.id, suspect.group.id] == ["v1-0", "v1-1"]
    await replay.release(orphan, "it drains", failed=False)
    assert await finish_all(first) == []
    await replay.deregister(second, died=True)
    assert await finish_all(first) == []
    await refit(replay, 1, [first])
    assert await finish_all(first) == ["v1-1"]  # a suspect goes alone
    assert await finish_all(first) == ["v1-0"]


async def test_law_6_validators_lease_validations_others_training(replay: ReplayClient, fleet: list[str]) -> None:
    first, second, _ = fleet
    held = await replay.lease(first, 1)  # from before
    await validate(replay, 0, [first])
    await push_all(replay, held[0])  # it finishes what it has
    assert await leased(replay, first) == ["v0-0", "v0-1"]
    assert await leased(replay, first) == []  # there is room for three training groups
    assert (await replay.stats())["line"] == 1, "and it takes no place in line for any"
    assert await leased(replay, second) == ["e0-train-1", "e0-train-2", "e0-train-3"]


async def test_law_6_a_validator_that_waited_has_no_share_of_training(replay: ReplayClient, fleet: list[str]) -> None:
    first, second, third = fleet
    assert len(await replay.lease(third, ALL)) == 4  # what admission lets be in work
    assert await leased(replay, first) == []  # so it waits
    await validate(replay, 0, [first])
    await replay.deregister(third)
    assert len(await replay.lease(second, ALL)) == 4


async def test_law_6_another_validator_goes_on_with_what_a_dead_one_held(
    replay: ReplayClient, fleet: list[str]
) -> None:
    first, second, third = fleet
    await validate(replay, 0, [first])
    (lease, _) = await replay.lease(first, ALL)
    await replay.save(lease, make_trajectory(lease, 0, length=2))
    await replay.deregister(first, died=True)
    assert (await replay.stats())["suspects"] == 2
    assert [await leased(replay, replica) for replica in (second, third)] == [
        [f"e0-train-{order}" for order in range(4)],
        [],
    ]  # the training goes on, and nobody evaluates
    timeline = (await replay.state()).timeline
    await replay.drop_validation(timeline, 0, [first, third])
    assert (await states(replay))[third] == ("HEALTHY", 0, True)
    (again,) = await replay.lease(third, 1)
    assert again.group.id == lease.group.id
    await push_all(replay, again)
    assert (await group_of(replay, again))["failures"] == 0
    assert await leased(replay, third) == ["v0-1"]
    with pytest.raises(LeaseLost):
        await replay.push(lease, make_trajectory(lease, 0))


async def test_law_4_holders_of_the_version_are_named_once(replay: ReplayClient, fleet: list[str]) -> None:
    first, second, _ = fleet
    timeline = (await replay.state()).timeline
    await validate(replay, 1, fleet)  # which none holds
    assert not any(validates for _, _, validates in (await states(replay)).values())
    await validate(replay, 2, [])
    call = replay._connection.fcall(
        "drop_validation", client="trainer", number=7, timeline=timeline, before=2, validators=[]
    )
    await replay._connection.pipeline([call])
    await refit(replay, 2, [first])
    late = replay._connection.fcall(
        "drop_validation", client="trainer", number=7, timeline=timeline, before=2, validators=[first, second]
    )
    await replay._connection.pipeline([late])
    assert not (await states(replay))[first][2]


async def test_law_2_a_replica_that_pulls_never_validates_beside_training(
    replay: ReplayClient, fleet: list[str]
) -> None:
    """It takes newer weights by itself."""
    timeline = (await replay.state()).timeline
    await replay.register_puller("puller", {})
    await replay.offer("offer", 0, timeline, {}, [0.0], 1e-3, 1e-3)
    assert (await replay.verify("puller", "offer", [0.0])).verified
    await validate(replay, 0, ["puller", fleet[0]])
    assert [name for name, (_, _, validates) in (await states(replay)).items() if validates] == [fleet[0]]
    assert await leased(replay, fleet[0]) == ["v0-0", "v0-1"]


@pytest.mark.parametrize("how", ["dropped", "the next", "rewound"])
async def test_law_6_nobody_validates_once_the_validation_is_over(
    replay: ReplayClient, fleet: list[str], how: str
) -> None:
    first, second, _ = fleet
    await validate(replay, 0, [first])
    assert await leased(replay, first) == ["v0-0", "v0-1"]
    timeline = (await replay.state()).timeline
    if how == "rewound":
        await rewind(replay, 0)
        assert not any(validates for _, _, validates in (await states(replay)).values())
        await refit(replay, 0, fleet)
        await validate(replay, 0, [])
    elif how == "dropped":
        await replay.drop_validation(timeline, 1)
        assert (await replay.state()).validation == -1
    else:
        await refit(replay, 1, [second])
        await validate(replay, 1, [])
    assert not any(validates for _, _, validates in (await states(replay)).values())
    expected = {"dropped": [], "the next": ["v1-0", "v1-1"], "rewound": ["v0-0", "v0-1"]}[how]
    assert (await leased(replay, second))[: len(expected)] == expected
