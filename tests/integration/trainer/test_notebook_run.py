"""A reward in a notebook that is edited while a run trains: a real trainer, buffer, scorer, hub and Jupyter kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.replay import ReplayClient
from headrace.run.lineage import FOLDER, LineageFiles
from headrace.run.sample_files import SampleFiles
from tests.support.notebook import notebook
from tests.support.reward_hub import scoring, start_hub
from tests.support.small_replica import SmallReplica, running
from tests.support.trainer_process import PROMPTS, STEPS, Trainer, check_history, ended, settled
from tests.support.waiting import eventually

# nightly: `integration/reward/test_notebook.py` edits a reward every day, without a trainer

# It hangs on half of each group from the prompt `hangs_from` of the run on.
REWARD = """
import asyncio, headrace


class Mine(headrace.Environment):
    async def score(self, sample):
        if sample.index and int(sample.group_id.rpartition("-")[2]) >= {hangs_from}:
            await asyncio.sleep(3600)
        return sample.index + {more}
"""
CAPACITY = 64

# no second chance: an attempt that is charged fails its group
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.limits(max_attempts=1, max_scoring_attempts=1)]


@pytest.fixture
def settings(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Prompts in the order of a file, whose number is in the id of their group; the steps alone, without validation."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f'{{"input": "{n}+1", "output": "{n + 1}"}}\n' for n in range(STEPS * PROMPTS + 4)))
    grpo = settings["grpo"] | {"val_period": 0, "val_at_start": False}
    data = {"shuffle": False, "train": {"data_path": str(problems), "env_name": "sums"}}
    return settings | {"grpo": grpo, "data": data, "env": {"sums": {"attached": True}}}


async def test_law_3_one_build_a_run_goes_on_when_a_cell_is_edited(
    trainer: Trainer, replay: ReplayClient, tiny_model: Path
) -> None:
    async def second_step_is_scored_in_part() -> bool:
        trained = any(line.kind == "train" for line in trainer.journal())
        groups = [await replay.group(f"e0-train-{order}") for order in range(PROMPTS, 2 * PROMPTS)]
        return trained and all(group is not None and group["scored"] == 1 for group in groups)

    # of one trajectory a call, so that those that hang keep no other's score
    environment = {"sums": {"attached": True, "max_batch_size": 1, "timeout_s": 120.0}}
    async with start_hub(environment) as hub, scoring(replay, hub.port), notebook() as cells:
        attach = f'headrace.attach("127.0.0.1:{hub.port}", Mine(), name="sums", capacity={CAPACITY}, wait=False)\nNone'
        await cells.run(REWARD.format(hangs_from=PROMPTS, more=0))
        await cells.run(attach)
        async with running(SmallReplica(replay, tiny_model).run()):
            training = trainer.start()
            await eventually(second_step_is_scored_in_part)
            await cells.run(REWARD.format(hangs_from=10**6, more=10))
            await cells.run(attach)
            assert await ended(training) == 0, trainer.said()

    check_history(trainer)
    assert await settled(replay) == {"trained": STEPS * PROMPTS}
    lines = [line for line in trainer.journal() if line.kind == "train"]
    (first,), *others = [line.builds["sums"] for line in lines]
    (later,) = {build for builds in others for build in builds}
    assert later != first
    assert [line.metrics["reward"] for line in lines] == [0.5] + [10.5] * (STEPS - 1)
    assert f"sums scores with build {later}, after {first}" in trainer.said()
    files = LineageFiles(trainer.config.checkpoint_folder / FOLDER)
    samples = SampleFiles(trainer.config.log_folder, None)
    for step in range(STEPS):
        build = later if step else first
        origins = [origin for group in files.read(step) for origin in group.trajectories]
        assert {(origin.build, origin.attempt) for origin in origins} == {(build, 1)}
        assert {sample.build for sample in samples.samples("train", step)} == {build}
