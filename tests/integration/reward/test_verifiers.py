"""Environments of verifiers' own tests, unedited, played through the hub: they come with the sources of the release that is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import Episode, Score
from headrace.base.errors import ConfigError
from headrace.config import load
from headrace.config.environments import VerifiersConfig
from headrace.env.episode import EpisodeOutcome
from headrace.env.kit.scripted_policy import Answers, ScriptedPolicy, ScriptedSession
from headrace.env.programs import Programs
from headrace.env.verifiers.program import check, playing, tasks
from headrace.env.wire import episode_to_wire, outcome_from_wire
from headrace.records.trajectory import Message
from headrace.v1 import reward_pb2
from tests.support.gateways import open_episode
from tests.support.own_python import own_python, pip, uv
from tests.support.ports import free_ports, listens
from tests.support.reward_hub import Hub, start_hub
from tests.support.toy_policy import ToyPolicy
from tests.support.waiting import eventually

# verifiers is installed for it, and takes seconds to be imported; each turn of its harness is a process
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.usefixtures("executed")]

WAIT_S = 600.0
EXAMPLES = Path(__file__).parents[3] / "examples"
SERVER = Path(__file__).parents[2] / "support" / "openenv_environment.py"
# of verifiers: a chat loop, on this machine
SEAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_python(tmp_path_factory.mktemp("verifiers"), "verifiers")


@pytest.fixture(scope="module")
def environments(python: Path) -> Path:
    """The folder of environments that verifiers tests itself with, whose modules need not be installed where it is on the path."""
    folder = python.parents[2]
    source = ("--no-deps", "--no-binary", "verifiers", "--dest", str(folder))
    pip(python, "download", *source, "--requirement", str(Path(__file__).parents[3] / "requirements" / "verifiers.txt"))
    (archive,) = folder.glob("verifiers-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (found,) = folder.glob("verifiers-*/tests/v1/fixtures")
    return found


@pytest.fixture(autouse=True)
def found(environments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(environments))


def environment(python: Path, name: str, **config: Any) -> dict[str, Any]:
    played = {"taskset": {"id": name}, "agent": SEAT, **config}
    return {"type": "verifiers", "python": str(python), "verifiers": played}


def rows(env: dict[str, Any], **select: Any) -> list[dict[str, Any]]:
    return tasks("played", VerifiersConfig.model_validate(env), select, 10)


def episode(name: str, row: dict[str, Any], base_url: str, key: str) -> Episode:
    public = {"task": row["task"]}
    return Episode(base_url, key, tuple(row["messages"]), public, deadline=time.monotonic() + WAIT_S, environment=name)


async def run(hub: Hub, name: str, row: dict[str, Any], session: ScriptedSession) -> Score:
    wire = episode_to_wire(episode(name, row, session.base_url, session.api_key))
    response = await hub.stub.RunEpisode(reward_pb2.RunEpisodeRequest(episode=wire), timeout=WAIT_S)
    found = outcome_from_wire(response.outcome).score
    assert found is not None
    return found


def commands(part: str) -> list[int]:
    """The processes below this one that were started by a command with this part."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if part in " ".join(each.cmdline()):
                found.append(each.pid)
    return found


def repeat(messages: Any) -> str:
    """What these environments want: what the user said last."""
    said: str = messages[-1]["content"]
    return said.rpartition(": ")[2]


def use_the_tool(messages: Any) -> Message:
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": "done"}
    call = {"name": "echo_back", "arguments": '{"message": "hello world"}'}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]}


async def test_environments_are_played_as_they_are(python: Path) -> None:
    wanted: dict[str, Answers] = {"echo-v1": repeat, "echo-user-sim-v1": repeat, "echo-tool-v1": use_the_tool}
    envs = {name: environment(python, name) for name in wanted}
    found = {name: rows(env) for name, env in envs.items()}
    assert [len(each) for each in found.values()] == [3, 1, 1]
    assert len(rows(envs["echo-v1"], include={"idx": "1:"}, limit=1)) == 1
    with ScriptedPolicy() as policy:
        async with start_hub(envs) as hub:
            right = {name: policy.session(answers) for name, answers in wanted.items()}
            wrong = {name: policy.session(lambda messages: "nothing") for name in wanted}
            played = [(name, sessions[name]) for sessions in (right, wrong) for name in wanted]
            scores = await asyncio.gather(*(run(hub, name, found[name][0], session) for name, session in played))
            described = await hub.environments()
        assert [(score.status, score.reward) for score in scores] == [("SCORED", 1.0)] * 3 + [("SCORED", 0.0)] * 3
        assert all(score.components == {"echoed": score.reward} for score in scores)
        assert all(
            score.build == described[name].description.build for score, (name, _) in zip(scores, played, strict=True)
        )
        # the user that is played continues what was said; the tool has answered
        assert [len(session.calls) for session in right.values()] == [1, 2, 2]
        assert [each["content"] for each in right["echo-user-sim-v1"].calls[1].messages[1:]] == [
            "hello world",
            "hello world",
            "goodbye world",
        ]
        assert "[ok-7f3]" in str(right["echo-tool-v1"].calls[1].messages[-1]["content"])
        assert policy.strays == []


async def test_what_it_cant_score_is_failed_and_the_unwanted_is_ended(python: Path) -> None:
    env = environment(python, "echo-v1")
    row, *_ = rows(env)
    asked, over = threading.Event(), threading.Event()

    def hang(messages: Any) -> str:
        asked.set()
        over.wait()
        return "late"

    with ScriptedPolicy() as policy:
        async with start_hub({"echo": env}) as hub:
            dead = policy.session(["hello world"])
            dead.ended = True
            failed = await run(hub, "echo", row, dead)
            other = {**row, "task": {"index": 0, "key": "of another task set"}}
            invalid = await run(hub, "echo", other, policy.session(["hello world"]))
            waiting = asyncio.create_task(run(hub, "echo", row, policy.session(hang)))
            await eventually(asked.is_set)

            assert commands("--base-url=")
            waiting.cancel()
            await eventually(lambda: not commands("--base-url="))
            over.set()
    # verifiers' own reward of it is 0
    assert (failed.status, failed.reward) == ("FAILED", None)
    assert "ProviderError" in failed.message
    assert (invalid.status, invalid.reward) == ("INVALID", None)


async def test_the_examples_sums_are_played_again_once_their_process_died(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    names = ("sums", "held_out")
    config = load(EXAMPLES / "verifiers_sums.yaml", [f"env.{name}.python={python}" for name in names])
    sums, held_out = (
        {row["messages"][-1]["content"]: row for row in tasks(name, config.env[name], {}, 1)} for name in names
    )
    assert (len(sums), len(held_out), sums.keys() & held_out.keys()) == (75, 25, set())
    row = sums["What is 3 + 0?"]
    envs = {name: config.env[name].model_dump(mode="json") for name in names[:1]}
    with ScriptedPolicy() as policy:
        async with start_hub(envs) as hub:
            sessions = [policy.session([answer]) for answer in ("It is 3", "4", "three")]
            scores = await asyncio.gather(*(run(hub, "sums", row, session) for session in sessions))
            (pid,) = commands("verifiers_worker.py serve")
            psutil.Process(pid).kill()
            await eventually(lambda: commands("verifiers_worker.py serve") not in ([], [pid]))
            async with asyncio.timeout(WAIT_S):
                again = await run(hub, "sums", row, policy.session(["3"]))
                while again.status in ("NOT_STARTED", "INTERRUPTED"):  # it is being started again
                    again = await run(hub, "sums", row, policy.session(["3"]))
        assert not commands("verifiers_worker.py")
    assert again.reward == 1.0
    assert [(score.status, score.reward) for score in scores] == [("SCORED", 1.0), ("SCORED", 0.0), ("SCORED", 0.0)]
    assert [each["role"] for each in sessions[0].calls[0].messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("duet-v1", {"agent": None}, "env.played.verifiers: its agents a and b would all be the policy"),
        ("echo-v1", {"retries": {"max_retries": 1}}, "env.played.verifiers: retries"),
        ("nowhere-v1", {}, "env.played.verifiers: .*taskset 'nowhere-v1' not found"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(python: Path, name: str, config: dict[str, Any], why: str) -> None:
    env = environment(python, name, **config)
    env["verifiers"] = {key: value for key, value in env["verifiers"].items() if value is not None}
    with pytest.raises(ConfigError, match=why):
        check("played", VerifiersConfig.model_validate(env))


async def test_what_is_trained_is_what_the_harness_was_given(python: Path, tmp_path: Path) -> None:
    """Against the gateway itself: two turns of a user are two calls on one path."""
    env = VerifiersConfig.model_validate(environment(python, "echo-user-sim-v1"))
    row, *_ = tasks("played", env, {}, 1)
    async with open_episode(ToyPolicy(reasoning="stripped")) as opened:
        async with playing("played", env, str(tmp_path / "socket")) as (program, _):
            base_url = f"{opened.address}/s/{opened.key}/v1"
            outcome: EpisodeOutcome = await Programs(program).run(episode("played", row, base_url, opened.key))
        ending = await opened.episode.end()
    assert outcome.score is not None
    assert outcome.score.status == "SCORED", outcome.score.message
    assert [call.trained for call in ending.calls] == [True, True]
    assert [call.parent for call in ending.calls] == [-1, 0]
    assert not ending.dropped


async def test_a_task_set_of_openenv_is_played(python: Path, tmp_path: Path) -> None:
    """Installed as docs/agents.md says; last, because the others need none of it."""
    override, (port,) = tmp_path / "fastmcp.txt", free_ports(1)
    override.write_text("fastmcp>=4,<5")
    requirements = Path(__file__).parents[3] / "requirements" / "verifiers.txt"
    own = ("--override", str(override), "-r", str(requirements), "openenv==0.10.0")
    uv(python, *own)
    taskset = {"id": "openenv", "base_url": f"http://127.0.0.1:{port}", "resets": [{"secret": 4}, {"secret": 5}]}
    env: dict[str, Any] = {"type": "verifiers", "python": str(python)}
    env["verifiers"] = {"taskset": taskset, "player": SEAT}
    row, _ = rows(env)
    server = await asyncio.create_subprocess_exec(python, SERVER, str(port))
    try:
        await eventually(lambda: server.returncode is not None or listens(port))
        with ScriptedPolicy() as policy:
            async with start_hub({"openenv": env}) as hub:
                sessions = [
                    policy.session(answers) for answers in (["4"], ['{"number": 5}', '{"number": 4}'], ["soon"])
                ]
                scores = await asyncio.gather(*(run(hub, "openenv", row, session) for session in sessions))
    finally:
        server.kill()
        await server.wait()
    assert [(score.status, score.reward) for score in scores] == [("SCORED", 1.0), ("SCORED", 1.0), ("FAILED", None)]
    assert [len(session.calls) for session in sessions] == [1, 2, 1]
    assert json.loads(str(sessions[1].calls[1].messages[-1]["content"]))["observation"]["said"] == "no"
