"""Retries of a call, with the client's own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable

import openai
import pytest

from headrace.net.replica_client import SampleRequest
from headrace_services.agents import gateway as gateway_module
from headrace_services.agents import metrics
from tests.support.faulty_way import FAULTS, Fault, faulty_way
from tests.support.gateways import HI, ask, ask_and_go, gate, open_episode
from tests.support.toy_sessions import LIMITS, user
from tests.support.waiting import eventually


async def test_a_client_that_times_out_and_retries_gets_the_first_answer() -> None:
    async with open_episode() as opened, opened.client(max_retries=3, timeout=0.2) as client:
        go = gate(opened)
        asking = asyncio.create_task(ask(client))
        await eventually(lambda: opened.episode.session.joined == 1)
        go.set()
        await asking
        ending = await opened.episode.end()
    assert len(opened.replicas["replica-1"].policy.asked) == len(ending.calls) == 1


async def test_a_client_that_leaves_midway_gets_the_whole_answer_next_time() -> None:
    async with open_episode() as opened, opened.http() as client:
        go = gate(opened)
        await ask_and_go(opened, client)
        go.set()
        await eventually(lambda: opened.kept)
        assert not opened.episode.session.calls[0].delivered
        answer = await client.post("/chat/completions", json={"messages": HI})
        assert answer.json()["choices"][0]["message"] == opened.kept[0].answer
        assert len((await opened.episode.end()).calls) == len(opened.kept) == 1


async def test_a_call_that_nobody_came_back_for_is_dropped() -> None:
    async with open_episode() as opened, opened.http() as client:
        go = gate(opened)
        await ask_and_go(opened, client)
        go.set()
        await eventually(lambda: opened.kept)
        await client.post("/chat/completions", json={"messages": [user("something else")]})
        ending = await opened.episode.end()
    assert len(ending.calls) == 1
    assert ending.dropped == {"abandoned": 1}


@contextlib.asynccontextmanager
async def busy_loop() -> AsyncIterator[None]:
    """Each turn of the event loop takes as long as other threads need to do what they have to."""
    loop = asyncio.get_running_loop()
    next_turn = loop.call_soon(lambda: None)

    def turn() -> None:
        nonlocal next_turn
        time.sleep(0.002)
        next_turn = loop.call_soon(turn)

    turn()
    try:
        yield
    finally:
        next_turn.cancel()


def whole(client: openai.OpenAI) -> None:
    client.chat.completions.create(model="any", messages=HI)


def streamed(client: openai.OpenAI) -> None:
    for _ in client.chat.completions.create(model="any", messages=HI, stream=True):
        pass


def streamed_to_its_finish_reason(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model="any", messages=HI, stream=True) as chunks:
        assert any(chunk.choices[0].finish_reason for chunk in chunks)


@pytest.mark.parametrize("use", [whole, streamed, streamed_to_its_finish_reason])
async def test_a_client_that_closes_after_its_answer_was_given_it(use: Callable[[openai.OpenAI], None]) -> None:
    async with open_episode() as opened, busy_loop():
        with openai.OpenAI(base_url=opened.url, api_key="none", max_retries=0, timeout=60.0) as client:
            for _ in range(5):
                await asyncio.to_thread(use, client)
        ending = await opened.episode.end()
    assert len(ending.calls) == 5
    assert not ending.dropped


@pytest.mark.parametrize("stream", [False, True])
async def test_who_goes_before_the_last_part_of_an_answer_was_not_given_it(stream: bool) -> None:
    size = 2**24  # more than connections hold
    limits = dataclasses.replace(LIMITS, nbytes=2 * size)
    async with open_episode(limits=limits) as opened, opened.http() as client:
        large = {"role": "assistant", "content": "a" * size}
        opened.replicas["replica-1"].policy.derender = lambda *_: large  # type: ignore[method-assign]
        asked = {"messages": HI, "stream": stream}
        async with client.stream("POST", "/chat/completions", json=asked) as response:
            await anext(response.aiter_raw())
        await eventually(lambda: opened.episode.session.calls[0].readers == 0)
        assert not opened.episode.session.calls[0].delivered
        ending = await opened.episode.end()
    assert ending.dropped == {"abandoned": 1}


async def test_real_duplicates_at_once_are_calls_of_their_own() -> None:
    async with open_episode() as opened, opened.client() as client:
        answers = await asyncio.gather(*(ask(client, max_tokens=3) for _ in range(8)))
        ending = await opened.episode.end()
    assert len({answer.id for answer in answers}) == len(ending.calls) == 8


async def test_lost_duplicates_leave_exactly_the_answers_used() -> None:
    """Acceptance 6: time-outs, retries and real duplicates at once."""
    async with open_episode(replicas=2) as opened:
        asked = itertools.count()

        async def before(request: SampleRequest) -> None:
            joined = opened.episode.session.joined
            if next(asked) % 3 == 0:  # slower than its client is patient
                await eventually(lambda: opened.episode.session.joined > joined)

        for toy in opened.replicas.values():
            toy.before = before
        async with opened.client(max_retries=8, timeout=0.2) as client:
            answers = await asyncio.gather(*(ask(client) for _ in range(12)))
        ending = await opened.episode.end()
        delivered = {f"chatcmpl-{call.number:06d}" for call in opened.episode.session.calls if call.delivered}
    assert {answer.id for answer in answers} == delivered
    assert len(ending.calls) == len(delivered)
    assert opened.episode.session.joined >= 4


@pytest.mark.parametrize("fault", FAULTS[:2])
async def test_equal_requests_that_never_arrived_get_an_answer_each(fault: Fault) -> None:
    """Their second tries are marked as such, and there is no first one that they could join."""
    many = 8
    async with open_episode() as opened, faulty_way(opened.address, [fault] * many, of_first_tries=True) as address:
        async with opened.client(base_url=f"{address}/s/{opened.key}/v1", max_retries=3) as client:
            answers = await asyncio.gather(*(ask(client) for _ in range(many)))
        ending = await opened.episode.end()
    assert len({answer.id for answer in answers}) == len(ending.calls) == many
    assert opened.episode.session.joined == 0


@pytest.mark.parametrize("forwarded", [False, True])
async def test_equal_requests_that_were_told_to_wait_get_an_answer_each(forwarded: bool) -> None:
    """Others that are equal became calls meanwhile."""
    many, at_once = 8, 3
    bounds = {"max_parallel_calls": at_once}
    async with open_episode(**bounds) as opened, open_episode(**bounds) as front:
        front.gateway.peers = {opened.gateway.name: opened.address}
        refused = metrics.REFUSED.labels("429", "rate_limit_exceeded")._value
        before = refused.get()
        go = gate(opened)
        address = front.address if forwarded else opened.address
        async with opened.client(base_url=f"{address}/s/{opened.key}/v1", max_retries=9) as client:
            asking = [asyncio.create_task(ask(client)) for _ in range(many)]
            await eventually(lambda: refused.get() >= before + many - at_once)
            go.set()
            answers = await asyncio.gather(*asking)
        ending = await opened.episode.end()
    assert len({answer.id for answer in answers}) == len(ending.calls) == many
    assert opened.episode.session.joined == 0


def test_a_try_that_became_no_call_is_remembered_for_a_while() -> None:
    admission = gateway_module.KeyAdmission()
    for tries in (0, 0, 1, None):
        admission.note_turned_away(tries, 0.0)
    assert not admission.is_idle(119.0)
    assert [admission.was_turned_away(tries, 119.0) for tries in (0, None, 1, 1, 1, 3)] == [
        *[False] * 2,
        *[True] * 2,
        *[False] * 2,
    ]
    assert not admission.was_turned_away(2, 120.0)
    assert admission.is_idle(120.0)
