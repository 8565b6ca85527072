"""Episodes through the hub: programs that are served, attached, or a function of their own process, against a scripted policy."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from headrace import Episode, Sample, Score
from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.env.episode import EpisodeOutcome
from headrace.env.kit.scripted_policy import ScriptedPolicy, ScriptedSession
from headrace.env.wire import episode_to_wire, outcome_from_wire
from headrace.net import rpc
from headrace.net.credentials import Credentials, complete
from headrace.v1 import episode_pb2, reward_pb2, reward_pb2_grpc, trajectory_pb2
from headrace_services.reward import served as served_module
from headrace_services.reward.main import sources_of_parts
from tests.support.raw_environment import raw_environment, scored
from tests.support.reward_hub import WAIT_S, Hub, attach_environment, credit_wait, hurried, start_environment, start_hub
from tests.support.waiting import eventually

ODD = Path(__file__).parents[2] / "support" / "odd_program.py"
SCORES = ODD.with_name("odd_environment.py")


@pytest.fixture
def policy() -> Iterator[ScriptedPolicy]:
    with ScriptedPolicy() as policy:
        yield policy


def episode(session: ScriptedSession | None = None, within_s: float = WAIT_S, **public: Any) -> Episode:
    base_url, key = ("http://127.0.0.1:1/v1", "key") if session is None else (session.base_url, session.api_key)
    prompt = ({"role": "user", "content": "How many?"},)
    return Episode(base_url, key, prompt, public, deadline=time.monotonic() + within_s, environment="odd", group_id="g")


async def run(hub: Hub, played: Episode) -> EpisodeOutcome:
    request = reward_pb2.RunEpisodeRequest(episode=episode_to_wire(played))
    return outcome_from_wire((await hub.stub.RunEpisode(request, timeout=WAIT_S)).outcome)


async def score(hub: Hub, played: Episode) -> Score:
    found = (await run(hub, played)).score
    assert found is not None
    return found


def with_grader(odd: dict[str, Any]) -> dict[str, Any]:
    return {"odd": odd, **({"length": {"max_tokens": 3}} if "grader" in odd else {})}


@contextlib.asynccontextmanager
async def served(**env: Any) -> AsyncIterator[Hub]:
    async with (
        start_environment(ODD) as odd,
        start_hub(with_grader({"target": odd.target, "episodes": True, **env})) as hub,
    ):
        yield hub


@contextlib.asynccontextmanager
async def attached(**env: Any) -> AsyncIterator[Hub]:
    async with start_hub(with_grader({"attached": True, "episodes": True, **env})) as hub, attach_environment(ODD, hub):
        await hub.ready()
        yield hub


@contextlib.asynccontextmanager
async def function(**env: Any) -> AsyncIterator[Hub]:
    made = {"type": "function", "function": "tests.support.odd_program:play", "concurrency": 4, **env}
    async with start_hub(with_grader(made)) as hub:
        yield hub


KINDS = pytest.mark.parametrize("start", [served, attached, function])
Start = Callable[..., contextlib.AbstractAsyncContextManager[Hub]]


@KINDS
async def test_programs_earn_and_one_that_fails_touches_no_other(start: Start, policy: ScriptedPolicy) -> None:
    async with start() as hub:
        described = (await hub.environments())["odd"]
        assert (described.ready, described.description.episodes, described.description.capacity) == (True, 4, 0)
        sessions = [policy.session([str(reward)]) for reward in range(3)]
        *earned, failed = await asyncio.gather(
            *(score(hub, episode(each)) for each in sessions), score(hub, episode(do="raise"))
        )
        assert [each.reward for each in earned] == [0, 1, 2]
        assert all(each.build == described.description.build and each.environment for each in earned)
        assert all(0 < each.timings["environment"] < WAIT_S for each in earned)
        assert (failed.status, failed.reward) == ("FAILED", None)
        assert "the board is broken (" in failed.message
        assert "odd_program.py:" in failed.message
        assert [len(session.calls) for session in sessions] == [1, 1, 1]
        listed = (await hub.environments())["odd"]
        assert (listed.recent.scored, listed.recent.failed, listed.in_hand) == (3, 1, 0)


@KINDS
async def test_what_reaches_the_program_is_what_was_sent(start: Start) -> None:
    async with start() as hub:
        outcome = await run(hub, episode(do="told", board=[1, 2]))
    assert outcome.artifacts["told"] == {
        "public": {"do": "told", "board": [1, 2]},
        "messages": [{"role": "user", "content": "How many?"}],
        "attempt": 0,
    }


@KINDS
async def test_a_program_that_is_late_is_timed_out_and_cancelled(start: Start, tmp_path: Path) -> None:
    touched = {"touch": str(tmp_path / "begun"), "cancelled": str(tmp_path / "cancelled")}
    async with start() as hub:
        late = await score(hub, episode(within_s=0.5, do="hang", **touched))
        assert late.status == "TIMED_OUT"
        await eventually((tmp_path / "cancelled").exists)
        # by the call's deadline as well
        with hurried(2.0):
            late = await score(hub, episode(do="hang", **touched))
        assert late.status == "TIMED_OUT"


@KINDS
async def test_a_caller_that_goes_ends_the_program_and_frees_its_room(
    start: Start, tmp_path: Path, policy: ScriptedPolicy
) -> None:
    async with start() as hub:
        for number in range(5):  # one more than run at a time
            begun, cancelled = tmp_path / f"begun{number}", tmp_path / f"cancelled{number}"
            played = episode(do="hang", touch=str(begun), cancelled=str(cancelled))
            running = asyncio.create_task(run(hub, played))
            await eventually(begun.exists)
            assert (await hub.environments())["odd"].in_hand == 1
            running.cancel()
            await eventually(cancelled.exists)
        assert (await score(hub, episode(policy.session(["7"])))).reward == 7


@KINDS
async def test_what_there_is_no_room_for_is_not_started(start: Start, tmp_path: Path, policy: ScriptedPolicy) -> None:
    async with start() as hub:
        begun = [tmp_path / f"begun{number}" for number in range(4)]
        held = [episode(do="hang", touch=str(each), cancelled=str(tmp_path / "gone")) for each in begun]
        running = [asyncio.create_task(run(hub, each)) for each in held]
        await eventually(lambda: all(each.exists() for each in begun))
        with credit_wait(0):
            assert (await score(hub, episode(policy.session(["7"])))).status == "NOT_STARTED"
        for each in running:
            each.cancel()


@KINDS
async def test_a_program_that_kills_its_process_stops_no_other(start: Start, policy: ScriptedPolicy) -> None:
    async with contextlib.AsyncExitStack() as stack:
        hub = await stack.enter_async_context(start())
        killed = await score(hub, episode(do="die"))
        assert (killed.status, killed.reward) == ("INTERRUPTED", None)
        if start is not function:  # theirs to start again
            return
        await hub.ready()
        assert (await score(hub, episode(policy.session(["7"])))).reward == 7


@KINDS
async def test_a_grader_scores_what_was_done_and_the_program_says_no_reward(start: Start) -> None:
    async with start(grader="length") as hub:
        for do in ("leave", "told"):  # a reward that it says all the same is not asked for
            outcome = await run(hub, episode(do=do))
            assert outcome.score is None
        assert (await score(hub, episode(do="raise"))).status == "FAILED"
        (graded,) = await hub.score([Sample("x", environment="odd", completion_token_ids=(1, 2, 3))])
        assert (graded.reward, graded.environment) == (1, "length")
        described = (await hub.environments())["odd"].description
        assert described.episodes == 4
        assert described.capacity == (await hub.environments())["length"].description.capacity


@KINDS
async def test_without_a_grader_a_reward_is_wanted_and_nothing_is_scored(start: Start) -> None:
    async with start() as hub:
        left = await score(hub, episode(do="leave"))
        assert left.status == "FAILED"
        assert "env.odd.grader" in left.message
        (refused,) = await hub.score([Sample("x", environment="odd")])
        assert (refused.status, refused.message.partition(",")[0]) == ("INVALID", "env.odd runs episodes")


def test_a_grader_can_prepare_for_the_problems_that_it_will_score() -> None:
    config = Config.model_validate(
        {
            "env": {
                "odd": {"attached": True, "episodes": True, "grader": "both"},
                "both": {"type": "combine", "parts": {"length": 1.0, "gym": 1.0}, "timeout_s": 120},
                "length": {"max_tokens": 3},
                "gym": {"type": "reasoning_gym"},
            },
            "data": {"train": {"dataset_name": "reasoning_gym", "task": "chain_sum", "env_name": "odd"}},
        }
    )
    assert [each.env_name for each in sources_of_parts(config)] == ["odd", "both", "length", "gym"]


async def test_unknown_names_and_environments_without_programs_are_invalid() -> None:
    async with start_hub({"regex": {"pattern": "a"}, "mine": {"attached": True}}) as hub:
        for name, said in {
            "odd": "this run has no environment 'odd' (it has: mine, regex); add env.odd to its configuration",
            "regex": "environment 'regex' runs no episodes; set env.regex.episodes",
            "mine": "environment 'mine' runs no episodes; set env.mine.episodes",
        }.items():
            request = reward_pb2.RunEpisodeRequest(episode=episode_to_wire(episode()))
            request.episode.environment = name
            refused = outcome_from_wire((await hub.stub.RunEpisode(request, timeout=WAIT_S)).outcome).score
            assert refused is not None
            assert refused.status == "INVALID"
            assert refused.message.startswith(said)


async def test_a_malformed_episode_is_refused() -> None:
    async with start_hub({"mine": {"attached": True}}) as hub:
        with pytest.raises(grpc.aio.AioRpcError, match="deadline_ms is 0") as refused:
            await hub.stub.RunEpisode(
                reward_pb2.RunEpisodeRequest(episode=episode_pb2.Episode(environment="mine")), timeout=WAIT_S
            )
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_runner_alone_may_ask_for_an_episode(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    complete(path, ["operator", "reader", "scorer", "agents", "environment odd"])
    known = Credentials(path)
    env = {"odd": {"attached": True, "episodes": True}}
    async with start_hub(env, credentials=path) as hub:
        request = reward_pb2.RunEpisodeRequest(episode=episode_to_wire(episode()))
        for role in ("operator", "reader", "scorer", "environment odd"):
            async with rpc.channel(f"127.0.0.1:{hub.port}", token=known.make_token_source(role)) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="may not call") as refused:
                    await reward_pb2_grpc.RewardServiceStub(channel).RunEpisode(request, timeout=WAIT_S)
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        async with rpc.channel(f"127.0.0.1:{hub.port}", token=known.make_token_source("agents")) as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            answer = outcome_from_wire((await stub.RunEpisode(request, timeout=WAIT_S)).outcome).score
            assert answer is not None
            assert answer.status == "NOT_STARTED"
            with pytest.raises(grpc.aio.AioRpcError, match="'agents' may not call"):
                await stub.Score(reward_pb2.ScoreRequest(), timeout=WAIT_S)


# -- served


async def test_a_served_environment_without_a_program_says_so_first() -> None:
    async with start_environment(SCORES) as odd, start_hub({"odd": {"target": odd.target, "episodes": True}}) as hub:
        listed = (await hub.environments())["odd"]
        assert not listed.ready
        assert "Odd runs no episodes" in listed.message
        assert (await score(hub, episode())).status == "NOT_STARTED"


async def test_a_served_environment_runs_no_more_episodes_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, seen = asyncio.Event(), asyncio.Event(), 0

    async def play(_: episode_pb2.Episode) -> episode_pb2.EpisodeOutcome:
        nonlocal seen
        seen += 1
        begun.set()
        await go.wait()
        return episode_pb2.EpisodeOutcome(result=scored(1.0))

    async with (
        raw_environment(play=play, episodes=1, capacity=0) as target,
        start_hub({"odd": {"target": target, "episodes": True}}) as hub,
    ):
        first = asyncio.create_task(score(hub, episode()))
        await begun.wait()
        with monkeypatch.context() as patched:
            patched.setattr(served_module, "ROOM_WAIT_S", 0.01)
            full = await score(hub, episode())
        assert (full.status, full.message) == ("NOT_STARTED", f"{target} runs 1 episodes, its maximum")
        waiting = [asyncio.create_task(score(hub, episode())) for _ in range(2)]  # each for the one before
        await hub.environments()
        assert seen == 1
        go.set()
        assert [(await each).reward for each in (first, *waiting)] == [1, 1, 1]
        assert (await score(hub, episode())).reward == 1
        assert seen == 4


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (episode_pb2.EpisodeOutcome(result=scored(float("nan"))), "not a finite number"),
        (episode_pb2.EpisodeOutcome(result=scored(7.0)), "reward 7 is not between"),
        (episode_pb2.EpisodeOutcome(result=scored(1.0), artifacts_json="[]"), "artifacts_json is a JSON list"),
        (episode_pb2.EpisodeOutcome(result=trajectory_pb2.Result(reward=1.0)), ""),
        (episode_pb2.EpisodeOutcome(), "returned no reward"),
    ],
)
async def test_law_7_failure_is_not_zero_what_breaks_the_contract_is_failed(
    outcome: episode_pb2.EpisodeOutcome, said: str
) -> None:
    async def play(_: episode_pb2.Episode) -> episode_pb2.EpisodeOutcome:
        return outcome

    async with (
        raw_environment(play=play, episodes=1, reward_max=1.0) as target,
        start_hub({"odd": {"target": target, "episodes": True}}) as hub,
    ):
        failed = await score(hub, episode())
    assert (failed.status, failed.reward) == ("FAILED", None)
    assert said in failed.message


# -- attached


async def test_an_attached_process_that_only_scores_runs_no_episodes() -> None:
    async with start_hub({"odd": {"attached": True, "episodes": True}}) as hub, attach_environment(SCORES, hub):
        async with asyncio.timeout(WAIT_S):
            while not (await hub.environments())["odd"].processes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        refused = await score(hub, episode())
    assert refused.status == "NOT_STARTED"
    assert "odd has no `episode`" in refused.message


async def test_a_grader_does_not_wait_for_its_processs_episodes(tmp_path: Path) -> None:
    """The process is attached under both names, and its episodes take all of their room."""
    env = {"odd": {"attached": True, "episodes": True, "grader": "grader"}, "grader": {"attached": True}}
    async with start_hub(env) as hub, attach_environment(ODD, hub, "--grader", "grader", "--capacity", "1"):
        await hub.ready()
        begun, cancelled = tmp_path / "begun", tmp_path / "cancelled"
        held = asyncio.create_task(run(hub, episode(do="hang", touch=str(begun), cancelled=str(cancelled))))
        await eventually(begun.exists)
        with credit_wait(0):
            assert (await score(hub, episode(do="leave"))).status == "NOT_STARTED"
        (graded,) = await hub.score([Sample("abc", environment="odd")])
        assert (graded.reward, graded.environment) == (3, "OddGrader")
        held.cancel()
        await eventually(cancelled.exists)


async def test_one_stream_offers_both_kinds_of_work_of_what_does_both() -> None:
    async with start_hub({"odd": {"attached": True}}) as hub, attach_environment(ODD, hub, "--both"):
        await hub.attached("odd", 2)
        (listed,) = (await hub.environments())["odd"].processes
        assert listed.capacity == 6
        assert (await hub.environments())["odd"].description.episodes == 4
        assert [each.reward for each in await hub.score([Sample("abc", environment="odd")])] == [3]


async def test_an_episode_whose_process_is_killed_goes_to_no_other(tmp_path: Path, policy: ScriptedPolicy) -> None:
    async with (
        start_hub({"odd": {"attached": True, "episodes": True}}) as hub,
        attach_environment(ODD, hub) as one,
        attach_environment(ODD, hub) as other,
    ):
        async with asyncio.timeout(WAIT_S):
            while (await hub.environments())["odd"].description.episodes != 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        seen = tmp_path / "seen"
        running = asyncio.create_task(run(hub, episode(do="say who and hang", touch=str(seen))))
        await eventually(lambda: seen.exists() and seen.read_text() != "")
        (killed,) = (each for each in (one, other) if each.pid == int(seen.read_text()))
        killed.send_signal(signal.SIGKILL)
        outcome = await running
        assert outcome.score is not None
        assert outcome.score.status == "INTERRUPTED"
        assert int(seen.read_text()) == killed.pid
        assert (await score(hub, episode(policy.session(["7"])))).reward == 7


async def test_an_outcome_that_no_message_holds_is_failed() -> None:
    env = {"odd": {"attached": True, "episodes": True}}
    async with start_hub(env, max_message_bytes=1024**2) as hub, attach_environment(ODD, hub):
        await hub.ready()
        huge = await score(hub, episode(do="huge"))
        assert huge.status == "FAILED"
        assert "leave less in artifacts" in huge.message


# -- a function


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nowhere.at_all:play", "env.odd.function nowhere.at_all:play"),
        ("tests.support.odd_program:plya", "no function plya"),
        ("tests.support.waiting:eventually", None),
        ("os:getcwd", "with one argument"),
    ],
)
async def test_a_function_that_cannot_be_run_ends_the_start_with_the_reason(function: str, said: str | None) -> None:
    start = start_hub({"odd": {"type": "function", "function": function}})
    if said is None:
        async with start:
            return
    with pytest.raises(ServiceError, match=r"env\.odd.*start") as refused:
        async with start:
            pass
    assert said in str(refused.value)


@pytest.mark.usefixtures("executed")
async def test_a_function_is_in_a_process_of_its_own_and_ends_with_the_hub() -> None:
    def processes() -> Iterator[int]:
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # one of another test has just ended
                if "headrace_services.reward.function_process" in " ".join(each.cmdline()):
                    yield each.pid

    async with function():
        (pid,) = processes()
    assert not psutil.pid_exists(pid)
    assert sys.modules.get("tests.support.odd_program") is None
