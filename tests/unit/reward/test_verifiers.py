"""What becomes of an episode of verifiers, which of its tasks is played, and what its process is told and says: without verifiers."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import httpx
import pytest

from headrace import Episode, Score
from headrace.base.errors import ConfigError
from headrace.config.environments import VerifiersConfig
from headrace.env.kit.scripted_policy import ScriptedPolicy
from headrace.env.programs import Programs
from headrace.env.verifiers.program import VerifiersProgram, check, read_score
from headrace.env.verifiers.verifiers_worker import (
    Relay,
    Tasks,
    UnsupportedEnvironment,
    find_policy,
    find_retry,
    make_row,
    outcome,
    sources,
)

WAIT_S = 60.0
TASK = {"index": 0, "key": "k0"}


# -- what an episode came to -------------------------------------------------------------------------------------------------


def reward(score: float, weight: float = 1.0) -> Made:
    return Made(score=score, weight=weight, value=score * weight)


def trace(rewards: dict[str, Any], agent: str = "solver", ok: bool = True, errors: Any = ()) -> Made:
    found = [each for each in rewards.values() if each is not None]
    return Made(
        agent=Made(name=agent),
        ok=ok,
        errors=errors,
        rewards=rewards,
        reward=sum(each.value for each in found),
        metrics={"turns": 2.0},
        stop_condition="agent_completed",
    )


def error(message: str, traceback: str | None = None) -> Made:
    return Made(type="ProviderError", message=message, traceback=traceback)


def ended(*traces: Made, ok: bool = True, errors: Any = ()) -> dict[str, Any]:
    return outcome(Made(ok=ok, traces=traces, errors=errors), "solver")


def test_the_reward_is_the_rubrics_with_its_parts() -> None:
    said = ended(trace({"right": reward(1.0), "brief": reward(0.5, 0.2)}), trace({"calm": reward(9.0)}, "judge"))
    assert said == {
        "status": "SCORED",
        "reward": 1.1,
        "components": {"right": 1.0, "brief": 0.1},
        "metadata": {"stop": "agent_completed", "metrics": {"turns": 2.0}},
    }


@pytest.mark.parametrize(
    ("said", "why"),
    [
        # verifiers has 0 as the reward of these
        (
            ended(trace({"right": None}, ok=False, errors=[error("first"), error("upstream 500")]), ok=False),
            "ProviderError: upstream 500",
        ),
        (ended(trace({"right": reward(1.0)}), ok=False, errors=[error("finalize() raised")]), "finalize() raised"),
        (ended(trace({"right": reward(1.0)}), trace({}, "judge", False, [error("no judge")]), ok=False), "no judge"),
        (ended(trace({"right": reward(1.0)}), ok=False), "is not ok, but has no error"),
        (ended(trace({"right": reward(1.0), "brief": None})), "brief was not computed (agent_completed)"),
        (ended(trace({})), "records no reward"),
        (ended(trace({"right": reward(1.0)}), trace({"right": reward(0.0)})), "solver was run 2 times in one episode"),
        (ended(trace({"right": reward(1.0)}, "judge")), "solver was run 0 times"),
    ],
)
def test_what_failed_is_failed_and_never_zero(said: dict[str, Any], why: str) -> None:
    assert said["status"] == "FAILED"
    assert why in said["message"]
    assert "reward" not in said


def test_the_end_of_the_traceback_goes_along() -> None:
    said = ended(trace({}, ok=False, errors=[error("x", "a" * 5000 + "here")]), ok=False)
    assert said["traceback"].endswith("here")
    assert len(said["traceback"]) == 2000


# -- which environments ------------------------------------------------------------------------------------------------------


def test_one_agent_is_the_policy() -> None:
    mine, other = Made(client=None), Made(client="https://…")
    assert find_policy({"judge": other, "solver": mine}) == "solver"
    with pytest.raises(UnsupportedEnvironment, match=r"solver and judge.*reward"):
        find_policy({"solver": mine, "judge": mine})
    with pytest.raises(UnsupportedEnvironment, match=r"\(judge\).*none is the policy"):
        find_policy({"judge": other})


def test_what_would_play_an_episode_again_is_found() -> None:
    none, some = Made(max_retries=0, rules=[]), Made(max_retries=1, rules=[])
    rule = Made(max_retries=0, rules=[Made(max_retries=0), Made(max_retries=2)])
    assert find_retry({"retries": none, "solver.retries": none}) is None
    assert find_retry({"retries": none, "solver.retries": some}) == "solver.retries"
    assert find_retry({"retries": rule}) == "retries"


def test_software_is_told_by_its_source(tmp_path: Path) -> None:
    package = tmp_path / "game"
    package.mkdir()
    for name in ("__init__", "rules"):
        (package / f"{name}.py").write_text("1")
    (tmp_path / "single.py").write_text("1")
    modules = {
        "game": Made(__file__=str(package / "__init__.py")),
        "single": Made(__file__=str(tmp_path / "single.py")),
    }
    names = {"game.rules", "single", "verifiers.v1.envs.single_agent"}
    before = dict(sources(modules, names))
    assert list(before) == ["game", "single"]
    (package / "rules.py").write_text("2")
    after = dict(sources(modules, names))
    assert (after["single"], after["game"] == before["game"]) == (before["single"], False)


# -- tasks -------------------------------------------------------------------------------------------------------------------


def task(index: int, **data: Any) -> Made:
    return Made(
        key=f"k{index}", data=Made(**{"idx": index, "name": None, "prompt": "How?", "system_prompt": None, **data})
    )


class Endless:
    bounded = False

    def __iter__(self) -> Any:
        return map(task, itertools.count())


class Two:
    bounded = True

    def __iter__(self) -> Any:
        return map(task, range(2))


def test_a_task_is_found_by_its_place_and_has_its_rows_key() -> None:
    endless = Tasks(Endless())
    assert [endless.find({"index": index, "key": f"k{index}"}).key for index in (7, 0, 7)] == ["k7", "k0", "k7"]
    assert Tasks(Two()).find({"index": 1, "key": "k1"}).data.idx == 1


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"index": 1, "key": "other"}, r"task 1 has changed since .* \(its key is k1, and was other\)"),
        ({"index": 2, "key": "k2"}, "task 2 does not exist: the task set has 2"),
        ({"index": -1, "key": "k1"}, "names no task"),
        ({"index": "1", "key": "k1"}, "names no task"),
        (None, "names no task"),
    ],
)
def test_another_task_is_not_played_in_its_place(asked: Any, why: str) -> None:
    with pytest.raises(UnsupportedEnvironment, match=why):
        Tasks(Two()).find(asked)


def test_a_task_set_that_raises_says_so() -> None:
    class Broken(Two):
        def __iter__(self) -> Any:
            yield task(0)
            raise OSError("the hub is away")

    with pytest.raises(UnsupportedEnvironment, match=r"task set.*OSError: the hub is away"):
        Tasks(Broken())


@pytest.mark.parametrize(
    ("data", "messages"),
    [
        ({}, [("user", "How?")]),
        ({"system_prompt": "Be brief."}, [("system", "Be brief."), ("user", "How?")]),
        (
            {"prompt": [Made(role="user", content=[Made(type="text", text="a"), Made(type="image_url")])]},
            [("user", "a")],
        ),
        # its user is played, and speaks first
        ({"prompt": None, "name": "chess"}, [("user", "chess")]),
        ({"prompt": None, "system_prompt": "Play."}, [("system", "Play."), ("user", "task 3")]),
        ({"prompt": [Made(role="assistant", content="Well?")]}, [("assistant", "Well?"), ("user", "task 3")]),
    ],
)
def test_a_row_says_which_task_and_how_it_begins_and_no_more(data: dict[str, Any], messages: Any) -> None:
    row = make_row(task(3, answer="42", **data))
    assert row["task"] == {"index": 3, "key": "k3"}
    assert [(each["role"], each["content"]) for each in row["messages"]] == messages
    assert "42" not in json.dumps(row)


# -- its process -------------------------------------------------------------------------------------------------------------


async def played(address: str, answer: Callable[[dict[str, Any]], bytes] | None) -> Score:
    """What becomes of an episode whose process listens at `address` and answers so; None: it does not listen."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert answer is not None
        writer.write(answer(json.loads(await reader.readline())))
        writer.close()

    env = VerifiersConfig.model_validate({"type": "verifiers", "python": "p", "verifiers": {"taskset": {"id": "t"}}})
    programs = Programs(VerifiersProgram("e", env, address, ["verifiers 0.4.0", "t 12"]))
    episode = Episode("http://h/s/k/v1", "key", public={"task": TASK}, deadline=time.monotonic() + WAIT_S)
    if answer is None:
        score = (await programs.run(episode)).score
    else:
        async with await asyncio.start_unix_server(serve, address):
            score = (await programs.run(episode)).score
    assert score is not None
    return score


async def test_an_episode_is_a_connection_that_asks_and_is_answered(tmp_path: Path) -> None:
    def answer(asked: dict[str, Any]) -> bytes:
        assert asked == {"task": TASK, "base_url": "http://h/s/k/v1", "api_key": "key"}
        return json.dumps(ended(trace({"right": reward(1.0)}))).encode() + b"\n"

    score = await played(str(tmp_path / "s"), answer)
    assert (score.status, score.reward, score.components) == ("SCORED", 1.0, {"right": 1.0})
    assert score.build.startswith("verifiers 0.4.0, ")


def test_a_failure_has_the_traceback_of_its_process() -> None:
    failed = read_score({"status": "FAILED", "message": "it broke", "traceback": "there"})
    assert (failed.message, failed.traceback, failed.metadata) == ("it broke", "there", {})


def line(**said: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda asked: json.dumps(said).encode() + b"\n"


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        (line(status="FAILED", message="TaskError: it broke", traceback="there"), "FAILED", "TaskError: it broke"),
        (line(status="INVALID", message="no such task"), "INVALID", "no such task"),
        (line(status="SCORED", reward=float("nan"), components={}, metadata={}), "FAILED", "not a finite number"),
        # as any program whose process is lost: it begins anew, and is not charged
        (lambda asked: b"", "INTERRUPTED", "the verifiers process of env.e has ended"),
        (lambda asked: b'{"status": "SCO', "INTERRUPTED", "has ended"),
        (None, "NOT_STARTED", "the verifiers process of env.e can't be reached"),
    ],
)
async def test_what_is_no_reward_stays_none(tmp_path: Path, answer: Any, status: str, why: str) -> None:
    score = await played(str(tmp_path / "s"), answer)
    assert (score.status, score.reward) == (status, None)
    assert why in score.message


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("nowhere/bin/python", r"env.e.python 'nowhere/bin/python'"),
        (sys.executable, r"env.e.verifiers: .* can't import verifiers"),
        ("/bin/false", r"env.e.verifiers: /bin/false ended with status 1"),
    ],
)
def test_a_python_that_cannot_play_is_refused_with_the_remedy(python: str, why: str) -> None:
    env = VerifiersConfig.model_validate({"type": "verifiers", "python": python, "verifiers": {"taskset": {"id": "t"}}})
    with pytest.raises(ConfigError, match=why):
        check("e", env)


# -- the way of its calls ----------------------------------------------------------------------------------------------------


async def test_a_call_goes_to_its_traces_episode_with_a_private_key() -> None:
    relay = Relay()
    with ScriptedPolicy() as policy:
        mine, other = policy.session(["one"]), policy.session(["two"])
        async with relay.serving(), httpx.AsyncClient() as client:
            relay.episodes = {"a" * 32: (mine.base_url, mine.api_key), "b" * 32: (other.base_url, other.api_key)}

            async def ask(trace: str, stream: bool = False) -> httpx.Response:
                headers = {"x-session-id": trace, "authorization": "Bearer EMPTY"}
                body = {"messages": [{"role": "user", "content": "?"}], "stream": stream}
                return await client.post(f"{relay.base_url}/chat/completions", json=body, headers=headers)

            assert (await ask("b" * 32)).json()["choices"][0]["message"]["content"] == "two"
            streamed = await ask("a" * 32, stream=True)
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert '"one"' in streamed.text
            # past a limit, in the policy's words
            assert (await ask("a" * 32)).json()["error"]["code"] == "context_length_exceeded"
            del relay.episodes["a" * 32]
            assert (await ask("a" * 32)).status_code == 401
            relay.episodes["c" * 32] = ("http://127.0.0.1:1/v1", "key")
            assert (await ask("c" * 32)).status_code == 502
    assert (len(mine.calls), len(other.calls), policy.strays) == (2, 1, [])
