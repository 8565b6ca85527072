"""Replicas that join a running fleet: each receives the model once, and the others don't notice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from headrace.base.errors import WeightChannelError
from headrace.replay import ReplayClient
from headrace_services.refit.rendezvous import Rendezvous
from tests.support.small_replica import SmallReplica, running
from tests.support.weight_trainer import Trainer

TIMELINE = "timeline-1"


class Counting(SmallReplica):
    """`received`: the bytes of each transfer. `torn`: the next transfer is interrupted at its end, at this replica alone."""

    def __init__(self, replay: ReplayClient, model: Path) -> None:
        super().__init__(replay, model)
        self.received: list[int] = []
        self.torn = False

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.received.append(sum(tensor.nbytes for tensor in weights.values()))
        if self.torn:
            self.torn = False
            raise WeightChannelError("its network is down")
        super().load(weights)


async def states(replay: ReplayClient) -> set[tuple[str, int]]:
    return {(replica.state, replica.version) for replica in await replay.replicas()}


async def test_joins_cost_one_model_each(replay: ReplayClient, tiny_model: Path) -> None:
    trainer = Trainer(replay, tiny_model, TIMELINE)
    await replay.rewind(0, TIMELINE)
    fleet = [Counting(replay, tiny_model) for _ in range(5)]
    async with running(*(replica.run() for replica in fleet[:2])):
        await trainer.see(2)
        assert len((await trainer.refit(0)).verified) == 2
        async with asyncio.TaskGroup() as joining:
            tasks = []
            for count, late in enumerate(fleet[2:], start=3):
                tasks.append(joining.create_task(late.run()))
                await trainer.see(count)
                report = await trainer.refit(0)
                assert (report.members, report.verified, report.attempts) == ((late.id,), (late.id,), 1)
                assert await states(replay) == {("HEALTHY", 0)}
            assert [replica.received for replica in fleet] == [[report.nbytes]] * 5
            report = await trainer.refit(1)
            assert len(report.verified) == 5
            assert [replica.received for replica in fleet] == [[report.nbytes] * 2] * 5
            # and the group that they form then carries what follows
            epoch = await replay.epoch()
            group = Rendezvous.decode(epoch.rendezvous).derive_group(epoch.members)
            await trainer.refit(2)
            epoch = await replay.epoch()
            assert Rendezvous.decode(epoch.rendezvous).derive_group(epoch.members) == group
            for task in tasks:
                task.cancel()
    await trainer.sender.aclose()


async def test_another_attempt_asks_only_who_lacks_the_weights(replay: ReplayClient, tiny_model: Path) -> None:
    trainer = Trainer(replay, tiny_model, TIMELINE)
    await replay.rewind(0, TIMELINE)
    good, torn = Counting(replay, tiny_model), Counting(replay, tiny_model)
    async with running(good.run(), torn.run()):
        await trainer.see(2)
        assert len((await trainer.refit(0)).verified) == 2
        torn.torn = True
        report = await trainer.refit(1)
        assert set(report.verified) == set(report.members) == {good.id, torn.id}
        assert report.attempts == 2
        assert (len(good.received), len(torn.received)) == (2, 3)
    await trainer.sender.aclose()
