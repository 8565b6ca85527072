"""A rewind from 7 to 5 while an old replica, cut off from the buffer, still answers (acceptance 3).

The run takes its steps again, so each timeline has a version 7. What was sampled after version 5 on the first one is told by its capital
letters: nothing of it may reach a program or the buffer after the rewind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from headrace.env.episode import Episode, EpisodeOutcome
from headrace.net.replica_client import Sampled, SampleRequest
from headrace.records.trajectory import EpisodeTrajectory, Message, decode_trajectory
from headrace.replay import ReplayClient, Reservation
from tests.integration.agents.stage import Played, Stage, scored
from tests.support.buffer import contents, nonce, refit, reserve_later, rewind
from tests.support.gateways import ToyReplica
from tests.support.toy_policy import LETTERS, ToyPolicy
from tests.support.waiting import eventually

KEPT, NEWEST = 5, 7
TURNS = 3
PROMPTS = 2  # of a step
CAPITALS = re.compile(rb"(?:[A-E]\0\0\0){2}")  # two tokens


@dataclasses.dataclass
class Marked(ToyPolicy):
    """Writes capital letters while it is on the timeline `first` and beyond the version that is kept of it."""

    first: str = ""

    def sample(self, request: SampleRequest) -> Sampled:
        sampled = super().sample(request)
        if self.timeline != self.first or self.version <= KEPT:
            return sampled
        tokens = [ord(chr(token).upper()) if chr(token) in LETTERS else token for token in sampled.token_ids]
        self.asked[-1] = self.asked[-1][0], tuple(tokens)
        return msgspec.structs.replace(sampled, token_ids=tokens)


class Deaf:
    """The buffer of a runner that hears no news while `hears` is unset."""

    def __init__(self, replay: ReplayClient) -> None:
        self._replay = replay
        self.hears = asyncio.Event()
        self.hears.set()

    async def replicas(self) -> Any:
        await self.hears.wait()
        return await self._replay.replicas()

    async def runner_heartbeat(self, runner: str, tokens: Sequence[str], progress: Sequence[int]) -> Any:
        await self.hears.wait()
        return await self._replay.runner_heartbeat(runner, tokens, progress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replay, name)


class Mistaken:
    """The address of the new replica, where the old one answers the next `calls`."""

    def __init__(self, new: ToyReplica, old: ToyReplica) -> None:
        self.new, self.old, self.calls = new, old, 0

    async def sample(self, request: SampleRequest) -> Sampled:
        if not self.calls:
            return await self.new.sample(request)
        self.calls -= 1
        return await self.old.sample(request)

    async def render(self, messages: Sequence[Message], tools: Any = None, **options: Any) -> list[int]:
        return await self.new.render(messages, tools, **options)

    async def aclose(self) -> None:
        pass


@dataclasses.dataclass
class Run:
    """A run with a replica that hears of the rewind and one that does not. `heard` are the answers that programs were given."""

    stage: Stage
    new: ToyReplica
    old: ToyReplica
    heard: list[Message] = dataclasses.field(default_factory=list)

    async def timeline(self) -> str:
        return (await self.stage.replay.state()).timeline

    async def refit(self, version: int, *replicas: ToyReplica) -> None:
        await refit(self.stage.replay, version, [each.policy.replica for each in replicas])
        for each in replicas:
            each.policy.version, each.policy.timeline = version, await self.timeline()

    async def take(self, step: int) -> Reservation:
        return await reserve_later(self.stage.replay, step)

    async def play(self, episode: Episode) -> EpisodeOutcome:
        """Some turns; after an error it asks again, until its key is dead."""
        messages: list[Message] = list(episode.messages)
        async with httpx.AsyncClient(base_url=episode.base_url, timeout=60.0) as client:
            while len(messages) < 2 * TURNS:
                answer = await client.post("/chat/completions", json={"model": "policy", "messages": messages})
                if answer.status_code == 401:
                    break
                if answer.status_code == 200:
                    said = answer.json()["choices"][0]["message"]
                    self.heard.append(said)
                    messages += [said, {"role": "user", "content": "and?"}]
        return scored(float(episode.index))

    async def capitals(self) -> int:
        """How often the buffer holds what is marked."""
        return len(CAPITALS.findall(_bytes_of(await contents(self.stage.replay))))

    def heard_capitals(self) -> list[Message]:
        return [said for said in self.heard if re.search("[A-E]", f"{said.get('content')}{said.get('reasoning')}")]


def _bytes_of(value: Any) -> bytes:
    match value:
        case bytes():
            return value
        case dict():
            return b"\n".join(_bytes_of(part) for pair in value.items() for part in pair)
        case list() | tuple() | set():
            return b"\n".join(map(_bytes_of, value))
        case _:
            return b""


@pytest.fixture
async def run(stage: Stage) -> Run:
    first = stage.toy.policy.timeline
    new, old = (
        ToyReplica(Marked(version=0, replica=name, first=first)) for name in (stage.toy.policy.replica, nonce())
    )
    stage.others |= {"toy": Mistaken(new, old), "old": old}
    await stage.replay.register(old.policy.replica, {"url": "old"})
    run = Run(dataclasses.replace(stage, replay=Deaf(stage.replay)), new, old)  # type: ignore[arg-type]
    await run.refit(0, new, old)
    return run


# by day the harder one: nobody knows of the rewind when the old replica answers
@pytest.mark.parametrize("noticed", [pytest.param(True, marks=pytest.mark.nightly), False])
async def test_no_token_of_a_replica_that_missed_a_rewind_is_used(run: Run, noticed: bool) -> None:
    """`noticed`: whether the runner hears of the rewind before the old replica answers the calls that it had."""
    new, old, replay = run.new, run.old, run.stage.replay
    hears: asyncio.Event = replay.hears  # type: ignore[attr-defined]
    may_answer, played = asyncio.Event(), Played(run.play)

    async def slow(request: SampleRequest) -> None:
        if set(request.token_ids) & set(map(ord, LETTERS.upper())):
            await may_answer.wait()  # with the call that goes on from its first answer of version 7

    async with run.stage.runner(played) as (_, _, running):
        for step in range(NEWEST):
            await run.stage.enqueue(PROMPTS * step, PROMPTS * step + 1)
            await run.take(step)
            await run.refit(step + 1, new, old)
            if step + 1 == KEPT:
                await replay.commit(KEPT, await run.timeline())
        new.before = old.before = slow
        await run.stage.enqueue(*range(PROMPTS * NEWEST, PROMPTS * (NEWEST + 2)))
        await eventually(lambda: played.open and played.open == new.sampling + old.sampling and old.sampling)
        assert await run.capitals()
        assert run.heard_capitals()

        if not noticed:
            hears.clear()
        run.heard.clear()
        before, answered, under_way = await run.timeline(), len(old.policy.asked), old.sampling
        assert (await rewind(replay, KEPT)).next_step == KEPT
        if noticed:
            await eventually(lambda: not played.open)
        new.before = old.before = lambda request: asyncio.sleep(0)
        may_answer.set()
        await eventually(lambda: not played.open)
        hears.set()
        assert not run.heard
        assert len(old.policy.asked) == answered if noticed else len(old.policy.asked) >= answered + under_way

        # the run takes its steps again with the new replica; the old one answers at its own address, and for some calls at the other's
        assert isinstance(run.stage.others["toy"], Mistaken)
        await run.refit(KEPT, new)
        for step in range(KEPT, NEWEST):
            await run.take(step)
            await run.refit(step + 1, new)
        assert (old.policy.version, old.policy.timeline) == (new.policy.version, before) == (NEWEST, before)
        answered, run.stage.others["toy"].calls = len(old.policy.asked), 3
        await run.stage.enqueue(*range(PROMPTS * (NEWEST + 2), PROMPTS * (NEWEST + 3)))
        batches = []
        for step in range(NEWEST, NEWEST + 3):
            batches.append(await run.take(step))
            await run.refit(step + 1, new)
        assert not running.done()
    assert len(old.policy.asked) - answered == 3
    assert run.heard
    assert not run.heard_capitals()
    assert not await run.capitals()
    for each in (each for batch in batches for each in batch.trajectories):
        episode = decode_trajectory(await replay.redis.get(each.key))
        assert isinstance(episode, EpisodeTrajectory)
        assert {call.replica for call in episode.calls} == {new.policy.replica}
        asked = {(tuple(prompt), tuple(wrote)) for prompt, wrote in new.policy.asked}
        assert {_asked(episode, number) for number in range(len(episode.calls))} <= asked


def _asked(episode: EpisodeTrajectory, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the policy was given for a call, and what it wrote."""
    prompt: list[int] = episode.calls[number].context_token_ids.tolist()
    parent = episode.calls[number].parent
    while parent >= 0:
        call = episode.calls[parent]
        prompt = [*call.context_token_ids.tolist(), *call.completion_token_ids.tolist(), *prompt]
        parent = call.parent
    return tuple(prompt), tuple(episode.calls[number].completion_token_ids.tolist())
