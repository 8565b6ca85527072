"""Going on from an older checkpoint or with an emptied buffer, and ages token by token: the trainer as a process."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.base.errors import NotVerified
from headrace.cli.rewind import set_aside
from headrace.records.trajectory import Span, Trajectory
from headrace.replay import Lease, Limits, ReplayClient
from headrace_services.trainer.data.problems import load_problems
from headrace_services.trainer.data.prompts import PromptOrder
from tests.support.small_replica import SmallReplica, running, score_all
from tests.support.trainer_process import PROMPTS, STEPS, Trainer, check_history, run_with_replica, settled

pytestmark = pytest.mark.slow


def first_prompt(trainer: Trainer) -> int:
    """Index in the data set of the problem that is asked first."""
    config = trainer.config
    problems, _ = load_problems(config.data)
    _, place = PromptOrder(len(problems), config.algorithm.seed, config.data.shuffle, 1)[0]
    return problems[place].index


class CountingReplica(SmallReplica):
    """Counts the groups that it generates for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.leased: Counter[str] = Counter()

    def _trajectory(self, lease: Lease, index: int) -> Trajectory:
        self.leased[lease.group.id] += index == 0 and lease.group.lane == "train"
        return super()._trajectory(lease, index)


# what is kept of a step that goes back: replay/test_rewind_older.py has it by day
@pytest.mark.parametrize("retained", [0, pytest.param(4, marks=pytest.mark.nightly)])
async def test_law_1_conservation_an_older_checkpoint_and_a_killed_refill(
    trainer: Trainer, replay: ReplayClient, limits: Limits, tiny_model: Path, retained: int
) -> None:
    await replay.open_run(dataclasses.replace(limits, retain_steps=retained))
    replica = CountingReplica(replay, tiny_model, doomed=frozenset({first_prompt(trainer)}))
    async with running(replica.run(), score_all(replay)):
        assert await trainer.run() == 0, trainer.said()
        first = check_history(trainer)
        newer, _ = set_aside(trainer.config.checkpoint_folder, 2, datetime.datetime.now())
        assert newer == [4]
        assert await trainer.run("in_refill") == -signal.SIGKILL, trainer.said()
        assert (await replay.state()).refill
        assert await trainer.run() == 0, trainer.said()
    assert not (await replay.state()).refill
    # law 5: the same prompts in the same order; the one that failed has not come back
    assert check_history(trainer) == first
    assert await settled(replay) == {"trained": STEPS * PROMPTS, "failed": 1}
    assert [line.step for line in trainer.journal() if line.kind == "rewind"] == [2, 2]
    again = sorted(group for group, times in replica.leased.items() if times > 1)
    # step 2 was written by weights 1 and 2, of which those that retained its trajectories need no others
    assert set(again) <= set(first[2 * PROMPTS :])
    assert (set(first[2 * PROMPTS : 3 * PROMPTS]) <= set(again)) is (retained == 0)


@pytest.mark.nightly  # a killed refill is above; test_loop.py has an emptied buffer by day
async def test_law_1_conservation_an_emptied_buffer_and_a_killed_refill(
    trainer: Trainer, replay: ReplayClient, limits: Limits, tiny_model: Path
) -> None:
    doomed = frozenset({first_prompt(trainer)})
    await run_with_replica(trainer, replay, "after_reserve:3", code=-signal.SIGKILL, doomed=doomed)
    assert trainer.checkpoints().state(2).failed == 1
    async for key in replay.redis.scan_iter(f"hr:{{{replay.run_id}}}*"):
        await replay.redis.delete(key)
    await replay.open_run(limits)
    async with running(SmallReplica(replay, tiny_model).run(), score_all(replay)):
        assert await trainer.run("before_refilled") == -signal.SIGKILL, trainer.said()
        assert (await replay.state()).refill
        assert await trainer.run() == 0, trainer.said()
    check_history(trainer)
    assert not (await replay.state()).refill
    # the prompt that failed before the checkpoint is known by its place alone, and another was trained instead
    assert await settled(replay) == {"trained": STEPS * PROMPTS, "failed": 1}


class MixedReplica(SmallReplica):
    """Refits in the middle of its completions: the first token of each is of the weights two versions before."""

    def _trajectory(self, lease: Lease, index: int) -> Trajectory:
        whole = super()._trajectory(lease, index)
        size = whole.completion_token_ids.size
        if size == 1 or lease.version < 2:
            return whole
        return msgspec.structs.replace(whole, spans=(Span(lease.version - 2, 0, 1), Span(lease.version, 1, size)))


async def test_law_2_age_mask_trains_on_the_tokens_that_are_young_enough(
    trainer: Trainer, replay: ReplayClient, limits: Limits, tiny_model: Path
) -> None:
    trainer.settings["grpo"] |= {"val_period": 0, "val_at_start": False}
    trainer.settings["grpo"]["async_grpo"] |= {"staleness_policy": "mask", "ahead_steps": 2}
    await replay.open_run(dataclasses.replace(limits, staleness_policy="mask", ahead_steps=2))
    async with running(MixedReplica(replay, tiny_model).run(), score_all(replay)):
        assert await trainer.run() == 0, trainer.said()
    train = {line.step: line.metrics for line in trainer.journal() if line.kind == "train"}
    assert sorted(train) == list(range(STEPS))
    for metrics in train.values():
        tokens = metrics["mean_gen_tokens_per_sample"] * PROMPTS * 2
        # T counts what is left, and the reward that of the whole group
        assert metrics["global_valid_toks"] + metrics["masked_tokens"] == tokens
    assert any(metrics["masked_tokens"] for metrics in train.values())
    assert (await replay.bias())["masked"].tokens == sum(metrics["masked_tokens"] for metrics in train.values())
    assert max(metrics["max_trajectory_age"] for metrics in train.values()) > trainer.config.algorithm.max_age


class UnevenReplica(SmallReplica):
    """Hands its first groups in only when there are weights that they are too old for; all others at once."""

    def __init__(self, replay: ReplayClient, model: Path) -> None:
        super().__init__(replay, model)
        self.late: list[str] = []
        self._kept: list[tuple[Lease, Trajectory]] = []

    async def _generate(self) -> bool:
        if not self.late:
            with contextlib.suppress(NotVerified):
                for lease in await self._replay.lease(self.id, 2):
                    self.late.append(lease.group.id)
                    self._kept += [(lease, self._trajectory(lease, index)) for index in range(lease.group.n)]
        if self._kept and 2 in self.installed:
            for lease, trajectory in self._kept:
                await self._replay.push(lease, trajectory)
            self._kept = []
        return await super()._generate()


async def test_law_2_age_drop_waits_for_nobody_and_trains_nothing_old(
    trainer: Trainer, replay: ReplayClient, limits: Limits, tiny_model: Path
) -> None:
    trainer.settings["grpo"] |= {"val_period": 0, "val_at_start": False}
    trainer.settings["grpo"]["async_grpo"] |= {"staleness_policy": "drop", "ahead_steps": 3}
    await replay.open_run(dataclasses.replace(limits, staleness_policy="drop", ahead_steps=3, lease_s=600.0))
    replica = UnevenReplica(replay, tiny_model)
    async with running(replica.run(), score_all(replay)):
        assert await trainer.run() == 0, trainer.said()
    groups = check_history(trainer)
    assert len(replica.late) == 2
    assert (await replay.stats())["requeues"]["over_age"] >= 2
    # two steps went on without them; they were generated again, and no prompt is lost
    assert not set(replica.late) & set(groups[: 2 * PROMPTS])
    assert set(replica.late) <= set(groups)
