"""A runner's process is killed at each boundary of an episode (acceptance 8): one program instance a trajectory, siblings kept, attempts
charged as written, and no byte left in the buffer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from fastapi import FastAPI, Request, Response

from headrace.net.replica_client import RENDER, SAMPLE, Rendered, RenderRequest, SampleRequest
from headrace.net.service import bind, serve_openly
from headrace.records.trajectory import EpisodeTrajectory, Sampling, decode_trajectory
from headrace.replay import EnvironmentLimits, Limits, ReplayClient
from tests.support.buffer import contents, keep_alive, make_group, nonce, payloads, refit, reserve, tighten
from tests.support.gateways import ToyReplica
from tests.support.noted_program import CALLS
from tests.support.processes import UNPRIVILEGED
from tests.support.reward_hub import WAIT_S, scoring, start_hub
from tests.support.toy_policy import END, ToyPolicy
from tests.support.waiting import STALL_S, eventually

N = 2
GROUPS = 2  # of a step
SUPPORT = Path(__file__).parents[2] / "support"

pytestmark = pytest.mark.limits(
    prompts_per_step=GROUPS,
    generations_per_prompt=N,
    environments={"talk": EnvironmentLimits(episodes=True)},
    replica_dead_s=STALL_S,
)


@contextlib.asynccontextmanager
async def replica(replay: ReplayClient) -> AsyncIterator[None]:
    """A toy with an address, in the fleet."""
    name, app = nonce(), FastAPI()
    toy = ToyReplica(ToyPolicy(version=0, timeline=(await replay.state()).timeline, replica=name))

    async def sample(request: Request) -> Response:
        return _json(await toy.sample(msgspec.json.decode(await request.body(), type=SampleRequest)))

    async def render(request: Request) -> Response:
        asked = msgspec.json.decode(await request.body(), type=RenderRequest)
        ids = await toy.render(asked.messages, asked.tools, add_generation_prompt=asked.add_generation_prompt)
        return _json(Rendered(ids))

    app.post(SAMPLE)(sample)
    app.post(RENDER)(render)
    with contextlib.closing(bind("127.0.0.1", 0, "port")) as sock:
        async with serve_openly(app, sock):
            await replay.register(name, {"url": f"http://127.0.0.1:{sock.getsockname()[1]}"})
            await refit(replay, 0, [name])
            beating = asyncio.create_task(keep_alive(replay, name))
            yield
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


@dataclasses.dataclass
class Scene:
    replay: ReplayClient
    limits: Limits
    folder: Path
    config: Path

    def runner(self, boundary: str = "none") -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", "tests.support.killed_runner", boundary, str(self.folder), str(self.config))
        with (self.folder / "runner.log").open("ab") as log:
            return subprocess.Popen([*UNPRIVILEGED, *command], stdout=log, stderr=log)

    def started(self) -> Counter[tuple[str, int]]:
        """How often the program of each episode was started."""
        return Counter((group, int(index)) for group, index, _, _ in self._starts())

    def last_started(self, group: str, index: int) -> str:
        return [each[3] for each in self._starts() if each[:2] == [group, str(index)]][-1]

    def _starts(self) -> list[list[str]]:
        return [line.split() for line in (self.folder / "started").read_text().splitlines()]

    async def killed(self, runner: subprocess.Popen[bytes]) -> None:
        """Return once it is, and the buffer knows; the next runner has all the time in the world."""
        code = await asyncio.to_thread(runner.wait, WAIT_S)
        assert code == -9, (self.folder / "runner.log").read_text()
        await eventually(self._nobody)
        (self.folder / "killed").touch()
        await tighten(self.replay, self.limits, replica_dead_s=30.0)

    async def _nobody(self) -> bool:
        return not any(runner.alive for runner in await self.replay.runners())

    async def trained(self) -> dict[tuple[str, int], str]:
        """Commit a step; returns the program instance that made each trajectory."""
        made = {}
        batch = await reserve(self.replay, 0)
        for place, each in enumerate(batch.trajectories):
            episode = decode_trajectory(await self.replay.redis.get(each.key))
            assert isinstance(episode, EpisodeTrajectory)
            assert [call.parent for call in episode.calls] == list(range(-1, CALLS - 1))
            instances = set(re.findall("instance (\\w+)", str([call.messages for call in episode.calls])))
            assert len(instances) == 1, f"trajectory {place} is of several instances of its program"
            made[episode.group_id, episode.index] = instances.pop()
        await self.replay.commit(1, (await self.replay.state()).timeline)
        return made


@pytest.fixture
async def scene(
    replay: ReplayClient, limits: Limits, redis_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Scene]:
    """`request.param`: slots of a runner, and whether a grader scores."""
    slots, graded = request.param
    judge: dict[str, Any] = {"judge": {"target": f"{SUPPORT / 'noted_program.py'}:Judge"}} if graded else {}
    talk = {"type": "function", "function": "tests.support.noted_program:play", "public": ["folder", "gate"]}
    env: dict[str, Any] = {"talk": talk | ({"grader": "judge"} if graded else {"episodes": True}), **judge}
    async with start_hub(env) as hub, replica(replay), scoring(replay, hub.port):
        config = tmp_path / "run.yaml"
        settings = {
            "run": {"id": replay.run_id, "dir": str(tmp_path)},
            "env": env,
            "replay": {"redis_url": redis_url},
            "reward": {"address": f"127.0.0.1:{hub.port}"},
            "rollout": {"heartbeat_s": 0.1},
            "grpo": {"num_generations_per_prompt": N},
            "agents": {"slots": slots, "port": 0, "http_port": 0},
        }
        config.write_text(yaml.safe_dump(settings))
        gates = ["killed" if graded else "handed-in", "killed"]  # the second group is open until the kill
        groups = [
            msgspec.structs.replace(
                make_group(order, n=N, env_name="talk"),
                extra_env_info={"folder": str(tmp_path), "gate": gate},
                sampling=Sampling(1.0, 64, stop_token_ids=(END,)),
            )
            for order, gate in enumerate(gates)
        ]
        await replay.enqueue(groups, (await replay.state()).timeline)
        yield Scene(replay, limits, tmp_path, config)


FIRST, SECOND = "e0-train-0", "e0-train-1"
ALONE, TOGETHER = N, N * GROUPS
# by day a runner dies while a grader scores, below; test_law_episodes.py has what the buffer does at each boundary, without processes
NIGHTLY = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "boundary", "starts", "failures"),
    [
        pytest.param((ALONE, False), "appended", 2, 1, id="between the append of a call and its answer", marks=NIGHTLY),
        pytest.param((ALONE, False), "unfinished", 2, 1, id="between the last answer and finish", marks=NIGHTLY),
        pytest.param((ALONE, False), "finished", 1, 0, id="behind finish", marks=NIGHTLY),
        pytest.param((TOGETHER, False), "appended", 2, 0, id="with another group", marks=NIGHTLY),
    ],
    indirect=["scene"],
)
async def test_a_runner_is_killed(scene: Scene, boundary: str, starts: int, failures: int) -> None:
    """`starts` of the program that it was killed with; `failures` are attempts that the group is charged."""
    await scene.killed(scene.runner(boundary))
    await finishes(scene, starts, failures)


@pytest.mark.slow
@pytest.mark.parametrize("scene", [(ALONE, True)], indirect=True)
async def test_a_runner_is_killed_while_a_grader_scores(scene: Scene) -> None:
    runner = scene.runner()
    await eventually(lambda: (scene.folder / "grading").exists() and scene.started()[FIRST, 1] == 1)
    hidden_from_others(runner.pid)
    runner.kill()
    await scene.killed(runner)
    (scene.folder / "verdict").touch()
    await finishes(scene, starts=2, failures=1)


async def finishes(scene: Scene, starts: int, failures: int) -> None:
    """The next runner plays the rest."""
    replay = scene.replay
    first, second = [await replay.group(name) for name in (FIRST, SECOND)]
    assert first
    assert second
    assert [first["failures"], second["failures"]] == [failures, 0]
    runner = scene.runner()
    try:
        await eventually(lambda: _counts(replay, ready=GROUPS))
    finally:
        runner.terminate()
    assert await asyncio.to_thread(runner.wait, WAIT_S) == 0, (scene.folder / "runner.log").read_text()
    started = scene.started()
    assert started[FIRST, 0] == 1, "the sibling is kept"
    assert started[FIRST, 1] == starts
    made = await scene.trained()
    assert made == {(group, index): scene.last_started(group, index) for group in (FIRST, SECOND) for index in range(N)}
    assert (await replay.stats())["bytes"] == 0
    assert not await payloads(replay)
    assert not [key for key in await contents(replay) if re.search(rb":[pq]:", key)]


def hidden_from_others(pid: int) -> None:
    """The runner's memory and environment, from a process of its user."""
    code = "import sys\nfor name in sys.argv[2:]:\n try: open(f'/proc/{sys.argv[1]}/{name}')\n except PermissionError: print('no')"
    names = ("environ", "mem", "maps")
    asked = subprocess.run(
        [*UNPRIVILEGED, sys.executable, "-c", code, str(pid), *names], capture_output=True, text=True
    )
    assert asked.stdout.split() == ["no"] * len(names)


async def _counts(replay: ReplayClient, **expected: int) -> bool:
    return {state: count for state, count in (await replay.state()).counts.items() if count} == expected
