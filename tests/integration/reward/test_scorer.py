"""The scorer between a real buffer and a real hub: every pushed trajectory gets its score, whatever fails on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import Environment, Sample
from headrace.env.server import serving
from headrace.env.wire import sample_to_wire
from headrace.records.score import Score
from headrace.records.trajectory import Group
from headrace.replay import EnvironmentLimits, ReplayClient
from headrace.run.sample_files import SampleFiles
from headrace_services.replay.scorer import in_batches
from tests.support.buffer import healthy_replica, make_group, make_trajectory, reserve
from tests.support.ports import free_port
from tests.support.reward_hub import WAIT_S, scoring, start_hub
from tests.support.waiting import eventually

GROUPS, N = 4, 2

# one step of four groups; a scoring attempt that is used up fails its group, whatever share of them does
pytestmark = pytest.mark.limits(
    prompts_per_step=GROUPS, max_scoring_attempts=1, environments={"told": EnvironmentLimits(failure_share=1.0)}
)


class Told(Environment):
    """Does what the problem says, and notes which samples it saw."""

    build = "1"

    def __init__(self) -> None:
        self.seen: list[Sample] = []
        self.entered = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def was_asked(self, times: int) -> None:
        while len(self.seen) < times:
            self.entered.clear()
            await self.entered.wait()

    async def score(self, sample: Sample) -> float | Score:
        self.seen.append(sample)
        self.entered.set()
        await self.may_answer.wait()
        match sample.extra_env_info["do"]:
            case "boast":
                return Score("SCORED", 1.0, metadata={"id": 2**70})
            case "raise":
                raise RuntimeError("the judge is out")
            case "hang":
                await asyncio.Event().wait()
        return Score("SCORED", float(sample.index), {"half": sample.index / 2}, {"id": 2**63})


def group(order: int, **changes: Any) -> Group:
    base = make_group(order, n=N)
    told = {"env_name": "told", "extra_env_info": {"do": "score"}}
    return msgspec.structs.replace(base, **{**told, **changes})


async def push(replay: ReplayClient, groups: list[Group], text: Callable[[Group], str] = lambda _: "7") -> None:
    """Every trajectory of `groups`, pushed by one replica."""
    await replay.enqueue(groups, (await replay.state()).timeline)
    replica = await healthy_replica(replay)
    for lease in await replay.lease(replica, len(groups)):
        for index in range(N):
            trajectory = make_trajectory(lease, index)
            await replay.push(lease, msgspec.structs.replace(trajectory, text=text(lease.group)))


async def counts(replay: ReplayClient, **wanted: int) -> None:
    """Return when the training lane holds `wanted` groups by state."""
    found: dict[str, int] = {}
    try:
        async with asyncio.timeout(20):
            while found != wanted:
                found = {state: count for state, count in (await replay.state()).counts.items() if count}
                await replay.wait_ready(0.1)
    except TimeoutError:
        raise AssertionError(f"groups: {found}, not {wanted}") from None


async def test_every_pushed_trajectory_comes_back_scored(replay: ReplayClient) -> None:
    told = Told()
    async with (
        serving(told) as port,
        start_hub({"told": {"target": f"127.0.0.1:{port}"}}) as hub,
        scoring(replay, hub.port),
    ):
        await push(replay, [group(order) for order in range(GROUPS)])
        await counts(replay, ready=GROUPS)
    batch = await reserve(replay, 0)
    assert [trajectory.reward for trajectory in batch.trajectories] == [0, 1] * GROUPS
    trajectory, score = (await replay.read([batch.trajectories[1].key]))[0]
    assert msgspec.structs.replace(score, timings={}) == Score(
        "SCORED", 1.0, {"half": 0.5}, {"id": 2**63}, environment="Told", build="1"
    )
    assert score.timings.keys() == {"waiting", "environment"}
    assert all(seconds > 0 for seconds in score.timings.values())
    seen = next(s for s in told.seen if (s.group_id, s.index) == (trajectory.group_id, 1))
    assert seen.messages == ({"role": "user", "content": "0+1"},)
    assert (seen.completion, seen.completion_token_ids) == ("7", tuple(trajectory.completion_token_ids.tolist()))
    assert (seen.task_name, seen.finish_reason) == ("addition", "stop")
    assert len({s.idempotency_key for s in told.seen}) == GROUPS * N


async def test_law_7_failure_is_not_zero_a_failing_environment_is_named(replay: ReplayClient, tmp_path: Path) -> None:
    async with serving(Told()) as port:
        env = {"told": {"target": f"127.0.0.1:{port}", "timeout_s": 5.0}}
        async with start_hub(env) as hub, scoring(replay, hub.port, tmp_path):
            await push(replay, [group(0, env_name="nobody"), group(1)])
            # one after the other, each with a good one behind it: failures alone would look like a broken environment
            for number, wrong in enumerate(("raise", "hang", "boast")):
                await push(replay, [group(2 + 2 * number, extra_env_info={"do": wrong})])
                await push(replay, [group(3 + 2 * number)])
                await counts(replay, ready=2 + number, failed=number + 1, scoring=1)
            # completions are written to the file after their group has failed
            files = SampleFiles(tmp_path / "run" / "logs", None)
            await eventually(lambda: len({sample.group for sample in files.read_failed()}) == 3)
            (nobody,) = [each for each in await replay.environments() if each.name == "nobody"]
    reasons = {
        fields["group"]: fields.get("reason", "") for _, fields in await replay.events("0", 0.1) if "group" in fields
    }
    assert "the judge is out" in reasons["e0-train-2"]
    assert "TIMED_OUT" in reasons["e0-train-4"]
    assert "can't be kept" in reasons["e0-train-6"]
    # the completions that groups failed with are kept, and no others
    kept = files.read_failed()
    assert {sample.group for sample in kept} == {"e0-train-2", "e0-train-4", "e0-train-6"}
    raised = next(sample for sample in kept if sample.group == "e0-train-2")
    assert (raised.content, raised.status, raised.reason) == ("7", "FAILED", reasons["e0-train-2"])
    assert "the judge is out" in raised.message
    assert 'raise RuntimeError("the judge is out")' in raised.traceback
    # whatever is asked of it fails: the run waits for it
    assert "'nobody' (it has: told)" in nobody.message


async def test_law_1_conservation_a_hub_that_comes_late_costs_no_attempt(replay: ReplayClient) -> None:
    port = free_port()
    async with serving(Told()) as target, scoring(replay, port) as scorer:
        await push(replay, [group(order) for order in range(GROUPS)])
        await counts(replay, scoring=GROUPS)
        assert not scorer.done()
        async with start_hub({"told": {"target": f"127.0.0.1:{target}"}}, port=port):
            await counts(replay, ready=GROUPS)


async def test_law_1_conservation_a_hub_that_dies_costs_no_attempt(replay: ReplayClient) -> None:
    port = free_port()
    hang = Told()
    async with scoring(replay, port):
        async with serving(hang) as target, start_hub({"told": {"target": f"127.0.0.1:{target}"}}, port=port):
            await push(replay, [group(order, extra_env_info={"do": "hang"}) for order in range(GROUPS)])
            await asyncio.wait_for(hang.entered.wait(), WAIT_S)

        class Patient(Environment):
            def score(self, sample: Sample) -> float:
                return 1.0

        async with serving(Patient()) as target, start_hub({"told": {"target": f"127.0.0.1:{target}"}}, port=port):
            await counts(replay, ready=GROUPS)


async def test_a_stopped_scorer_gives_back_what_it_held(replay: ReplayClient) -> None:
    hang = Told()
    async with serving(hang) as port, start_hub({"told": {"target": f"127.0.0.1:{port}"}}) as hub:
        async with scoring(replay, hub.port):
            await push(replay, [group(0, extra_env_info={"do": "hang"})])
            await asyncio.wait_for(hang.entered.wait(), WAIT_S)
        (first, second) = await replay.take_scoring({"told": 8})
    assert (first.scoring_attempt, second.scoring_attempt) == (1, 1)


async def test_completions_that_can_not_be_kept_stop_no_score(
    replay: ReplayClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("a file stands in the way")
    async with (
        serving(Told()) as port,
        start_hub({"told": {"target": f"127.0.0.1:{port}"}}) as hub,
        scoring(replay, hub.port, tmp_path),
    ):
        await push(replay, [group(0, extra_env_info={"do": "raise"}), group(1)])
        await counts(replay, failed=1, ready=1)
        # the file is written after the group has failed
        await eventually(lambda: "can't write failed completions" in caplog.text)
    assert "logger.keep_step_data=0" in caplog.text


async def test_what_is_taken_back_while_it_is_scored_is_scored_again(replay: ReplayClient, tmp_path: Path) -> None:
    """By a rewind, or a release that the network delivers twice: the first result is refused, the second counts."""
    told = Told()
    told.may_answer.clear()
    async with (
        serving(told) as port,
        start_hub({"told": {"target": f"127.0.0.1:{port}"}}) as hub,
        scoring(replay, hub.port, tmp_path) as scorer,
    ):
        await push(replay, [group(0)])
        await told.entered.wait()
        await replay.rewind(0, "another-timeline")
        async with asyncio.timeout(WAIT_S):
            await told.was_asked(2 * N)
        told.may_answer.set()
        await counts(replay, ready=1)
        await push(replay, [group(1)])
        await counts(replay, ready=2)
        assert not scorer.done()


async def test_a_trajectory_too_large_for_the_hub_fails_alone(replay: ReplayClient) -> None:
    async with serving(Told()) as port:
        env = {"told": {"target": f"127.0.0.1:{port}"}}
        async with start_hub(env, max_message_bytes=65536) as hub, scoring(replay, hub.port, max_message_bytes=65536):
            groups = [group(order) for order in range(GROUPS)]
            await push(replay, groups, lambda g: "x" * 100_000 if g.order == 1 else "7")
            await counts(replay, ready=GROUPS - 1, failed=1)
    reasons = [fields.get("reason", "") for _, fields in await replay.events("0", 0.1)]
    assert any("raise reward.max_message_bytes" in reason for reason in reasons)


async def test_batches_hold_one_environment_and_keep_to_their_size(replay: ReplayClient) -> None:
    await push(replay, [group(0), group(1, env_name="other"), group(2)])
    jobs = await replay.take_scoring({"told": 100, "other": 100})
    items = [(job, sample_to_wire(Sample("x" * 600_000, environment=job.group.env_name))) for job in jobs]
    assert [[job.group.env_name for job, _ in batch] for batch in in_batches(items, lambda _: 64)] == [["told"]] * 4 + [
        ["other"]
    ] * 2
    small = [(job, sample_to_wire(Sample("x", environment=job.group.env_name))) for job in jobs] * 40
    assert [len(batch) for batch in in_batches(small, lambda _: 64)] == [64, 64, 32, 64, 16]


@pytest.mark.parametrize(
    ("option", "rewards"), [({"max_tokens": 3}, {0.0}), ({"max_tokens": 4, "timeout_s": 30.0}, {1.0})]
)
async def test_law_3_one_build_a_hub_with_a_new_option_mixes_no_rewards(
    replay: ReplayClient, option: dict[str, Any], rewards: set[float]
) -> None:
    """The first of each group's completions is scored before, the second after."""

    async def first_is_scored() -> bool:
        found = [await replay.group(one.id) for one in groups]
        return all(one is not None and one["scored"] == 1 for one in found)

    groups = [group(order, env_name="brief") for order in range(GROUPS)]
    timeline = (await replay.state()).timeline
    await replay.enqueue(groups, timeline)
    leases = await replay.lease(await healthy_replica(replay), GROUPS)
    for place, options in enumerate(({"max_tokens": 4}, option)):
        async with start_hub({"brief": {"type": "length", **options}}, workers=1) as hub:
            async with scoring(replay, hub.port):
                for lease in leases:
                    await replay.push(lease, make_trajectory(lease, place))
                await (eventually(first_is_scored) if place == 0 else counts(replay, ready=GROUPS))
            build = (await hub.environments())["brief"].description.build
    batch = await reserve(replay, 0)
    assert {one.reward for one in batch.trajectories} == rewards
    assert {score.build for _, score in await replay.read([one.key for one in batch.trajectories])} == {build}
