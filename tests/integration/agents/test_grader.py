"""A grader in a process of its own scores an episode by what its program left and by the whole conversation, also after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.config import Config
from headrace.records.trajectory import EpisodeTrajectory, Sampling
from headrace_services.agents.program_starter import HubPrograms
from tests.integration.agents.stage import N, Stage
from tests.support.buffer import make_group
from tests.support.reward_hub import scoring, start_environment, start_hub
from tests.support.toy_policy import END

GRADER = Path(__file__).parents[2] / "support" / "graded_program.py"
FUNCTION = "tests.support.graded_program:play"
GROUPS = 3


async def test_a_grader_scores_episodes_after_all_other_processes_have_gone(stage: Stage) -> None:
    env: dict[str, Any] = {"talk": {"type": "function", "function": FUNCTION, "public": ["hint"], "grader": "seen"}}
    stage.config = Config.model_validate(
        {**stage.config.model_dump(exclude_unset=True), "env": {**env, "seen": {"attached": True}}}
    )
    groups = [
        msgspec.structs.replace(
            make_group(order, n=N, env_name="talk"),
            extra_env_info={"hint": f"hint {order}", "answer": "key"},
            sampling=Sampling(1.0, 64, stop_token_ids=(END,)),
        )
        for order in range(GROUPS)
    ]
    await stage.replay.enqueue(groups, (await stage.replay.state()).timeline)
    async with start_hub({**env, "seen": {"attached": True}}) as hub, stage.runner(HubPrograms([hub.channel])):
        await stage.until(scoring=GROUPS)
    # only the buffer has stayed
    async with (
        start_environment(GRADER) as grader,
        start_hub({**env, "seen": {"target": grader.target}}) as hub,
        scoring(stage.replay, hub.port),
    ):
        await stage.until(ready=GROUPS)
    tools = []
    for group in groups:
        held = await stage.replay.read_held(group.id)
        assert held is not None
        for trajectory, score in held.trajectories:
            assert isinstance(trajectory, EpisodeTrajectory)
            assert score is not None
            assert (score.reward, score.metadata) == (1.0, {"key": "key"})
            assert trajectory.artifacts["hint"] == group.extra_env_info["hint"]
            tools.append(score.components["tools"])
    assert sum(tools) > 0
