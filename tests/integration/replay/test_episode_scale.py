"""Long episodes and many runners: sizes that the design names (acceptances 4 and 10)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.config.agents import AgentsConfig
from headrace.records.score import Score
from headrace.records.trajectory import EpisodeTrajectory, episode_record
from headrace.replay import EnvironmentLimits, ReplayClient
from tests.support.buffer import healthy_replica, make_call, make_group, nonce, refit

CALLS, TOKENS = 500, 100_000
RUNNERS = 50

pytestmark = pytest.mark.limits(
    environments={"game": EnvironmentLimits(episodes=True)}, max_episode_bytes=AgentsConfig().max_episode_bytes
)


async def test_an_episode_of_500_calls_fits_the_default_bound(replay: ReplayClient) -> None:
    await replay.enqueue([make_group(0, n=1, env_name="game")], (await replay.state()).timeline)
    await healthy_replica(replay)
    runner = nonce()
    await replay.register_runner(runner, {})
    (lease,) = await replay.lease_episodes(runner, 1)
    each = TOKENS // CALLS
    calls = [
        msgspec.structs.replace(
            make_call(number - 1, length=each // 2),
            context_token_ids=np.arange(each // 2, dtype=np.int32),
            messages=({"role": "user", "content": "word " * (each // 2)},),
            answer={"role": "assistant", "content": "word " * (each // 2)},
        )
        for number in range(CALLS)
    ]
    for number, call in enumerate(calls):
        await replay.append(lease, 0, number, nonce(), call)
    record = episode_record(lease.group.id, lease.attempt, 0, calls, truncated=False, runner=runner, timings={})
    assert await replay.finish(lease, 0, record, Score("SCORED", 1.0)) is None
    held = await replay.trajectory(lease.group.id, 0)
    assert held is not None
    assert isinstance(held[0], EpisodeTrajectory)
    assert held[0].encode() == record.encode()
    assert held[0].length == TOKENS // 2


async def test_a_refit_has_nothing_to_do_with_runners(replay: ReplayClient) -> None:
    for _ in range(RUNNERS):
        await replay.register_runner(nonce(), {})
    replica = nonce()
    await replay.register(replica, {})
    epoch = await replay.open_epoch(nonce(), 0, (await replay.state()).timeline, {})
    assert epoch.members == (replica,)
    await refit(replay, 0, [replica])  # and waits for no one else
