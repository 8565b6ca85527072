"""A member dies at any moment of a step from one backend to the next: a process that SIGKILL ends. The refit goes on with the others, and
only a backend that failed while all were there is given up. Groups of NCCL are stand-ins, those of gloo are real."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from headrace.replay import Limits, ReplayClient
from headrace_services.refit.channel import Channel
from tests.support.buffer import tighten
from tests.support.nccl_stand_in import MOMENTS, GpuTrainer, Moment, Nccl, OnGpu, start_doomed
from tests.support.small_replica import running
from tests.support.waiting import STALL_S, eventually

TIMELINE = "timeline-1"
NIGHTLY = pytest.mark.nightly  # calls to a half group end with its timeout
# Of NCCL that connects nobody, who dies before its attempt or in it, and who dies in the attempt by gloo that follows.
STEPS: list[tuple[Moment, int]] = [("acknowledged", 0), ("gathered", 0), *((moment, 1) for moment in MOMENTS)]
BY_DAY = {("gathered", 0), ("received", 1)}

pytestmark = pytest.mark.timeout(180)


class Pair:
    """A trainer, a replica that survives, and one that is `doomed`."""

    def __init__(self, replay: ReplayClient, model: Path) -> None:
        self.trainer = GpuTrainer(replay, model, TIMELINE, bucket_bytes=65536, timeout_s=20.0)
        self.survivor = OnGpu(replay, model)

    async def prove_model(self, replay: ReplayClient, version: int) -> None:
        """The survivor holds what the trainer sent, and the buffer says so."""
        (alive,) = [replica for replica in await replay.replicas() if replica.takes_part]
        assert (alive.id, alive.state, alive.version) == (self.survivor.id, "HEALTHY", version)
        assert self.survivor.installed == [*range(version + 1)]  # each version once
        held = self.survivor._model.state_dict()
        for name, tensor in self.trainer.source.weights().items():
            assert torch.equal(held[name], tensor), name


@pytest.fixture
async def pair(
    replay: ReplayClient, limits: Limits, tiny_model: Path, nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    others = {*threading.enumerate()}  # a test before may have left a call behind that ends later
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # one way of NCCL is enough
    await tighten(replay, limits, replica_dead_s=STALL_S)
    await replay.rewind(0, TIMELINE)
    pair = Pair(replay, tiny_model)
    async with running(pair.survivor.run()):
        await pair.trainer.see(1)
        yield pair
        nccl.over.set()
        await pair.trainer.sender.aclose()
    own = "weight-channel"
    await eventually(lambda: not [each for each in {*threading.enumerate()} - others if each.name.startswith(own)])


@pytest.mark.parametrize(
    ("moment", "epoch"), [pytest.param(*step, marks=() if step in BY_DAY else NIGHTLY) for step in STEPS]
)
async def test_a_death_in_a_step_down_costs_only_the_dead(
    pair: Pair, replay: ReplayClient, redis_url: str, tiny_model: Path, nccl: Nccl, moment: Moment, epoch: int
) -> None:
    doomed = start_doomed(redis_url, replay.run_id, tiny_model, moment, epoch, nccl_hangs=True)

    def refuse() -> None:
        if (moment, epoch) == ("gathered", 0):
            doomed.wait(60)
        nccl.refuse()

    nccl.fails = {("nccl-blocking", True): refuse, ("nccl-blocking", False): nccl.hang}
    await pair.trainer.see(2)
    report = await pair.trainer.refit(0)
    assert await asyncio.to_thread(doomed.wait) == -signal.SIGKILL
    assert pair.survivor.id in report.verified
    assert report.failed == frozenset()
    assert report.given_up == ("nccl-blocking",)
    # that attempt's reason: a member that died in one is no reason to give a backend up
    said = pair.trainer.sender._backends.describe_failures()
    assert "NCCL Error 7" in said
    assert "died" not in said
    by_nccl = 2 if (moment, epoch) == ("gathered", 0) else 1
    by_gloo = 2 if epoch == 1 and moment not in ("acknowledged", "received", "verified") else 1
    assert nccl.tried == ["nccl-blocking"] * by_nccl + ["gloo"] * by_gloo
    await _goes_on(pair, replay, nccl, "gloo")


@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=() if moment == "received" else NIGHTLY) for moment in MOMENTS]
)
async def test_a_death_is_no_reason_to_step_down(
    pair: Pair, replay: ReplayClient, redis_url: str, tiny_model: Path, nccl: Nccl, moment: Moment
) -> None:
    doomed = start_doomed(redis_url, replay.run_id, tiny_model, moment, 0, nccl_hangs=False)
    await pair.trainer.see(2)
    report = await pair.trainer.refit(0)
    assert await asyncio.to_thread(doomed.wait) == -signal.SIGKILL
    assert pair.survivor.id in report.verified
    assert (report.failed, report.given_up) == (frozenset(), ())
    by_nccl = 1 if moment in ("acknowledged", "received", "verified") else 2
    assert nccl.tried == ["nccl-blocking"] * by_nccl
    await _goes_on(pair, replay, nccl, "nccl-blocking")


async def _goes_on(pair: Pair, replay: ReplayClient, nccl: Nccl, backend: str) -> None:
    """The survivor holds the first version. The next one reaches it by `backend` at the first attempt, and the dead count no more."""
    await eventually(lambda: _only_survivor(replay, pair.survivor.id))
    await pair.prove_model(replay, 0)
    before = len(nccl.tried)
    pair.trainer.source.train()
    report = await pair.trainer.refit(1)
    assert (report.verified, report.members, report.attempts) == ((pair.survivor.id,), (pair.survivor.id,), 1)
    assert set(nccl.tried[before:]) <= {backend}
    channel = pair.trainer.sender._channels.open
    assert isinstance(channel, Channel)
    assert (channel.membership.backend, channel.membership.world_size) == (backend, 2)
    assert backend not in pair.trainer.sender._backends._lost
    await pair.prove_model(replay, 1)


async def _only_survivor(replay: ReplayClient, survivor: str) -> bool:
    return [replica.id for replica in await replay.replicas() if replica.takes_part] == [survivor]
