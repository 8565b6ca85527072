"""What the trainer hears of members whose log-probabilities of the probe are not its own, on a real buffer and weight channel."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.replay import RefitVerdict, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.refit.sender import RefitReport, WeightSender
from tests.support.buffer import keep_alive
from tests.support.small_replica import SmallReplica, running
from tests.support.source_model import SourceModel

TIMEOUT_S = 20.0


class Mute(ReplayClient):
    """Of a replica that never says what it computed: the fault that is injected here."""

    async def verify(self, *arguments: object) -> RefitVerdict:
        await asyncio.Event().wait()
        raise AssertionError


async def refit(replay: ReplayClient, source: SourceModel, probe: np.ndarray) -> RefitReport:
    sender = WeightSender(Config.model_validate({"weight_channel": {"timeout_s": TIMEOUT_S}}), replay)
    try:
        return await sender.refit(0, (await replay.state()).timeline, source, source.probe_ids, probe)
    finally:
        await sender.aclose()


async def registered(replay: ReplayClient, count: int) -> None:
    while len(await replay.replicas()) < count:
        await replay.wait_epoch(0.1)


@pytest.mark.slow
async def test_a_member_that_computes_something_else_is_at_fault(replay: ReplayClient, tiny_model: Path) -> None:
    source = SourceModel(tiny_model)
    good, bad = SmallReplica(replay, tiny_model), SmallReplica(replay, tiny_model, faulty=True)
    async with running(good.run(), bad.run()):
        await registered(replay, 2)
        report = await refit(replay, source, source.logprobs(source.probe_ids))
    assert (report.verified, report.failed) == ((good.id,), {bad.id})
    assert report.refused[bad.id].startswith("log-probabilities of the probe differ by 1")
    # the rendezvous, which members read, has the question and not the answer
    epoch = await replay.epoch()
    assert epoch is not None
    assert [name for name in epoch.rendezvous if "probe" in name or "toler" in name] == ["probe_token_ids"]


@pytest.mark.slow
@pytest.mark.nightly  # it takes the whole deadline
async def test_a_member_that_never_says_what_it_computed_is_at_fault(
    replay: ReplayClient, redis_url: str, tiny_model: Path
) -> None:
    source = SourceModel(tiny_model)
    mute = Mute(open_redis(redis_url), replay.run_id)
    good, silent = SmallReplica(replay, tiny_model), SmallReplica(mute, tiny_model)
    async with running(good.run(), silent.run(), keep_alive(replay, silent.id)):
        await registered(replay, 2)
        report = await refit(replay, source, source.logprobs(source.probe_ids))
    await mute.aclose()
    assert (report.verified, report.failed) == ((good.id,), {silent.id})
    assert list(report.refused) == [silent.id]
    assert "silent for 20 s (weight_channel.timeout_s)" in report.refused[silent.id]


async def test_a_trainer_with_nonfinite_log_probabilities_sends_nothing(replay: ReplayClient, tiny_model: Path) -> None:
    source = SourceModel(tiny_model)
    probe = np.full(source.probe_ids.size - 1, math.nan, np.float32)
    with pytest.raises(ServiceError, match=r"version 0 .* not finite"):
        await refit(replay, source, probe)
    assert await replay.epoch() is None
