"""A replica that takes the weights slowly, and lives: a process that stops (SIGSTOP) before each part, and goes on when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.base.errors import WeightChannelError
from headrace.replay import ReplayClient
from headrace_services.refit.sender import WeightSender
from tests.support.buffer import make_group
from tests.support.forks import Forked
from tests.support.small_replica import SmallReplica, running
from tests.support.stopping_replica import is_stopped, start_stopping
from tests.support.waiting import eventually
from tests.support.weight_trainer import Trainer

TIMELINE = "timeline-1"

# of a transfer: what the slow one exceeds is waited for, and a busy machine must be able to send the model within it
TIMEOUT_S = 30.0

# one that is stopped sends no heartbeat, and lives on all the same
pytestmark = [pytest.mark.timeout(300), pytest.mark.limits(replica_dead_s=4 * TIMEOUT_S)]


class Counting(SmallReplica):
    """`received`: how often it had the whole model; `torn`: how often a transfer to it ended before that; `begun`: when one began."""

    received = torn = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.begun = threading.Event()

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.received += 1
        super().load(weights)

    def _receive(self, *given: object) -> None:
        self.begun.set()
        try:
            super()._receive(*given)  # type: ignore[arg-type]
        except WeightChannelError:
            self.torn += 1
            raise


class Slow:
    """The process of a slow replica. While it is `held`, it goes on only when its transfer is over."""

    def __init__(self, process: Forked, sender: WeightSender) -> None:
        self.process = process
        self.stops = 0
        self.stopped = asyncio.Event()
        self.held = False
        self._sender = sender

    async def pace(self) -> None:
        while True:
            await eventually(lambda: is_stopped(self.process.pid))
            self.stops += 1
            self.stopped.set()
            channel = self._sender._channels.open
            await eventually(lambda: not self.held or channel is None or channel._closed.is_set())  # noqa: B023
            os.kill(self.process.pid, signal.SIGCONT)

    def hold(self) -> None:
        self.held = True
        self.stopped.clear()


@contextlib.asynccontextmanager
async def slow_replica(url: str, trainer: Trainer, model: Path) -> AsyncIterator[Slow]:
    slow = Slow(start_stopping(url, trainer.replay.run_id, model), trainer.sender)
    try:
        async with running(slow.pace()):
            yield slow
    finally:
        slow.process.kill()
        await asyncio.to_thread(slow.process.wait)


def begin_after(trainer: Trainer, replica: Counting) -> None:
    """Have the trainer's thread begin a transfer half a second after the replica's, as a busy machine may."""
    send = trainer.sender._broadcast

    def late(*given: Any) -> None:
        replica.begun.wait()
        time.sleep(0.5)
        send(*given)

    replica.begun.clear()
    trainer.sender._broadcast = late  # type: ignore[method-assign]


async def test_a_refit_waits_for_a_slow_replica_within_its_time(
    replay: ReplayClient, redis_url: str, tiny_model: Path
) -> None:
    await replay.rewind(0, TIMELINE)
    trainer, quick = Trainer(replay, tiny_model, TIMELINE, bucket_bytes=2**19), Counting(replay, tiny_model)
    async with running(quick.run()), slow_replica(redis_url, trainer, tiny_model) as slow:
        await trainer.see(2)
        report = await trainer.refit(0)
        assert (len(report.verified), report.attempts, report.refused) == (2, 1, {})
        assert slow.stops > 2
        assert (quick.received, quick.torn) == (1, 0)
        await trainer.sender.aclose()


async def test_one_that_is_too_slow_keeps_no_other_from_the_weights(
    replay: ReplayClient, redis_url: str, tiny_model: Path
) -> None:
    await replay.rewind(0, TIMELINE)
    trainer = Trainer(replay, tiny_model, TIMELINE, bucket_bytes=2**19, timeout_s=TIMEOUT_S, max_retries=0)
    quick = Counting(replay, tiny_model)
    async with running(quick.run()), slow_replica(redis_url, trainer, tiny_model) as slow:
        await trainer.see(2)
        assert len((await trainer.refit(0)).verified) == 2
        trainer.source.train()
        slow.hold()
        begin_after(trainer, quick)
        report = await trainer.refit(1)
        assert slow.stopped.is_set()
        assert (report.verified, report.attempts) == ((quick.id,), 2)
        assert (quick.received, quick.torn) == (2, 1)
        (late,) = report.failed
        for token in ("weight_channel.timeout_s", "network is slow"):
            assert token in report.refused[late]
        assert report.given_up == ()
        slow.held = False  # it lives, and has the next version
        trainer.source.train()
        report = await trainer.refit(2)
        assert set(report.verified) == {quick.id, late}
        assert (quick.received, quick.torn) == (3, 1)
        await trainer.sender.aclose()


async def test_a_late_one_that_is_too_slow_troubles_nobody(
    replay: ReplayClient, redis_url: str, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others lease and generate while it receives, and it is tried once, not again at once."""
    await replay.rewind(0, TIMELINE)
    trainer = Trainer(replay, tiny_model, TIMELINE, bucket_bytes=2**19, timeout_s=TIMEOUT_S)
    quick = Counting(replay, tiny_model)
    async with running(quick.run()):
        await trainer.see(1)
        assert (await trainer.refit(0)).verified == (quick.id,)
        async with slow_replica(redis_url, trainer, tiny_model) as slow:
            await trainer.see(2)
            slow.hold()
            refit = asyncio.create_task(trainer.refit(0))
            await slow.stopped.wait()
            await replay.enqueue([make_group(0)], TIMELINE)

            async def pushed() -> bool:
                counts = (await replay.state()).counts
                return not counts.get("queued") and not counts.get("open")

            await eventually(pushed)
            assert not refit.done()
            report = await refit
            ((late, reason),) = report.refused.items()
            assert (report.members, report.verified, report.attempts, report.failed) == ((late,), (), 1, frozenset())
            for token in ("weight_channel.timeout_s", "network is slow"):
                assert token in reason
                assert [
                    record
                    for record in caplog.records
                    if record.levelno == logging.WARNING and token in record.getMessage()
                ]
            slow.held = False
            assert (await trainer.refit(0)).verified == (late,)
            assert (quick.received, quick.torn) == (1, 0)
        await trainer.sender.aclose()
