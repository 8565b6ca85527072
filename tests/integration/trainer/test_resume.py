"""A trainer that is killed goes on to the very numbers of one that was not, where the buffer and a checkpoint of every step are there."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.base.errors import WrongStep
from headrace.config.services import CheckpointingConfig
from headrace.replay import BufferRetry, Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace.run.journal import surviving
from headrace_services.trainer.control.checkpoint import ENDED, FAILURES, TRAINED, Checkpoints, CheckpointState, Ledger
from headrace_services.trainer.control.resume import ResumeState, differing_step, resume
from tests.support.buffer import generate, healthy_replica, make_group, reserve, some
from tests.support.small_replica import SmallReplica, running, score_all
from tests.support.trainer_process import PROMPTS, STEPS, Trainer, check_history, run_with_replica, settled

pytestmark = pytest.mark.slow

PPO = {
    "num_prompts_per_step": PROMPTS,
    "num_generations_per_prompt": 2,
    "max_num_steps": STEPS,
    "val_period": 0,
    "val_at_start": False,
    "ppo_epochs": 2,
    "policy_training_start_step": 1,
}
WARM_UP = [
    {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 3}},
    {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0}},
    {"milestones": [3]},
]
CLOCKED = ("timing/", "performance/", "efficiency/", "idle/", "init/", "wasted/", "gpu/", "trackers/")


@pytest.fixture
def ppo(settings: dict[str, Any]) -> dict[str, Any]:
    """Two optimizer steps an epoch, a warm-up of the rate, and one step of the value model alone."""
    del settings["grpo"]
    settings["ppo"] = PPO
    settings["policy"] |= {"train_global_batch_size": 2, "scheduler": WARM_UP}
    settings["value"] = {"scheduler": WARM_UP, "optimizer": {"kwargs": {"lr": 1e-2}}}
    settings["loss_fn"] = {"reference_policy_kl_penalty": 0.1}
    settings["checkpointing"] = {"save_period": 1, "keep_top_k": None}
    return settings


def numbers(trainer: Trainer) -> list[tuple[int, dict[str, float]]]:
    """What each step of the newest weights' history gave, but for what a clock said."""
    lines = [line for line in surviving(trainer.journal()) if line.kind == "train"]
    return [
        (line.step, {name: x for name, x in line.metrics.items() if not name.startswith(CLOCKED)}) for line in lines
    ]


def starts(trainer: Trainer) -> list[int]:
    """The steps that say how long the start before them took."""
    lines = surviving(trainer.journal())
    return [line.step for line in lines if "efficiency/init/total_s" in line.metrics]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    files = sorted(trainer.checkpoints().path(STEPS).glob("*/*.safetensors"))
    names = ["model.safetensors", "rank_0_of_1.safetensors", "model.safetensors", "value_head.safetensors"]
    assert [file.name for file in files] == names
    return {f"{file.parent.name}/{name}": x for file in files for name, x in load_file(file).items()}


async def test_a_killed_run_resumes_to_the_last_bit(
    ppo: dict[str, Any], replay: ReplayClient, limits: Limits, redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    on_policy = dataclasses.replace(limits, max_age=0)
    await replay.open_run(on_policy)
    straight = Trainer(ppo, tmp_path / "straight.log")
    await run_with_replica(straight, replay)
    twin = ReplayClient(open_redis(redis_url), f"{replay.run_id}-killed")
    await twin.open_run(on_policy)
    killed = Trainer({**ppo, "run": {**ppo["run"], "id": twin.run_id}}, tmp_path / "killed.log")
    async with running(SmallReplica(twin, tiny_model).run(), score_all(twin)):
        assert await killed.run("after_reserve:1") == -9, killed.said()
        assert await killed.run("before_commit:3") == -9, killed.said()
        assert await killed.run() == 0, killed.said()
    check_history(killed)  # law 1: no kill lost a group, and none is trained twice
    assert await settled(twin) == {"trained": STEPS * PROMPTS}
    await twin.aclose()

    expected, found = numbers(straight), numbers(killed)
    assert [step for step, _ in found] == list(range(STEPS))
    for (step, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert [(step, name) for name in ours if ours[name] != theirs[name]] == []
    assert (starts(straight), starts(killed)) == ([0], [0, 1, 3])
    assert "loss" not in expected[0][1]  # the value model alone
    assert {"loss", "critic/loss", "critic/explained_var"} <= expected[1][1].keys()
    last = expected[-1][1]
    assert (last["current_step"], last["consumed_samples"]) == (STEPS, 4 * STEPS)
    ours, theirs = weights(killed), weights(straight)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    state = killed.checkpoints().state(STEPS)
    assert state.consumed_samples == 4 * STEPS
    assert state.total_valid_tokens == last["total_valid_tokens"] > 0


@pytest.fixture
def paired(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """On-policy, on two ranks, with a snapshot of each step and no checkpoint before the last."""
    for name in ("memory", "memory-2"):
        (tmp_path / name).mkdir()
    settings["grpo"] |= {"async_grpo": {"enabled": False}, "val_period": 0, "val_at_start": False}
    settings["checkpointing"] |= {"save_period": 100, "snapshot_dir": str(tmp_path / "memory")}
    return settings


# Each is a start of two ranks, with what ends it: rank 0 or 1, or both. The start after it continues from `resumed`.
DEATHS = {
    "rank_1_reads:1": 1,  # before the loss
    "rank_1_in_all_reduce:2": 2,
    "all_in_all_reduce:3": 3,
    "rank_1_in_snapshot:4": 3,  # the one before is a checkpoint by now
    "before_snapshot:5": 4,  # all parts are written, but it is not complete
    "after_snapshot:6": None,
    "in_adoption": None,  # while it becomes a checkpoint
    "after_adoption": 6,  # the buffer does not know of it yet
    "before_commit:8": 8,  # of the last checkpoint
}
# By day the death of one rank in the middle of a step stands for one before the loss, and for that of both.
BY_DAY = [fault for fault in DEATHS if fault not in ("rank_1_reads:1", "all_in_all_reduce:3")]


@pytest.mark.parametrize(
    ("hosts", "deaths"),
    [
        pytest.param(["memory"], [*DEATHS], marks=pytest.mark.nightly),
        (["memory", "memory-2"], BY_DAY),
    ],
    ids=["one host", "two"],
)
async def test_ranks_that_die_continue_from_a_snapshot_to_the_last_bit(
    paired: dict[str, Any],
    replay: ReplayClient,
    limits: Limits,
    redis_url: str,
    tiny_model: Path,
    tmp_path: Path,
    hosts: list[str],
    deaths: list[str],
) -> None:
    memories = [str(tmp_path / name) for name in hosts] if len(hosts) > 1 else []
    steps = paired["grpo"]["max_num_steps"] = 8
    on_policy = dataclasses.replace(limits, max_age=0)
    await replay.open_run(on_policy)
    straight = Trainer(paired, tmp_path / "straight.log")
    async with running(SmallReplica(replay, tiny_model).run(), score_all(replay)):
        assert await straight.run_ranks(2, hosts=memories) == [0, 0], straight.said()
    twin = ReplayClient(open_redis(redis_url), f"{replay.run_id}-killed")
    await twin.open_run(on_policy)
    killed = Trainer({**paired, "run": {**paired["run"], "id": twin.run_id}}, tmp_path / "killed.log")
    async with running(SmallReplica(twin, tiny_model).run(), score_all(twin)):
        for fault in deaths:
            assert -9 in await killed.run_ranks(2, fault, memories), killed.said()
        assert await killed.run_ranks(2, hosts=memories) == [0, 0], killed.said()
    check_history(killed, steps)  # law 1: no kill lost a group, and none is trained twice
    assert await settled(twin) == {"trained": steps * PROMPTS}
    await twin.aclose()
    resumed = [version for fault in deaths if (version := DEATHS[fault]) is not None]
    assert [line.step for line in killed.journal() if line.kind == "rewind"] == resumed
    for (step, ours), (_, theirs) in zip(numbers(killed), numbers(straight), strict=True):
        assert [(step, name) for name in ours | theirs if ours.get(name) != theirs.get(name)] == []
    assert [[*(tmp_path / name).iterdir()] for name in hosts] == [[] for _ in hosts], "nothing is left in memory"


async def test_without_its_snapshot_a_trainer_continues_from_the_checkpoint(
    paired: dict[str, Any], replay: ReplayClient, limits: Limits, tiny_model: Path, tmp_path: Path
) -> None:
    """The machine is gone, and its memory with it: at first there is no checkpoint yet. One rank is enough."""
    paired["checkpointing"]["save_period"] = 2
    await replay.open_run(dataclasses.replace(limits, max_age=0))
    trainer = Trainer(paired, tmp_path / "trainer.log")
    async with running(SmallReplica(replay, tiny_model).run(), score_all(replay)):
        for fault in ("after_snapshot:1", "after_snapshot:3"):
            assert await trainer.run(fault) == -9, trainer.said()
            (snapshots,) = (tmp_path / "memory").iterdir()
            shutil.rmtree(snapshots)
        assert await trainer.run() == 0, trainer.said()
    check_history(trainer)
    assert await settled(replay) == {"trained": STEPS * PROMPTS}
    assert [line.step for line in trainer.journal() if line.kind == "rewind"] == [0, 2]


@pytest.mark.nightly  # test_snapshots.py has what is decided
async def test_a_host_that_is_gone_takes_its_part_of_the_snapshot_along(
    paired: dict[str, Any], replay: ReplayClient, limits: Limits, tiny_model: Path, tmp_path: Path
) -> None:
    paired["checkpointing"]["save_period"] = 2
    await replay.open_run(dataclasses.replace(limits, max_age=0))
    trainer = Trainer(paired, tmp_path / "trainer.log")
    memories = [str(tmp_path / name) for name in ("memory", "memory-2")]
    async with running(SmallReplica(replay, tiny_model).run(), score_all(replay)):
        assert -9 in await trainer.run_ranks(2, "after_snapshot:3", memories), trainer.said()
        (snapshots,) = (tmp_path / "memory-2").iterdir()
        shutil.rmtree(snapshots)
        assert await trainer.run_ranks(2, hosts=memories) == [0, 0], trainer.said()
    check_history(trainer)
    assert "snapshot of version 3 is no longer whole (rank_1_of_2.safetensors: its host is gone)" in trainer.said()
    assert [line.step for line in trainer.journal() if line.kind == "rewind"] == [2]


@pytest.mark.nightly  # GRPO does, every day, and the value model's checkpoint has tests of its own
async def test_ppo_trains_on_trajectories_of_older_weights_as_grpo_does(
    ppo: dict[str, Any], replay: ReplayClient, tiny_model: Path, tmp_path: Path
) -> None:
    ppo["ppo"] = {**PPO, "async_ppo": {"enabled": True, "max_trajectory_age_steps": 1}}
    trainer = Trainer(ppo, tmp_path / "trainer.log")
    async with running(SmallReplica(replay, tiny_model).run(), score_all(replay)):
        assert await trainer.run("after_reserve:2") == -9, trainer.said()
        assert await trainer.run() == 0, trainer.said()
    check_history(trainer)
    ages = [metrics["max_trajectory_age"] for _, metrics in numbers(trainer)]
    assert max(ages) <= 1
    assert max(metrics["critic/loss"] for _, metrics in numbers(trainer)) > 0


async def test_law_1_a_step_that_the_buffer_took_otherwise_is_restored(replay: ReplayClient, tmp_path: Path) -> None:
    """The server lost the step that was trained, and a late copy of `reserve` took it with others: a rewind would commit these."""
    checkpoints, retry = Checkpoints(tmp_path, CheckpointingConfig()), BufferRetry(10.0)
    first = await resume(replay, retry, checkpoints, None, [], replay.run_id)
    groups = [make_group(order, n=2) for order in range(2 * PROMPTS)]
    await replay.enqueue(groups, first.timeline)
    await generate(replay, await healthy_replica(replay))
    held = (await reserve(replay, 0)).groups
    trained = [group.id for group in groups if group.id not in held]
    state = CheckpointState(
        version=1, timeline=first.timeline, incarnation=first.incarnation, cursor=len(groups), run_id=replay.run_id
    )
    assert await differing_step(replay, retry, {0: list(held)}) is None
    assert await differing_step(replay, retry, {0: trained}) == 0
    with pytest.raises(WrongStep):  # a late copy of this too: it would free what shows the difference
        await replay.commit(1, first.timeline, {0: trained})

    ledger = Ledger()
    ledger.record(0, trained, [group.order for group in groups if group.id in trained])
    checkpoints.begin(1, first.timeline)
    ended = await replay.read_ended()
    files = {TRAINED: ledger.encode(), ENDED: ended.bitmap, FAILURES: ended.failures}
    checkpoints.publish(state, ledger.steps, set(), files)
    again = await resume(replay, retry, checkpoints, 1, [], replay.run_id)
    assert again.incarnation != first.incarnation
    assert list(again.missing()) == [group.order for group in groups if group.id in held]


async def test_groups_that_another_configuration_made_are_left_behind(replay: ReplayClient, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointingConfig())

    async def start(**how: bool) -> ResumeState:
        return await resume(replay, BufferRetry(10.0), checkpoints, None, [], replay.run_id, **how)

    first = await start()
    await replay.enqueue([make_group(order) for order in range(3)], first.timeline)
    again = await start()
    assert (again.enqueued, again.refill) == (2, False)
    assert (await replay.state()).counts["queued"] == 3
    afresh = await start(afresh=True)
    assert (afresh.version, afresh.enqueued, list(afresh.missing())) == (0, -1, [])
    await replay.end_refill(afresh.timeline)
    assert some((await replay.state()).counts) == {}
    await replay.enqueue([make_group(0)], afresh.timeline)
