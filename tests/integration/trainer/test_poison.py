"""One prompt kills whatever replica works on it: a whole run, with replicas as processes that start again."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from headrace.config.services import ReplayConfig
from headrace.replay import Limits, ReplayClient
from tests.support.poisoned_replica import keep_up
from tests.support.small_replica import running, score_all
from tests.support.trainer_process import Trainer, check_history, settled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS, BATCH, STEPS = 64, 21, 3
POISON = 37


@pytest.mark.nightly  # a minute each; test_suspects.py has the law in the buffer by day, of replicas that are said to have died
@pytest.mark.parametrize("replicas", [1, 2])
async def test_law_6_one_prompt_of_64_kills_replicas_and_fails_alone(
    trainer: Trainer,
    replay: ReplayClient,
    limits: Limits,
    redis_url: str,
    tiny_model: Path,
    tmp_path: Path,
    replicas: int,
) -> None:
    trainer.settings["data"]["train"]["size"] = PROMPTS
    trainer.settings["data"]["train"]["task_config"] = {"digits": 3}
    trainer.settings["grpo"] |= {
        "num_prompts_per_step": BATCH,
        "max_num_steps": STEPS,
        "val_period": 0,
        "val_at_start": False,
    }
    trainer.settings["grpo"]["async_grpo"]["max_trajectory_age_steps"] = STEPS
    attempts = ReplayConfig().max_attempts
    await replay.open_run(
        dataclasses.replace(limits, prompts_per_step=BATCH, max_age=STEPS, max_attempts=attempts, replica_dead_s=5.0)
    )
    deaths: list[int | None] = []
    most = PROMPTS // replicas
    log = tmp_path / "replicas.log"
    fleet = [keep_up(redis_url, replay.run_id, tiny_model, POISON, most, deaths, log) for _ in range(replicas)]
    async with running(*fleet, score_all(replay)):
        assert await trainer.run() == 0, trainer.said()
    assert await settled(replay) == {"trained": STEPS * BATCH, "failed": 1}
    (letter,) = (await replay.stats())["failed"]
    assert f"group alone (attempt {attempts} of {attempts})" in letter["reason"]
    assert (await replay.group(letter["group"]) or {})["group"].dataset_index == POISON
    assert set(deaths) == {-signal.SIGKILL}
    assert len(deaths) == 2 + attempts  # with the others, in a cohort, and alone
    groups = check_history(trainer, STEPS, BATCH)
    assert letter["group"] not in groups
