"""Calls whose replica is lost, silent, or has other weights."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import openai
import pytest

from headrace.net.replica_client import ReplicaClient, ReplicaFenced, ReplicaUnavailable, SampleRequest
from headrace.replay import Replica
from headrace_services.agents import fleet as fleet_module
from tests.support.gateways import ask, elsewhere, gate, open_episode, replica, unavailable
from tests.support.toy_policy import ToyPolicy
from tests.support.toy_sessions import user
from tests.support.waiting import eventually


async def test_a_call_whose_replica_is_lost_is_sampled_elsewhere() -> None:
    async with open_episode(replicas=2) as opened, opened.client() as client:
        opened.replicas["replica-1"].before = unavailable(1)
        await ask(client)
    assert opened.kept[0].replica == "replica-2"


async def test_a_call_that_loses_one_replica_after_the_other_fails() -> None:
    """It may be what ends them. Its client is told not to ask again, and the episode goes on."""
    async with open_episode(replicas=5) as opened, opened.client(max_retries=2) as client:
        for toy in opened.replicas.values():
            toy.before = unavailable(1)
        with pytest.raises(openai.InternalServerError, match="3 replicas"):
            await ask(client)
        assert not opened.episode.over.done()
        with pytest.raises(
            openai.InternalServerError, match="3 replicas were lost"
        ):  # a client that asks again loses no other
            await ask(client)
        await ask(client, [user("another")])
        ending = await opened.episode.end()
    assert len(ending.calls) == 1
    assert ending.dropped == {"failed": 1}
    assert sum(len(toy.policy.asked) for toy in opened.replicas.values()) == 1


@pytest.mark.parametrize("how", ["fenced", "not reached", "the same"])
async def test_what_no_call_can_have_caused_is_no_lost_replica(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_PAUSE_S", 0.01)
    failures = itertools.count()

    async def before(request: SampleRequest) -> None:
        if next(failures) >= 6:
            return
        if how == "fenced":
            raise ReplicaFenced("leaving", "it is being stopped")
        if how == "not reached":
            await ReplicaClient("http://127.0.0.1:1").sample(request)
        raise ReplicaUnavailable("its engine is gone")

    async with open_episode(replicas=1 if how == "the same" else 3) as opened, opened.client() as client:
        for toy in opened.replicas.values():
            toy.before = before
        await ask(client)


async def test_an_unrendered_conversation_waits_for_a_replica_that_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_PAUSE_S", 0.01)
    failures = itertools.count()
    async with open_episode(replicas=3) as opened, opened.client() as client:
        for toy in opened.replicas.values():

            async def render(*args: Any, render: Any = toy.render, **options: Any) -> Any:
                if next(failures) < 6:
                    raise ReplicaUnavailable("it has left the fleet")
                return await render(*args, **options)

            toy.render = render  # type: ignore[method-assign]
        await ask(client)


@pytest.mark.parametrize("silent_at", ["render", "sample"])
@pytest.mark.parametrize("then", [[replica("replica-1", "DEAD"), replica("replica-2")], [replica("replica-2")]])
async def test_a_silent_replicas_call_is_sampled_elsewhere_once_told(silent_at: str, then: list[Replica]) -> None:
    asked = asyncio.Event()

    async def silent(*_: Any, **__: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    counted = elsewhere("unavailable")
    async with open_episode(replicas=2) as opened, opened.client() as client:
        lost = opened.replicas["replica-1"]
        if silent_at == "render":
            lost.render = silent  # type: ignore[method-assign]
        else:
            lost.before = silent
        asking = asyncio.create_task(ask(client))
        await asked.wait()
        opened.fleet.note(then)
        await asking
        assert lost.sampling == 0  # nobody waits for it any more
    assert opened.kept[0].replica == "replica-2"
    assert elsewhere("unavailable") == counted + 1


async def test_a_call_whose_answer_may_still_count_is_waited_for() -> None:
    counted = elsewhere("unavailable")
    async with open_episode(replicas=2) as opened, opened.client() as client:
        go = gate(opened)
        asking = asyncio.create_task(ask(client))
        await eventually(lambda: opened.replicas["replica-1"].sampling)
        other = replica("replica-2")
        for news in (
            [],  # the buffer is away
            [replica("replica-1", "STALE", version=-1), other],  # a refit failed, and another follows
            [replica("replica-1", "QUARANTINED", version=-1), other],
            [replica("replica-1", version=4), other],
            [
                replica("replica-1", timeline="after"),
                other,
            ],  # after a rewind to weights from which those that it had descend
        ):
            opened.fleet.note(news)
            await client.models.list()  # time enough to look for another replica
        go.set()
        await asking
    assert [call.replica for call in opened.kept] == ["replica-1"]
    assert elsewhere("unavailable") == counted


async def test_a_departed_replicas_client_closes_after_its_calls() -> None:
    async with open_episode(replicas=2) as opened, opened.client() as client:
        first, second = opened.replicas.values()
        await asyncio.gather(*(ask(client, [user(f"{number}")]) for number in range(4)))
        opened.fleet.note([])  # the buffer is away
        opened.fleet.note([replica("replica-1"), replica("replica-2")])
        await client.models.list()
        assert not first.is_closed
        go = gate(opened)
        asking = [asyncio.create_task(ask(client, [user(f"{number}")])) for number in range(4, 8)]
        await eventually(lambda: first.sampling and second.sampling)
        opened.fleet.note([replica("replica-2")])
        await eventually(lambda: second.sampling == 4)
        opened.fleet.note([replica("replica-2")])
        await eventually(lambda: first.is_closed)
        assert set(opened.fleet._clients) == set(opened.fleet._calls) == {"replica-2"}
        go.set()
        await asyncio.gather(*asking)
        await opened.fleet.aclose()
    assert second.is_closed


async def test_a_call_goes_to_the_replica_of_its_parent() -> None:
    async with open_episode(replicas=3) as opened, opened.client() as client:
        for number in range(6):
            answer = (await ask(client, [user(f"{number}")])).choices[0].message.model_dump()
            await ask(client, [user(f"{number}"), answer, user("and?")])
    assert all(opened.kept[number].replica == opened.kept[number + 1].replica for number in range(0, 12, 2))


async def test_with_no_healthy_replica_calls_wait_and_clocks_stand_still() -> None:
    now = [0.0]
    async with open_episode(clock=lambda: now[0]) as opened, opened.client() as client:
        opened.fleet.note([replica("replica-1", "STALE")])
        asking = asyncio.create_task(ask(client))
        await eventually(lambda: opened.episode.session.calls)
        now[0] = 1000.0
        opened.episode.look()
        assert not opened.episode.over.done()
        opened.fleet.note([replica("replica-1")])
        await asking
        now[0] += 10.0
        opened.episode.look()
        assert "agents.think_s" in await opened.episode.over


async def test_calls_go_on_on_the_timeline_after_a_rewind() -> None:
    async with open_episode() as opened, opened.client() as client:
        await ask(client)
        opened.replicas["replica-1"].policy.timeline = "after"
        opened.fleet.note([replica("replica-1", timeline="after")])
        await ask(client)
    assert opened.timelines == ["now", "after"]


async def test_a_replica_of_older_weights_is_not_asked() -> None:
    async with open_episode() as opened, opened.client() as client:
        opened.fleet.note([replica("replica-1", version=2)])
        asking = asyncio.create_task(ask(client))
        await eventually(lambda: opened.episode.session.calls and opened.episode.session.calls[0].reserved)
        assert not opened.replicas["replica-1"].policy.asked
        opened.fleet.note([replica("replica-1")])
        await asking


async def test_an_answer_from_older_weights_than_asked_does_not_count() -> None:
    async with open_episode(replicas=2) as opened, opened.client() as client:
        opened.replicas["replica-1"].policy = ToyPolicy(version=2)
        await ask(client)
    assert opened.replicas["replica-1"].policy.asked
    assert [call.replica for call in opened.kept] == ["replica-2"]


async def test_a_refit_is_waited_for() -> None:
    async with open_episode() as opened, opened.client() as client:
        refusals = [3]

        async def before(request: SampleRequest) -> None:
            if refusals[0]:
                refusals[0] -= 1
                asyncio.get_running_loop().call_later(0.01, opened.fleet.note, [replica("replica-1")])
                raise ReplicaFenced("refit", "it takes no call until the refit is over")

        opened.replicas["replica-1"].before = before
        await ask(client)
    assert refusals == [0]
