"""The trainer as a process, on a real buffer, weight channel and learner, with small replicas and a scorer beside it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import re
import signal
from pathlib import Path

import pytest

from headrace.base.errors import Fenced, InvalidCall
from headrace.net.service import EXIT_STOPPED, EXIT_USER_ERROR
from headrace.records.score import Score
from headrace.replay import Limits, ReplayClient, Replica
from headrace.replay.connection import open_redis
from headrace.run import now
from headrace.run.evaluation import report
from headrace.run.group_history import GroupHistory
from headrace.run.group_query import GroupQuery
from headrace.run.metric_names import unknown
from headrace.run.sample_files import SampleFiles
from headrace_services.refit.rendezvous import Announcement
from headrace_services.trainer.control.resume import restore_reason
from tests.support.processes import is_stopped
from tests.support.small_replica import SmallReplica, installed, running, score_all
from tests.support.trainer_process import (
    PROMPTS,
    STEPS,
    Trainer,
    check_history,
    check_samples,
    ended,
    run_with_replica,
    settled,
)
from tests.support.waiting import eventually, wait_until

pytestmark = pytest.mark.slow


async def test_a_run_trains_its_steps_and_leaves_files(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    replica = SmallReplica(replay, tiny_model)
    async with running(replica.run(), score_all(replay)):
        assert await trainer.run() == 0, trainer.said()
    check_history(trainer)
    assert await settled(replay) == {"trained": STEPS * PROMPTS}
    assert set(replica.installed) == {0, 1, 2, 3, 4}
    evaluated = GroupQuery(lane="validation", states=["evaluated"])
    assert GroupHistory(trainer.config.run_folder / "groups").find(evaluated)[0] == 3 * 3
    assert await replay.read_history(1) == ([], 0)
    assert trainer.checkpoints().find_published() == [2, 4]
    validations = {line.step: line.metrics for line in trainer.journal() if line.kind == "validation"}
    assert sorted(validations) == [0, 2, 4]
    for version, metrics in validations.items():
        assert (metrics["evaluated"], metrics["failed"], metrics["pending"]) == (3, 0, 0)
        assert metrics["version_min"] == metrics["version_max"] == version
    assert "val:accuracy" in trainer.checkpoints().state(2).metrics
    assert (trainer.config.run_folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "run " + trainer.config.run_folder.name in (trainer.config.run_folder / "curves.html").read_text()
    state = now.read(trainer.config.run_folder)
    assert state is not None
    assert [each.id for each in state.replicas] == [replica.id]
    assert 0 <= state.next_step <= STEPS
    published = [(kind, step) for _, kind, step, _ in await replay.metrics()]
    assert published.count(("train", 3)) == 1
    assert await replay.newest_metrics(2) == (await replay.metrics())[:-3:-1]
    wanted = "reward loss grad_norm lr avg_trajectory_age max_trajectory_age performance/train_fp_utilization"
    wanted += " total_valid_tokens mean_gen_tokens_per_sample truncation_rate token_mult_prob_error gen_kl_error"
    wanted += " sampling_importance_ratio entropy approx_entropy probs_ratio kl_penalty"
    assert set(wanted.split()) <= trainer.journal()[-2].metrics.keys() | trainer.journal()[-1].metrics.keys()
    assert unknown({name for line in trainer.journal() for name in line.metrics}) == []
    check_samples(SampleFiles(trainer.config.log_folder, None), trainer.journal())


@pytest.mark.parametrize(
    "faults",
    [
        ["in_refit:3", "in_checkpoint:4"],
        # test_resume.py kills there by day, and compares every number
        pytest.param(["after_reserve:3"], marks=pytest.mark.nightly),
        pytest.param(["before_commit:2"], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
async def test_law_1_a_trainer_killed_at_any_point_trains_every_group_once(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path, faults: list[str]
) -> None:
    async with running(SmallReplica(replay, tiny_model).run(), score_all(replay)):
        for fault in faults:
            assert await trainer.run(fault) == -signal.SIGKILL, trainer.said()
        assert await trainer.run() == 0, trainer.said()
    check_history(trainer)
    assert await settled(replay) == {"trained": STEPS * PROMPTS}
    assert [line.step for line in trainer.journal() if line.kind == "rewind"] == [2] * len(faults)


async def test_law_1_a_damaged_checkpoint_is_set_aside(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    trainer.settings["checkpointing"]["save_period"] = 1
    async with running(SmallReplica(replay, tiny_model).run(), score_all(replay)):
        assert await trainer.run("after_reserve:3") == -signal.SIGKILL, trainer.said()
        weights = trainer.checkpoints().path(3) / "policy" / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-100] ^= 1
        weights.write_bytes(data)
        assert await trainer.run() == 0, trainer.said()
    assert f"the checkpoint before it is used: {weights} " in trainer.said()
    assert "checkpoint 3 is damaged" in (trainer.config.run_folder / "curves.html").read_text()
    assert [path.name.rpartition("-")[0] for path in weights.parents[2].glob("damaged-*")] == ["damaged-step_3"]
    check_history(trainer)
    assert await settled(replay) == {"trained": STEPS * PROMPTS}
    assert [line.step for line in trainer.journal() if line.kind == "rewind"] == [2]


async def test_law_6_liveness_an_epoch_that_nobody_drives_is_ended(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    """A copy of `open_epoch` that arrives after the server has lost the call."""
    replica = SmallReplica(replay, tiny_model)
    async with running(replica.run()):
        process = trainer.start()
        async with asyncio.timeout(120), replica.changed:
            await replica.changed.wait()

        async def epoch_is(state: str) -> bool:
            epoch = await replay.epoch()
            return epoch is not None and epoch.state == state

        await eventually(lambda: epoch_is("done"))
        timeline = (await replay.state()).timeline
        stray = await replay.open_epoch(
            "late", 1, timeline, Announcement((replica.id,)).encode()
        )  # nobody acknowledges it
        assert stray.members == (replica.id,)
        await eventually(lambda: epoch_is("aborted"))
        async with running(score_all(replay)):
            assert await ended(process) == 0, trainer.said()
    assert "no refit drives epoch late (version 1)" in trainer.said()
    check_history(trainer)


@pytest.mark.nightly  # the unit tests have every order of events; this is two real processes
async def test_law_1_a_trainer_frozen_in_a_save_wakes_after_its_successor(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    async with running(SmallReplica(replay, tiny_model).run(), score_all(replay)):
        frozen = trainer.start("frozen_in_checkpoint:4")
        await asyncio.to_thread(wait_until, lambda: is_stopped(frozen.pid))
        assert await trainer.run() == 0, trainer.said()
        os.kill(frozen.pid, signal.SIGCONT)
        assert await ended(frozen) == 1
    assert "is in use (process" in trainer.said()
    assert "taken over the run" in trainer.said()  # the chain says so, or the buffer does before
    check_history(trainer)
    assert await settled(replay) == {"trained": STEPS * PROMPTS}


async def test_law_4_a_replaced_trainer_says_so(trainer: Trainer, replay: ReplayClient) -> None:
    await run_with_replica(trainer, replay, "superseded_before_reading:3", code=1)
    assert "is no longer held" in trainer.said()
    assert "taken over the run" in trainer.said()


async def test_a_batch_that_breaks_a_law_is_given_back_and_trained_without(
    trainer: Trainer, replay: ReplayClient
) -> None:
    await run_with_replica(trainer, replay, "broken_batches:2")
    assert trainer.said().count("step 2 is rejected: step 2: trajectory") == 2
    check_history(trainer)
    assert await settled(replay) == {"trained": STEPS * PROMPTS}
    assert (await replay.stats())["requeues"]["invariant"] == 2


async def test_a_trajectory_that_cant_be_trained_on_is_generated_again(trainer: Trainer, replay: ReplayClient) -> None:
    await run_with_replica(trainer, replay, "overwritten_payloads")
    said = trainer.said()
    for step, what in enumerate(
        ("can't be read: trajectory: ", ": a token id outside the model's vocabulary", "tokens, more than"), 1
    ):
        assert re.search(rf"step {step} is rejected: step {step}: trajectory '[^']*'\[\d\].*{what}", said), said
    assert said.count("is rejected") == 3  # none of them in a row: none ends the run
    check_history(trainer)
    assert await settled(replay) == {"trained": STEPS * PROMPTS}
    assert (await replay.stats())["requeues"]["invariant"] == 3


@pytest.mark.nightly
async def test_three_batches_in_a_row_that_break_a_law_end_the_run(trainer: Trainer, replay: ReplayClient) -> None:
    await run_with_replica(trainer, replay, "broken_batches:3", code=1)
    assert "3 batches in a row" in trainer.said()
    assert "2 steps" in (trainer.config.run_folder / "curves.html").read_text(), "at every end"
    assert (await replay.stats())["requeues"]["invariant"] == 2


async def test_a_buffer_that_was_emptied_is_made_anew_from_the_checkpoint(
    trainer: Trainer, replay: ReplayClient, limits: Limits
) -> None:
    await run_with_replica(trainer, replay, "after_reserve:3", code=-signal.SIGKILL)
    before = trainer.checkpoints().ledger(2)
    async for key in replay.redis.scan_iter(f"hr:{{{replay.run_id}}}*"):
        await replay.redis.delete(key)
    state = await replay.open_run(limits)
    assert restore_reason(trainer.checkpoints().state(2), state) is not None
    await run_with_replica(trainer, replay)
    groups = check_history(trainer)
    assert groups[: 2 * PROMPTS] == [*before[0], *before[1]]
    assert (await settled(replay))["trained"] == STEPS * PROMPTS


async def test_the_run_ends_when_the_prompts_do_and_what_is_left_is_unused(
    trainer: Trainer, replay: ReplayClient
) -> None:
    trainer.settings["data"]["train"]["size"] = 5
    trainer.settings["grpo"] |= {"max_num_steps": 100, "val_period": 0, "val_at_start": False, "val_at_end": True}
    await run_with_replica(trainer, replay)
    counts = await settled(replay)
    steps = counts["trained"] // PROMPTS
    check_history(trainer, steps)
    assert counts["trained"] + counts.get("unused", 0) == sum(counts.values())
    assert counts.get("unused", 0) < PROMPTS
    assert [line.step for line in trainer.journal() if line.kind == "validation"] == [steps]


async def test_later_prompts_replace_failed_groups(trainer: Trainer, replay: ReplayClient) -> None:
    await run_with_replica(trainer, replay, doomed=frozenset(range(0, 60, 4)))
    check_history(trainer)
    counts = await settled(replay)
    assert counts.pop("failed") > 0
    assert counts == {"trained": STEPS * PROMPTS}


async def test_dynamic_sampling_trains_the_groups_whose_rewards_differ(
    trainer: Trainer, replay: ReplayClient, limits: Limits
) -> None:
    trainer.settings["grpo"] |= {"use_dynamic_sampling": True, "batch_multiplier": 2.0}
    await replay.open_run(dataclasses.replace(limits, filter_equal=True, max_scored_per_step=60))
    await run_with_replica(trainer, replay, equal_every=3)
    check_history(trainer)
    counts = await settled(replay)
    assert counts.pop("filtered") > 0
    assert counts == {"trained": STEPS * PROMPTS}
    steps = [line.metrics for line in trainer.journal() if line.kind == "train"]
    assert sum(step["dynamic_sampling_filtered_groups"] for step in steps) > 0
    for step in steps:
        assert step["dynamic_sampling_num_gen_batches"] == step["dynamic_sampling_scored_groups"] / (2 * PROMPTS)


async def test_dynamic_sampling_that_finds_nothing_ends_the_run(
    trainer: Trainer, replay: ReplayClient, limits: Limits
) -> None:
    trainer.settings["grpo"] |= {"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 2}
    await replay.open_run(dataclasses.replace(limits, filter_equal=True, max_scored_per_step=2 * PROMPTS))
    await run_with_replica(trainer, replay, code=1, equal_every=1)
    assert "grpo.dynamic_sampling_max_gen_batches 2" in trainer.said()
    assert (trainer.config.run_folder / "curves.html").exists(), "at every end"


async def test_an_alarm_named_in_the_configuration_ends_the_run(trainer: Trainer, replay: ReplayClient) -> None:
    trainer.settings["run"]["stop_on"] = ["equal_rewards"]
    trainer.settings["grpo"]["max_num_steps"] = 8
    await run_with_replica(trainer, replay, code=1, equal_every=1)
    assert "run.stop_on" in trainer.said()
    train = [line for line in trainer.journal() if line.kind == "train"]
    assert [line.metrics["equal_rewards_alarm"] for line in train] == [0.0] * 4 + [1.0]
    assert trainer.checkpoints().newest() == 5, "what was trained is saved"
    assert "5 steps" in (trainer.config.run_folder / "curves.html").read_text()


async def test_no_replica_within_the_fleet_deadline_ends_the_run(trainer: Trainer, replay: ReplayClient) -> None:
    trainer.settings["trainer"]["fleet_deadline_s"] = 1
    await replay.register("loads", {}, loading=True)
    run = asyncio.create_task(trainer.run())
    while (await replay.state()).enqueued < 0 and not run.done():
        await replay.heartbeat("loads", [])
        await asyncio.sleep(0.2)
    # a wait that is longer than the deadline, while a replica is known to come
    for _ in range(12):
        await replay.heartbeat("loads", [])
        await asyncio.sleep(0.2)
    assert not run.done(), trainer.said()
    await replay.deregister("loads")
    assert await run == 1
    assert "no verified rollout replica for 1 s (trainer.fleet_deadline_s)" in trainer.said()


async def test_a_wrong_replica_never_serves(trainer: Trainer, replay: ReplayClient, tiny_model: Path) -> None:
    good, bad = SmallReplica(replay, tiny_model), SmallReplica(replay, tiny_model, faulty=True)
    async with running(good.run(), bad.run(), score_all(replay)):
        assert await trainer.run() == 0, trainer.said()
        fleet = {replica.id: replica for replica in await replay.replicas()}
    assert bad.installed == []
    check_history(trainer)
    # three refits in a row, and then nobody waited for it any more
    assert (fleet[good.id].state, fleet[bad.id].state) == ("HEALTHY", "QUARANTINED")
    reason = "its refit failed: log-probabilities of the probe differ by 1"
    assert fleet[bad.id].reason.startswith(reason)
    assert fleet[bad.id].reason.endswith("; 3 times in a row")
    assert trainer.said().count(f"replica {bad.id} is quarantined: {reason}") == 1
    assert trainer.said().count(f"replica {bad.id} did not take version") == 3
    epoch = await replay.epoch()
    assert epoch is not None
    assert epoch.members == (good.id,)


async def test_bfloat16_replicas_are_verified_within_each_versions_bounds(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    trainer.settings["policy"]["precision"] = "bfloat16"
    replica = SmallReplica(replay, tiny_model)
    async with running(replica.run(), score_all(replay)):
        assert await trainer.run() == 0, trainer.said()
    check_history(trainer)
    assert set(replica.installed) == {0, 1, 2, 3, 4}


# what a model of 135 M parameters differs by in bfloat16 is a fault in a tiny one
@pytest.mark.parametrize(
    ("precision", "apart"),
    # the bounds of bfloat16 have a test of their own below
    [("float32", 0.01), pytest.param("bfloat16", 0.15, marks=pytest.mark.nightly)],
)
async def test_a_model_that_no_replica_computes_alike_is_never_trained(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path, precision: str, apart: float
) -> None:
    trainer.settings["policy"]["precision"] = precision
    bad = SmallReplica(replay, tiny_model, faulty=apart)
    async with running(bad.run()):
        assert await trainer.run() == EXIT_USER_ERROR
    assert bad.installed == []
    assert [line.step for line in trainer.journal() if line.kind == "train"] == []
    assert "initial weights: 1 x log-probabilities" in trainer.said()
    assert f"here {precision} (policy.precision)" in trainer.said()
    assert "token 2 on tie_word_embeddings True; from token 3 on rope_parameters " in trainer.said()
    assert "policy.hf_config_overrides" in trainer.said()
    assert f"; there {precision} (policy.generation.vllm_cfg.precision)" in trainer.said()


async def test_a_replica_whose_probabilities_drift_is_quarantined(
    trainer: Trainer, replay: ReplayClient, limits: Limits, tiny_model: Path
) -> None:
    trainer.settings["grpo"] |= {
        "num_prompts_per_step": 4,
        "max_num_steps": 100,
        "val_period": 0,
        "val_at_start": False,
    }
    trainer.settings["data"]["train"]["size"] = 1000
    # what the weights learn in a step is no disagreement
    trainer.settings["policy"]["optimizer"]["kwargs"]["lr"] = 1e-5
    await replay.open_run(dataclasses.replace(limits, prompts_per_step=4))
    good, bad = SmallReplica(replay, tiny_model, most=1), SmallReplica(replay, tiny_model, off=1.0, most=1)
    trainer.start()

    async def fleet() -> dict[str, Replica]:
        return {replica.id: replica for replica in await replay.replicas()}

    async def quarantined() -> bool:
        return any(replica.state == "QUARANTINED" for replica in (await fleet()).values())

    async with running(good.run(), bad.run(), score_all(replay)):
        await eventually(quarantined)
        version = max(good.installed)
        await installed(good, version + 2)
        now = await fleet()
    assert max(bad.installed) <= version + 1
    assert now[good.id].state == "HEALTHY"
    assert now[good.id].logprob_error == pytest.approx(1.0, abs=0.05)
    assert now[bad.id].logprob_error == pytest.approx(math.e, abs=0.1)
    assert re.search(r"in step \d+ token_mult_prob_error is [23].* 3 times in a row", now[bad.id].reason)
    assert trainer.said().count(f"replica {bad.id} is quarantined") == 1
    assert f"replica {good.id} is quarantined" not in trainer.said()


async def test_another_fleet_takes_over_at_the_version_it_finds(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    first, second = SmallReplica(replay, tiny_model), SmallReplica(replay, tiny_model)
    process = trainer.start()
    async with running(first.run(), score_all(replay)):
        await installed(first, 1)
    async with running(second.run(), score_all(replay)):
        assert await ended(process) == 0, trainer.said()
    assert 0 not in second.installed
    check_history(trainer)


async def test_a_validation_that_hangs_is_given_up_and_counted_as_pending(
    trainer: Trainer, replay: ReplayClient
) -> None:
    trainer.settings["trainer"]["validation_deadline_s"] = 1
    await run_with_replica(trainer, replay, mute=True)
    check_history(trainer)
    for line in trainer.journal():
        if line.kind == "validation":
            counts = {name: line.metrics[name] for name in ("evaluated", "failed", "pending")}
            assert counts == {"evaluated": 0, "failed": 0, "pending": 3}
            assert "accuracy" not in line.metrics, "nothing was evaluated"


async def test_sigterm_stops_cleanly_and_the_next_start_goes_on(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    replica = SmallReplica(replay, tiny_model)
    async with running(replica.run(), score_all(replay)):
        process = trainer.start()
        await installed(replica, 1)
        process.terminate()
        assert await ended(process) == EXIT_STOPPED, trainer.said()
        stopped = re.search(
            r"stopped at version (\d+); the next start continues from checkpoint (\d+)$", trainer.said(), re.MULTILINE
        )
        assert stopped, trainer.said()
        assert stopped[1] == stopped[2], "what was trained is saved"
        trained = sum(line.kind == "train" for line in trainer.journal())
        assert (
            f"<p>{trained} steps, the last one {trained - 1},"
            in (trainer.config.run_folder / "curves.html").read_text()
        )
        assert await trainer.run() == 0, trainer.said()
    check_history(trainer)


async def test_an_unwritable_checkpoint_ends_the_run(trainer: Trainer, replay: ReplayClient) -> None:
    trainer.settings["grpo"] |= {"max_num_steps": 1, "val_period": 0, "val_at_start": False}
    await run_with_replica(trainer, replay, "full_disk:1", code=EXIT_USER_ERROR)
    assert re.search(r"write a checkpoint to .*untouched", trainer.said())
    assert trainer.checkpoints().find_published() == []
    assert (await replay.state()).committed == 0


# torchrun's ranks import all of torch anew; test_launch.py and cli/test_working_directory.py have its exit codes and paths by day
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.nightly)])
async def test_two_ranks_take_the_steps_of_one(
    trainer: Trainer,
    replay: ReplayClient,
    limits: Limits,
    redis_url: str,
    tiny_model: Path,
    tmp_path: Path,
    torchrun: bool,
) -> None:
    trainer.settings["grpo"] |= {"async_grpo": {"enabled": False}, "val_period": 0, "val_at_start": False}
    await replay.open_run(dataclasses.replace(limits, max_age=0))
    await run_with_replica(trainer, replay)
    twin = ReplayClient(open_redis(redis_url), f"{replay.run_id}-two")
    await twin.open_run(dataclasses.replace(limits, max_age=0))
    pair = Trainer({**trainer.settings, "run": {**trainer.settings["run"], "id": twin.run_id}}, tmp_path / "two.log")
    async with running(SmallReplica(twin, tiny_model).run(), score_all(twin)):
        codes = [await pair.run_torchrun(2)] if torchrun else await pair.run_ranks(2)
        assert set(codes) == {0}, pair.said()
    check_samples(SampleFiles(pair.config.log_folder, None), pair.journal())
    await twin.aclose()
    assert check_history(trainer) == check_history(pair)
    for one, two in zip(trainer.journal(), pair.journal(), strict=True):
        assert one.step == two.step
        for name in ("loss", "grad_norm", "reward", "total_valid_tokens", "truncation_rate", "approx_entropy"):
            assert two.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4, abs=1e-6)


async def test_a_rank_that_dies_ends_the_others(trainer: Trainer, replay: ReplayClient, tiny_model: Path) -> None:
    async with running(SmallReplica(replay, tiny_model).run(), score_all(replay)):
        assert await trainer.run_ranks(2, "rank_1_reads") == [1, -signal.SIGKILL], trainer.said()
    assert "another rank of the trainer failed" in trainer.said()


async def test_a_run_whose_prompts_all_fail_says_how_many_and_why(trainer: Trainer, replay: ReplayClient) -> None:
    trainer.settings["data"]["train"]["size"] = 5
    trainer.settings["grpo"] |= {"max_num_steps": 100, "val_period": 0, "val_at_start": False, "val_at_end": False}
    await run_with_replica(trainer, replay, code=EXIT_USER_ERROR, doomed=frozenset(range(5)))
    failed = (await settled(replay))["failed"]
    assert f"its prompts: {failed} failed" in trainer.said()
    assert f"{failed} x this problem is doomed" in trainer.said()


async def test_a_run_that_evaluates_names_what_failed(trainer: Trainer, replay: ReplayClient, tiny_model: Path) -> None:
    trainer.settings["data"]["evaluate"] = {"validation": None, "train": None}
    trainer.settings["grpo"] |= {"val_at_start": False, "val_period": 0, "val_at_end": True}
    trainer.settings["grpo"]["val_num_generations_per_prompt"] = 2

    async def score() -> None:
        while True:
            jobs = await replay.take_scoring({"sums": 64})
            for job in jobs:
                refused = job.group.id == "v0-validation-1"
                score = Score("INVALID", message="no such sum") if refused else Score("SCORED", 1.0, {"right": 1.0})
                with contextlib.suppress(Fenced, InvalidCall):
                    await replay.score(job, score)
            if not jobs:
                await replay.wait_scoring(0.1)

    async with running(SmallReplica(replay, tiny_model).run(), score()):
        assert await trainer.run() == 0, trainer.said()
    assert await settled(replay) == {}
    assert trainer.checkpoints().find_published() == []
    files = SampleFiles(trainer.config.log_folder, None)
    found = report(files.read("val", 0), files.read("val_failed", 0))
    assert list(found) == ["validation", "train"]
    assert (found["validation"].evaluated, found["validation"].failed) == (2, 1)
    (reason,) = found["validation"].failures
    assert "no such sum" in reason
    assert found["train"].evaluated > 10
    assert (found["train"].samples, found["train"].pass_at, found["train"].components) == (
        2,
        {1: 1, 2: 1},
        {"right": 1},
    )
    counts = (await replay.stats())["counts"]["validation"]
    assert counts["evaluated"] == found["train"].evaluated + 2
    assert counts["failed"] == 1
