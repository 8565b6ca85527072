"""A retained step is trained once more on paper: what comes out is what was logged, and a difference is seen."""

from __future__ import annotations

import asyncio

import pytest
from click.testing import Result
from typer.testing import CliRunner

from headrace.base.errors import ServiceError
from headrace.cli.app import app
from headrace.launch import runs
from headrace.replay import ReplayClient
from headrace_services.trainer import replay_step
from tests.support.trainer_process import STEPS, Trainer, run_with_replica

pytestmark = [pytest.mark.slow, pytest.mark.limits(retain_steps=3)]


async def headrace(*args: object) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, [*map(str, args)]))


async def test_a_retained_step_is_computed_again(trainer: Trainer, replay: ReplayClient) -> None:
    trainer.settings["grpo"] |= {"val_period": 0, "val_at_start": False}
    await run_with_replica(trainer, replay)
    config = trainer.config
    # steps 1 to 3 are retained, and there are checkpoints of versions 2 and 4
    with pytest.raises(ServiceError, match=r"version 3.*: 2$"):
        await replay_step.main(config, replay, 3)
    with pytest.raises(ServiceError, match=r"step 0 .*: 2$"):
        await replay_step.main(config, replay, 0)
    with pytest.raises(ServiceError, match=f"step {STEPS} is not one"):
        await replay_step.main(config, replay, STEPS)

    done = await replay_step.main(config, replay, 2)
    logged = {line.step: line.metrics for line in trainer.journal() if line.kind == "train"}[2]
    assert [name for name, *_ in done.values] == ["loss", "grad_norm", "reward"]
    assert all(was == logged[name] for name, was, _ in done.values)
    assert done.differing(1e-5) == []
    assert logged["grad_norm"] > 0.01

    run = runs.save(config).parent
    said = await headrace("replay-step", 2, "--run", run)
    assert said.exit_code == 0, said.exception
    assert "4 trajectories of 2 groups" in said.stdout
    assert "all within the tolerance 0.001" in said.stdout

    # the weights of another version in that checkpoint's place
    checkpoints = config.checkpoint_folder
    (checkpoints / "step_2" / "policy").rename(checkpoints / "aside")
    (checkpoints / "step_4" / "policy").rename(checkpoints / "step_2" / "policy")
    said = await headrace("replay-step", 2, "--run", run)
    assert said.exit_code == 1
    assert "grad_norm" in said.stderr
    assert "reward" not in said.stderr
