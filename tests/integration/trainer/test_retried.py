"""Failed groups that are retried: the run trains them, whatever is lost meanwhile."""

from __future__ import annotations

import re
import signal

import pytest

from headrace.replay import Limits, ReplayClient
from tests.support.trainer_process import PROMPTS, Trainer, check_history, run_with_replica, settled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lost", [pytest.param(False, marks=pytest.mark.nightly), True])  # what is lost is retried too
async def test_a_run_that_ended_goes_on_with_retried_groups(
    trainer: Trainer, replay: ReplayClient, limits: Limits, lost: bool
) -> None:
    """`lost`: the trainer is killed before a checkpoint knows of the retry, and the server loses all that it held; the journal knows."""
    trainer.settings["data"]["train"]["size"] = 8
    trainer.settings["grpo"] |= {"max_num_steps": 100, "val_period": 0, "val_at_start": False}
    doomed = frozenset({0, 1, 2, 3})
    await run_with_replica(trainer, replay, doomed=doomed)
    before = await settled(replay)
    assert before["failed"] == len(doomed)
    train = [line.metrics for line in trainer.journal() if line.kind == "train"]
    assert train[-1]["failed_prompts_total"] == sum(metrics["failed_prompts"] for metrics in train) > 0
    assert re.search(
        r"step \d: (\d) prompts failed since the step before; in total, \d prompts failed\.", trainer.said()
    )
    steps = before["trained"] // PROMPTS
    check_history(trainer, steps)
    ended = await replay.read_ended()
    assert await replay.retry(dict.fromkeys(ended.failed_orders(), 0)) == len(doomed)
    if lost:
        await run_with_replica(trainer, replay, f"after_reserve:{steps}", code=-signal.SIGKILL)
        async for key in replay.redis.scan_iter(f"hr:{{{replay.run_id}}}*"):
            await replay.redis.delete(key)
        await replay.open_run(limits)
    await run_with_replica(trainer, replay)
    (retry,) = [line for line in trainer.journal() if line.kind == "retry"]
    assert retry.orders == ended.failed_orders()
    steps += len(doomed) // PROMPTS
    check_history(trainer, steps)
    after = await settled(replay)
    assert after["trained"] == steps * PROMPTS
    assert "failed" not in after
