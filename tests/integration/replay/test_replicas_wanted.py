"""The signal by which a fleet is scaled, from the buffer and the trainer's steps to the replay service's metrics."""

from __future__ import annotations

from pathlib import Path

from headrace.replay import ReplayClient
from headrace.run.scaling import StepTime, follow_steps, read_look
from tests.support.buffer import begin, enqueue, healthy_replica, push_all
from tests.support.replay_service import config_of, serving
from tests.support.waiting import eventually

TOTAL, WAITED = "timing/train/total_step_time", "timing/train/wait_for_generation"


async def test_what_the_buffer_shows_is_read(replay: ReplayClient) -> None:
    """P = 2 and A = 1: of five prompts two steps' groups may be in flight."""
    replica = await begin(replay, 5)
    open_, _ = await replay.lease(replica, 2)
    look = read_look(await replay.stats(), [], 1)
    assert (look.replicas, look.open, look.waiting, look.admitted, look.closed) == (1, 2, 2, 4, False)
    await push_all(replay, open_)
    await replay.register("loading", {}, loading=True)
    await replay.close((await replay.state()).timeline)
    look = read_look(await replay.stats(), [], 1)
    assert (look.replicas, look.open, look.finished, look.closed) == (1, 1, 1, False)


def test_steps_are_followed_over_rewinds_and_starts() -> None:
    step = {TOTAL: 10.0, WAITED: 5.0}
    entries = [
        ("train", 0, {**step, "efficiency/init/total_s": 30.0}),
        ("train", 1, step),
        ("validation", 2, {"accuracy": 0.5}),
        ("train", 2, step),
        ("train", 2, {TOTAL: 8.0}),
    ]
    assert follow_steps([], entries) == [StepTime(1, 10.0, 5.0), StepTime(2, 8.0, 0.0)]
    assert follow_steps([StepTime(n, 10.0, 0.0) for n in range(20)], [("train", 3, step)])[-1].step == 3


async def test_the_service_tells_how_many_replicas_are_wanted(tmp_path: Path) -> None:
    async with serving(config_of(tmp_path)) as (http, replay):

        async def says(line: str) -> bool:
            return line in (await http.get("/metrics")).text.splitlines()

        await enqueue(replay, range(8))
        await healthy_replica(replay)

        # steps of a fleet that the service has not seen yet are no evidence
        await eventually(lambda: says('headrace_replay_replicas{state="HEALTHY"} 1.0'))
        assert await says("headrace_replay_replicas_wanted 1.0")
        timeline = (await replay.state()).timeline
        for step in range(6):
            await replay.publish_metrics("train", step, {TOTAL: 10.0, WAITED: 5.0}, timeline)

        await eventually(lambda: says("headrace_replay_replicas_wanted 2.0"))
