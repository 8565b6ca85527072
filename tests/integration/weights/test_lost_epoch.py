"""A buffer whose server loses what it was told of an epoch: the trainer says so, and sends again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import Fenced, ReplayUnavailable, WrongTimeline
from headrace.config import Config
from headrace.replay import BufferRetry, Epoch, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.refit.sender import RefitReport, WeightSender

TIMELINE, REPLICA, REASON = "timeline-1", "replica", "its disk is full"
MOMENTS = ["gathering", "beginning", "sending", "ending"]


class Forgetful(ReplayClient):
    """The trainer's client of a server that once, at `moment`, loses the epoch: the fault that is injected here."""

    moment: str | None = None
    begun = False

    async def epoch(self) -> Epoch | None:
        await self._at("sending" if self.begun else "gathering")
        return await super().epoch()

    async def begin_epoch(self, *arguments: Any) -> Epoch:
        await self._at("beginning")
        self.begun = True
        return await super().begin_epoch(*arguments)

    async def end_epoch(self, epoch: str, *, aborted: bool) -> Epoch:
        await self._at("ending")
        return await super().end_epoch(epoch, aborted=aborted)

    async def _at(self, moment: str) -> None:
        if self.moment == moment:
            self.moment = None
            await self.lose()

    async def lose(self) -> None:
        base = f"hr:{{{self.run_id}}}:{(await self.state()).incarnation}:"
        await self.redis.delete(base + "epoch", base + "members")


class Source:
    def metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [("weight", "float32", (4,))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(4)


@pytest.fixture
async def trainer(redis_url: str, replay: ReplayClient, run_id: str) -> AsyncIterator[Forgetful]:
    """Its fleet is one replica, which comes to every epoch and then refuses it."""
    await replay.rewind(0, TIMELINE)
    await replay.register(REPLICA, {"device": "cpu"})
    client = Forgetful(open_redis(redis_url), run_id)
    member = asyncio.create_task(take_part(replay))
    yield client
    member.cancel()
    await asyncio.wait((member,))
    await client.aclose()


async def take_part(replay: ReplayClient) -> None:
    while True:
        epoch = await replay.epoch()
        with contextlib.suppress(Fenced):  # the epoch was lost, or is over
            if epoch is not None and epoch.state == "announced":
                await replay.acknowledge(REPLICA, epoch.id)
            elif epoch is not None and epoch.state == "transfer":
                await replay.refuse(REPLICA, epoch.id, REASON)
        await replay.wait_epoch(1.0)


async def refit(trainer: Forgetful, retry: BufferRetry) -> RefitReport:
    sender = WeightSender(Config.model_validate({"weight_channel": {"timeout_s": 20.0}}), trainer)
    ids, logprobs = np.arange(3, dtype=np.int32), np.zeros(2, dtype=np.float32)
    try:
        return await retry(lambda: sender.refit(0, TIMELINE, Source(), ids, logprobs))
    finally:
        await sender.aclose()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_refit_whose_epoch_the_server_lost_is_done_again(trainer: Forgetful, moment: str) -> None:
    trainer.moment = moment
    with pytest.raises(ReplayUnavailable, match="lost epoch"):
        await refit(trainer, BufferRetry(0.0))
    trainer.moment, trainer.begun = moment, False
    report = await refit(trainer, BufferRetry(60.0))
    assert trainer.moment is None
    assert (report.verified, report.refused, report.failed) == ((), {REPLICA: REASON}, {REPLICA})


async def test_a_transfer_that_the_server_takes_for_announced_is_done_again(trainer: Forgetful) -> None:
    async def fall_back() -> None:
        base = f"hr:{{{trainer.run_id}}}:{(await trainer.state()).incarnation}:"
        await trainer.redis.hset(base + "epoch", "state", "announced")

    trainer.moment, trainer.lose = "sending", fall_back  # type: ignore[method-assign]
    with pytest.raises(ReplayUnavailable, match="lost epoch"):
        await refit(trainer, BufferRetry(0.0))


async def test_law_4_a_trainer_whose_run_was_taken_over_hears_of_it(trainer: Forgetful, replay: ReplayClient) -> None:
    async def take_over() -> None:
        await replay.rewind(0, "timeline-2")
        await replay.open_epoch("another", 0, "timeline-2", {})

    trainer.moment, trainer.lose = "sending", take_over  # type: ignore[method-assign]
    with pytest.raises(WrongTimeline):
        await refit(trainer, BufferRetry(60.0))
