"""The runner on a real buffer and through its real gateway; programs run in this process, replicas are toys."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from typing import Any

import msgspec
import openai
import pytest
from prometheus_client import REGISTRY

from headrace.base.errors import ChatError, ServiceError
from headrace.env.episode import Episode, EpisodeOutcome
from headrace.net.replica_client import SampleRequest
from headrace.records.score import SCORE_BYTES, Score
from headrace.records.trajectory import JSON_DEPTH, EpisodeTrajectory, Trajectory, decode_trajectory
from headrace.replay import Limits, ReplayClient
from headrace_services.agents.runner import EpisodeRunner
from headrace_services.agents.running_episode import OpenEpisode
from tests.integration.agents.stage import N, Play, Played, Stage, scored, two_turns
from tests.support.buffer import make_group, nonce, refit, reserve, rewind, tighten
from tests.support.toy_policy import decode
from tests.support.waiting import eventually


async def payloads_of(stage: Stage, step: int) -> list[Trajectory | EpisodeTrajectory]:
    batch = await reserve(stage.replay, step)
    return [decode_trajectory(await stage.replay.redis.get(each.key)) for each in batch.trajectories]


async def test_groups_of_episodes_are_played_scored_and_reserved(stage: Stage, limits: Limits) -> None:
    programs = Played(two_turns)
    await stage.enqueue(*range(limits.prompts_per_step))
    async with stage.runner(programs):
        await stage.until(ready=limits.prompts_per_step)
    batch = await reserve(stage.replay, 0)
    assert sorted(each.reward for each in batch.trajectories) == sorted([0.0, 1.0] * limits.prompts_per_step)
    for each in batch.trajectories:
        episode = decode_trajectory(await stage.replay.redis.get(each.key))
        assert isinstance(episode, EpisodeTrajectory)
        assert [call.parent for call in episode.calls] == [-1, 0]
        assert each.length == episode.length
    assert len({episode.api_key for episode in programs.began}) == len(programs.began) == N * limits.prompts_per_step


async def test_a_program_gets_what_is_public_alone(stage: Stage) -> None:
    programs = Played(two_turns)
    group = msgspec.structs.replace(
        make_group(0, env_name="talk"), extra_env_info={"hint": "think", "answer": "secret"}
    )
    await stage.replay.enqueue([group], (await stage.replay.state()).timeline)
    async with stage.runner(programs):
        await stage.until(ready=1)
    assert {str(episode.public) for episode in programs.began} == {"{'hint': 'think'}"}
    assert programs.began[0].messages == group.messages


async def counted(runner: EpisodeRunner, episodes: int) -> None:
    """Return once a runner has counted them: the buffer has the last one before its answer is here."""
    await eventually(lambda: runner.status.outcomes.total() == episodes)


async def waits(episode: Episode) -> EpisodeOutcome:
    await asyncio.Event().wait()
    raise AssertionError


async def asks_and_waits(episode: Episode) -> EpisodeOutcome:
    await episode.chat(episode.messages)
    return await waits(episode)


def graded_by(stage: Stage, grader: str | None) -> None:
    env = stage.config.env["talk"].model_copy(update={"grader": grader})
    stage.config = stage.config.model_copy(update={"env": {"talk": env}})


async def failure(stage: Stage, play: Play, **settings: Any) -> str:
    """What the buffer says of a group that fails, all of whose episodes are played so."""
    await stage.enqueue(0)
    async with stage.runner(Played(play), **settings):
        await stage.until(failed=1)
    (failed,) = await stage.replay.failures()
    return str(failed)


async def reasons_of_one_failure(stage: Stage, play: Play, **settings: Any) -> list[str]:
    """Of a group that is completed although one of its episodes fails when it is played for the first time."""
    await stage.enqueue(0)
    async with stage.runner(Played(play), **settings) as (runner, _, _):
        await stage.until(ready=1)
        await counted(runner, 1 + N)
    assert runner.status.outcomes == {"failed": 1, "scored": N}
    return [fields["reason"] for _, fields in await stage.replay.events("0", 0.1) if fields.get("reason")]


async def test_an_episode_of_one_call_is_an_ordinary_trajectory(stage: Stage, limits: Limits) -> None:
    async def one_turn(episode: Episode) -> EpisodeOutcome:
        await episode.chat(episode.messages)
        return scored(float(episode.index))

    await stage.enqueue(*range(limits.prompts_per_step))
    async with stage.runner(Played(one_turn)):
        await stage.until(ready=limits.prompts_per_step)
    assert all(isinstance(each, Trajectory) for each in await payloads_of(stage, 0))


async def test_what_a_program_leaves_is_in_the_record_of_its_episode(stage: Stage, limits: Limits) -> None:
    async def leaves(episode: Episode) -> EpisodeOutcome:
        await episode.chat(episode.messages)
        left = {"board": [episode.index, None]} if episode.index else {}
        return dataclasses.replace(scored(float(episode.index)), artifacts=left)

    await stage.enqueue(*range(limits.prompts_per_step))
    async with stage.runner(Played(leaves)):
        await stage.until(ready=limits.prompts_per_step)
    found = await payloads_of(stage, 0)
    assert [type(each) for each in found] == [Trajectory, EpisodeTrajectory] * limits.prompts_per_step
    left = [each.artifacts for each in found if isinstance(each, EpisodeTrajectory)]
    assert left == [{"board": [1, None]}] * limits.prompts_per_step


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("x" * 100_000, "100011 bytes, and its record may have 65536"),
        ([[]] * 10**7, "10000011 bytes, and its record may have 65536"),
        ("x" * 65_500, "may have 65536 (agents.max_episode_bytes)"),
        ("\ud83d", "artifacts can't be packed"),
        (10**30, "artifacts can't be packed"),
        (float("inf"), "not made of JSON"),
        (_nested(JSON_DEPTH), f"at most {JSON_DEPTH} deep"),
        (_nested(100_000), "artifacts can't be packed"),
    ],
    ids=["large", "many", "large with the calls", "half a surrogate pair", "huge", "infinite", "deep", "endless"],
)
async def test_artifacts_that_cant_be_kept_fail_their_episode_alone(stage: Stage, left: Any, said: str) -> None:
    async def leaves(episode: Episode) -> EpisodeOutcome:
        await episode.chat(episode.messages)
        bad = episode.index == 0 and episode.attempt == 0
        return dataclasses.replace(scored(), artifacts={"left": left if bad else "fine"})

    (reason,) = await reasons_of_one_failure(stage, leaves, max_episode_bytes=65536)
    assert "its trajectory can't be recorded" in reason
    assert said in reason


async def test_artifacts_that_never_fit_fail_their_group(stage: Stage) -> None:
    async def leaves(episode: Episode) -> EpisodeOutcome:
        await episode.chat(episode.messages)
        return EpisodeOutcome(None, {"left": "x" * 100_000})

    graded_by(stage, "judge")
    failed = await failure(stage, leaves, max_episode_bytes=65536)
    assert "failed 2 times" in failed
    assert "agents.max_episode_bytes" in failed


async def test_what_a_limit_stopped_is_graded_with_what_it_had_left(stage: Stage) -> None:
    async def greedy(episode: Episode) -> EpisodeOutcome:
        episode.artifacts["calls"] = 0
        try:
            while True:
                await episode.chat(episode.messages)
                episode.artifacts["calls"] += 1
        except ChatError as error:
            return EpisodeOutcome(Score("FAILED", message=str(error)), episode.artifacts)

    graded_by(stage, "judge")
    await stage.enqueue(0)
    async with stage.runner(Played(greedy), max_rollout_turns=3):
        await stage.until(scoring=1)
    held = await stage.replay.read_held("e0-train-0")
    assert held is not None
    left = [each.artifacts for each, _ in held.trajectories if isinstance(each, EpisodeTrajectory)]
    assert left == [{"calls": 3}] * N


async def test_metrics_by_environment_say_what_episodes_came_to_and_lost(stage: Stage) -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"headrace_agents_{name}", {"environment": "talk", **labels}) or 0.0

    begun = asyncio.Event()

    async def never_answered(request: SampleRequest) -> None:
        if "never" in decode(request.token_ids):
            begun.set()
            await asyncio.Event().wait()

    async def play(episode: Episode) -> EpisodeOutcome:
        async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as client:

            async def ask(text: str, **headers: str) -> None:
                said: Any = [{"role": "user", "content": text}]
                await client.chat.completions.create(model="policy", messages=said, extra_headers=headers)

            await ask("one")
            await ask("one", **{"x-stainless-retry-count": "1"})
            await ask("another")
            unheard = asyncio.create_task(ask("never"))
            await begun.wait()
            unheard.cancel()
        return scored()

    stage.toy.before = never_answered
    names = ["episode_calls_sum", "episode_roots_sum", "retries_joined_total", "episode_tokens_sum"]
    again = "context_tokens_rendered_again_total"
    before = {name: value(name) for name in (*names, again)}
    phases = {phase: value("phase_seconds_count", phase=phase) for phase in ("render", "sample", "keep")}
    ended, dropped = value("episodes_total", outcome="scored"), value("calls_dropped_total", reason="unanswered")
    await stage.enqueue(0, n=1)
    async with stage.runner(Played(play)):
        await stage.until(ready=1)
    one, another = stage.toy.policy.asked
    wrote = len(one[1]) + len(another[1])
    assert [value(name) - before[name] for name in names] == [2, 2, 1, wrote]
    assert value(again) - before[again] >= len(another[0])
    found = {phase: value("phase_seconds_count", phase=phase) - count for phase, count in phases.items()}
    assert found == {"render": 3, "sample": 3, "keep": 2}
    assert value("episodes_total", outcome="scored") - ended == 1
    assert value("calls_dropped_total", reason="unanswered") - dropped == 1


async def test_metrics_count_what_was_ended_and_whose_options_were_imposed(stage: Stage) -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"headrace_agents_{name}_total", labels) or 0.0

    async def waits(episode: Episode) -> EpisodeOutcome:
        for temperature in (0.5, 0.5, None):
            await episode.chat(episode.messages, temperature=temperature, seed=1)
        began.append(episode)
        await asyncio.Event().wait()
        raise AssertionError

    began: list[Episode] = []
    imposed = {option: value("options_imposed", option=option) for option in ("temperature", "seed")}
    ended = value("episodes", environment="talk", outcome="returned")
    await stage.enqueue(0)
    async with stage.runner(Played(waits)) as (runner, stop, running):
        await eventually(lambda: len(began) == N)
        stop.set()
        await running
    assert runner.status.outcomes["returned"] == N
    assert value("episodes", environment="talk", outcome="returned") - ended == N
    found = {option: value("options_imposed", option=option) - count for option, count in imposed.items()}
    assert found == {"temperature": 2 * N, "seed": 3 * N}


async def test_what_failed_begins_anew_alone_and_is_charged(stage: Stage) -> None:
    async def fails_once(episode: Episode) -> EpisodeOutcome:
        if episode.index == 0 and episode.attempt == 0:
            return EpisodeOutcome(Score("FAILED", message="it raised"))
        return await two_turns(episode)

    programs = Played(fails_once)
    await stage.enqueue(0)
    async with stage.runner(programs):
        await stage.until(ready=1)
    assert sorted((episode.index, episode.attempt) for episode in programs.began) == [(0, 0), (0, 1), (1, 0)]
    assert len({episode.idempotency_key for episode in programs.began}) == 3


async def test_a_program_that_always_fails_fails_its_group(stage: Stage) -> None:
    async def fails(episode: Episode) -> EpisodeOutcome:
        return EpisodeOutcome(Score("FAILED", message="it raised"))

    assert "it raised" in await failure(stage, fails)


async def test_what_could_not_begin_is_not_charged(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_services.agents.runner._FIRST_PAUSE_S", 0.01)

    async def busy(episode: Episode) -> EpisodeOutcome:
        if episode.attempt < 5:
            return EpisodeOutcome(Score("INTERRUPTED" if episode.attempt % 2 else "NOT_STARTED", message="no room"))
        return await two_turns(episode)

    await stage.enqueue(0)
    async with stage.runner(Played(busy)):
        await stage.until(ready=1)


async def test_weights_that_the_buffer_forgot_cost_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server lost writes: no call can be kept until the trainer has restored it."""
    monkeypatch.setattr("headrace_services.agents.runner._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("headrace_services.agents.runner._LAST_PAUSE_S", 0.01)
    stage.toy.policy.version = 1  # of a step that the buffer knows nothing of
    await stage.enqueue(0)
    async with stage.runner(Played(two_turns)) as (runner, _, _):
        await eventually(lambda: runner.status.outcomes["not_started"] > stage.config.replay.max_attempts * N)
        stage.toy.policy.version = 0
        await stage.until(ready=1)


async def test_an_episode_with_forgotten_beginnings_is_lost_alone(stage: Stage, limits: Limits) -> None:
    """Its server lost writes: it takes nothing more under this lease, which another follows."""
    incarnation = (await stage.replay.state()).incarnation
    failed: list[Episode] = []

    async def fails_twice(episode: Episode) -> EpisodeOutcome:
        if episode.index == 0 and len(failed) < 2:
            failed.append(episode)
            await stage.replay.redis.hdel(f"hr:{{{stage.replay.run_id}}}:{incarnation}:g:e0-train-0", "a0")
            return EpisodeOutcome(Score("FAILED", message="it raised"))
        return await two_turns(episode)

    await tighten(stage.replay, limits, lease_s=1.0)
    await stage.enqueue(0)
    async with stage.runner(Played(fails_twice)) as (runner, _, _):
        await stage.until(ready=1)
        assert runner.status.outcomes["lost"] >= 1  # a busy machine may be late for the lease that follows


async def test_an_episode_that_is_too_large_for_the_buffer_is_charged(stage: Stage, limits: Limits) -> None:
    """The runner's configuration allows more than the buffer was opened with."""
    await stage.replay.open_run(dataclasses.replace(limits, max_episode_bytes=500))
    await stage.enqueue(0)
    async with stage.runner(Played(two_turns)) as (runner, _, _):
        await stage.until(failed=1)
    assert runner.status.outcomes["not_started"] == 0
    (failed,) = await stage.replay.failures()
    assert "more than max_episode_bytes 500" in str(failed)


async def test_a_program_that_hangs_ends_with_the_name_of_its_clock(stage: Stage) -> None:
    async def hangs(episode: Episode) -> EpisodeOutcome:
        if episode.attempt == 0:
            await asyncio.Event().wait()
        return await two_turns(episode)

    programs = Played(hangs)
    await stage.enqueue(0)
    async with stage.runner(programs) as (runner, _, _):
        await eventually(lambda: programs.open == N)
        stage.now[0] += stage.config.agents.think_s
        await stage.until(ready=1)
        assert runner.status.outcomes["timed_out"] == N


async def test_law_6_a_tool_that_takes_long_is_no_silence(stage: Stage) -> None:
    done, silent = asyncio.Event(), [0.0]

    async def takes_long(episode: Episode) -> EpisodeOutcome:
        await done.wait()
        return await two_turns(episode)

    async def progressed() -> bool:
        """It has been silent for less time than a moment ago."""
        silent.append((await stage.replay.group("e0-train-0"))["silent_s"])
        return silent[-1] < silent[-2]

    programs = Played(takes_long)
    await stage.enqueue(0)
    async with stage.runner(programs):
        await eventually(lambda: programs.open == N)
        for _ in range(3):
            await eventually(progressed)
        done.set()
        await stage.until(ready=1)
    assert len(programs.began) == N


async def test_law_6_a_program_that_outlives_its_clock_is_silence(stage: Stage, limits: Limits) -> None:
    done = asyncio.Event()

    async def stays(episode: Episode) -> EpisodeOutcome:
        while not done.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await done.wait()
        return scored()

    async def is_taken() -> bool:
        return "deadline" in (await stage.replay.stats())["requeues"]

    programs = Played(stays)
    await tighten(stage.replay, limits, group_deadline_s=1.0)
    await stage.enqueue(0)
    async with stage.runner(programs):
        await eventually(lambda: programs.open == N)
        stage.now[0] += stage.config.agents.episode_s
        try:
            await eventually(is_taken)
        finally:
            done.set()


async def test_no_trajectory_comes_of_a_program_that_never_asked(stage: Stage) -> None:
    async def silent(episode: Episode) -> EpisodeOutcome:
        return scored()

    assert "no trained answer" in await failure(stage, silent)


async def test_a_runner_that_is_stopped_returns_its_leases_without_a_charge(stage: Stage) -> None:
    waiting, playing = Played(asks_and_waits), Played(two_turns)
    await stage.enqueue(0)
    async with stage.runner(waiting) as (_, stop, running):
        await eventually(lambda: waiting.open == N)
        stop.set()
        await running
        assert waiting.open == 0
        with pytest.raises(openai.AuthenticationError):
            await _ask(waiting.began[0])
        assert not [runner for runner in await stage.replay.runners() if runner.alive]
    async with stage.runner(playing):
        await stage.until(ready=1)
    assert (await stage.replay.group("e0-train-0"))["attempt"] == 1


async def _ask(episode: Episode) -> Any:
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key="none", max_retries=0) as client:
        return await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])


async def test_programs_go_on_over_a_rewind(stage: Stage) -> None:
    """With calls of the timeline that it started."""
    rewound, heard = asyncio.Event(), []

    async def talks(episode: Episode) -> EpisodeOutcome:
        messages = list(episode.messages)
        for _ in range(2):
            heard.append(await episode.chat(messages))
            messages += [heard[-1], {"role": "user", "content": "and?"}]
            await rewound.wait()
        return scored(float(episode.index))

    programs = Played(talks)
    await stage.enqueue(0)
    async with stage.runner(programs):
        await eventually(lambda: len(heard) == N)
        stage.toy.policy.timeline = (await rewind(stage.replay, 0)).timeline
        await refit(stage.replay, 0, [stage.toy.policy.replica])
        rewound.set()
        await stage.until(ready=1)
    assert len(programs.began) == N
    assert (await stage.replay.group("e0-train-0"))["attempt"] == 1


async def test_a_restore_ends_sessions_and_programs(stage: Stage) -> None:
    programs = Played(waits)
    await stage.enqueue(0)
    async with stage.runner(programs) as (runner, _, _):
        await eventually(lambda: programs.open == N)
        await stage.replay.restore(0, nonce(), nonce(), 0)
        await eventually(lambda: programs.open == 0)
        with pytest.raises(openai.AuthenticationError):
            await _ask(programs.began[0])
        assert runner.count_taken("train") == 0


async def test_a_call_after_a_restore_reaches_nobody(stage: Stage) -> None:
    """Fenced by the buffer, before the runner has heard of it."""
    asked: list[asyncio.Task[Any]] = []

    async def asks_after_restore(episode: Episode) -> Any:
        await stage.replay.restore(0, nonce(), nonce(), 0)
        return await _ask(episode)

    async def asks(episode: Episode) -> EpisodeOutcome:
        if not asked:
            asked.append(asyncio.create_task(asks_after_restore(episode)))
        return await waits(episode)

    await stage.enqueue(0)
    async with stage.runner(Played(asks)):
        await eventually(lambda: asked)
        with pytest.raises(openai.APIStatusError):
            await asked[0]


async def test_a_group_is_leased_whole_or_not_at_all(stage: Stage) -> None:
    programs = Played(waits)
    await stage.enqueue(0, 1)
    async with stage.runner(programs, slots=3) as (runner, _, _):
        await eventually(lambda: programs.open == N)
        for _ in range(3):
            await runner._turn()
        assert runner.count_taken("train") == N


async def test_neither_training_nor_validation_waits_for_slots_of_the_other(stage: Stage) -> None:
    """Each is played while the other has all that it may have."""
    may_end = {"train": asyncio.Event(), "validation": asyncio.Event()}

    async def plays(episode: Episode) -> EpisodeOutcome:
        await episode.chat(episode.messages)
        await may_end["validation" if episode.group_id.startswith("v") else "train"].wait()
        return scored()

    async def evaluated(*ids: str) -> bool:
        return len((await stage.replay.read_evaluated(ids))[0]) == len(ids)

    async def validate(*ids: str) -> None:
        groups = [
            make_group(order, n=1, lane="validation", env_name="talk", group_id=id_) for order, id_ in enumerate(ids)
        ]
        await stage.replay.enqueue(groups, (await stage.replay.state()).timeline)

    programs = Played(plays)
    await stage.enqueue(0, 1)
    async with stage.runner(programs, slots=N, validation_slots=1) as (runner, _, _):
        await eventually(lambda: runner.count_taken("train") == N)
        may_end["validation"].set()
        await validate("v0", "v1")
        await eventually(lambda: evaluated("v0", "v1"))
        assert await stage.counts() == {"open": 1, "queued": 1}
        may_end["validation"].clear()
        await validate("v2", "v3")
        await eventually(lambda: runner.count_taken("validation") == 1)
        may_end["train"].set()
        await stage.until(ready=2)
        assert runner.count_taken("validation") == 1


async def test_an_episode_whose_runner_is_lost_begins_anew(stage: Stage, limits: Limits) -> None:
    await tighten(stage.replay, limits, lease_s=1.0)
    waiting, playing = Played(asks_and_waits), Played(two_turns)
    await stage.enqueue(0)
    async with stage.runner(waiting) as (runner, _, running):
        await eventually(lambda: waiting.open == N)
        runner._replay = _Dead(stage.replay)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with stage.runner(playing):
            await stage.until(ready=1)
    assert {episode.index for episode in playing.began} == {0, 1}


class _Dead:
    """A buffer that a dead runner says nothing to."""

    def __init__(self, replay: ReplayClient) -> None:
        self._replay = replay

    async def deregister_runner(self, runner: str, *, died: bool = False) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replay, name)


async def test_episodes_beyond_n_are_ended_once_the_group_is_complete(stage: Stage, limits: Limits) -> None:
    async def first_two(episode: Episode) -> EpisodeOutcome:
        if episode.index == 2:
            await asyncio.Event().wait()
        return await two_turns(episode)

    await stage.replay.open_run(dataclasses.replace(limits, redundant=1))
    programs = Played(first_two)
    await stage.enqueue(0)
    async with stage.runner(programs) as (runner, _, _):
        await stage.until(ready=1)
        await eventually(lambda: programs.open == 0)
        await counted(runner, 3)
        # a heartbeat may call the group complete before the answer to its last score is here
        assert runner.status.outcomes["surplus"] in (1, 2)


async def test_branches_can_be_refused(stage: Stage) -> None:
    async def branches(episode: Episode) -> EpisodeOutcome:
        for _ in range(2):
            await episode.chat(episode.messages)
        return scored()

    assert "agents.branches" in await failure(stage, branches, branches="refuse")


async def test_what_a_grader_scores_is_handed_in_without_a_score(stage: Stage) -> None:
    async def says_nothing(episode: Episode) -> EpisodeOutcome:
        await episode.chat(episode.messages)
        return EpisodeOutcome(None)

    graded_by(stage, "judge")
    await stage.enqueue(0)
    async with stage.runner(Played(says_nothing)):
        await stage.until(scoring=1)


@pytest.mark.parametrize(("on_limit", "rewards"), [(0.25, {0.25}), ("grade", {1.0})])
async def test_a_limit_ends_an_episode_as_it_is_configured(
    stage: Stage, limits: Limits, on_limit: Any, rewards: set[float]
) -> None:
    async def greedy(episode: Episode) -> EpisodeOutcome:
        with contextlib.suppress(Exception):
            while True:
                await episode.chat(episode.messages)
        return scored()

    await stage.enqueue(*range(limits.prompts_per_step))
    async with stage.runner(Played(greedy), on_limit=on_limit, max_rollout_turns=3):
        await stage.until(ready=limits.prompts_per_step)
    batch = await reserve(stage.replay, 0)
    assert {each.reward for each in batch.trajectories} == rewards


@pytest.mark.parametrize("graded", [False, True])
async def test_what_on_limit_earns_goes_with_the_scores_of_the_siblings(stage: Stage, graded: bool) -> None:
    """Also of a program that hung before any other was scored, so that no build is known."""
    refused = asyncio.Event()

    async def play(episode: Episode) -> EpisodeOutcome:
        if episode.index == 1:
            await refused.wait()
            return await two_turns(episode)
        with contextlib.suppress(Exception):
            while True:
                await episode.chat(episode.messages)
        stage.now[0] += stage.config.agents.finish_s
        await asyncio.Event().wait()
        raise AssertionError

    graded_by(stage, "judge" if graded else None)
    await stage.enqueue(0)
    async with stage.runner(Played(play), on_limit=0.25, max_rollout_turns=3) as (runner, _, _):
        await eventually(lambda: runner.status.outcomes["scored"] == 1)
        refused.set()
        if graded:
            await stage.until(scoring=1)
            (job,) = await stage.replay.take_scoring({"talk": N})
            await stage.replay.score(job, Score("SCORED", 1.0, build="the judge's"))
        await stage.until(ready=1)
    assert (await stage.replay.group("e0-train-0"))["attempt"] == 1


async def test_an_error_of_one_episode_ends_no_other(stage: Stage) -> None:
    async def odd(episode: Episode) -> EpisodeOutcome:
        if episode.index == 0 and episode.attempt == 0:
            raise ZeroDivisionError("a bug")
        return await two_turns(episode)

    await reasons_of_one_failure(stage, odd)


@pytest.mark.parametrize(
    "odd",
    [
        Score("SCORED", 1.0, metadata={"result": 10**30}),
        Score("SCORED", 1.0, metadata={"said": "\ud83d"}),
        Score("SCORED", 1.0, components={"x" * SCORE_BYTES: 1.0}),
        Score("FAILED", components={"x" * SCORE_BYTES: 1.0}, message="it raised"),
    ],
    ids=["a large number", "half a surrogate pair", "large components", "large components of a failure"],
)
async def test_a_score_that_cant_be_kept_fails_its_episode_alone(stage: Stage, odd: Score) -> None:
    async def says(episode: Episode) -> EpisodeOutcome:
        if episode.index == 0 and episode.attempt == 0:
            await episode.chat(episode.messages)
            return EpisodeOutcome(odd)
        return await two_turns(episode)

    reasons = await reasons_of_one_failure(stage, says)
    assert any("can't be kept" in reason for reason in reasons)


async def test_a_failure_whose_words_cant_be_kept_ends_no_runner(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's processes hand on what is logged, as UTF-8
    monkeypatch.setattr(logging.getLogger("headrace_services.agents.runner"), "disabled", True)

    async def raises(episode: Episode) -> EpisodeOutcome:
        if episode.index == 0 and episode.attempt == 0:
            raise ValueError("\ud83d")
        return await two_turns(episode)

    await reasons_of_one_failure(stage, raises)


async def test_any_gateway_takes_the_calls_of_every_runner(stage: Stage) -> None:
    idle, playing = Played(two_turns), Played(two_turns)
    async with stage.runner(idle, slots=N - 1, advertised_url="http://behind") as (front, _, _):
        url = str(front._info["gateway"])
        async with stage.runner(playing, advertised_url=url) as (behind, _, _):
            # until its next heartbeat, a gateway refuses the keys of a new one
            await eventually(lambda: behind._info["name"] in front._gateway.peers)
            await stage.enqueue(0)
            await stage.until(ready=1)
    assert not idle.began
    assert {episode.base_url.partition("/s/")[0] for episode in playing.began} == {url}


async def test_an_error_of_the_clocks_ends_the_runner(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them nothing that hangs would end."""

    def fails(self: OpenEpisode) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(OpenEpisode, "look", fails)
    await stage.enqueue(0)
    async with stage.runner(Played(waits)) as (_, _, running):
        with pytest.raises(ZeroDivisionError):
            await running


async def test_what_no_other_try_mends_ends_the_runner(stage: Stage) -> None:
    async def refused(episode: Episode) -> EpisodeOutcome:
        raise ServiceError("the hub knows no such token")

    await stage.enqueue(0)
    async with stage.runner(Played(refused)) as (_, _, running):
        with pytest.raises(ServiceError, match="no such token"):
            await running
