"""An open episode, between its session and the tasks that carry its calls out."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import weakref
from typing import Any

import pytest

from headrace.net.replica_client import SampleRequest
from headrace_services.agents import dialect
from headrace_services.agents.dialect import BadRequest, ChatRequest
from headrace_services.agents.session import SessionCall
from tests.support.gateways import open_episode
from tests.support.toy_sessions import Held, user


def request_of(message: dict[str, Any]) -> ChatRequest:
    request = dialect.parse(json.dumps({"messages": [message]}).encode(), {}, "policy")
    return dataclasses.replace(request, asked=dataclasses.replace(request.asked, messages=(message,)))


async def refused(call: SessionCall, episode: Any) -> None:
    with pytest.raises(BadRequest, match="no such role"):
        await episode.wait(call)


@pytest.mark.parametrize("leaves_early", [False, True])
async def test_a_call_that_failed_holds_nothing_once_nobody_waits_for_it(leaves_early: bool) -> None:
    async with open_episode() as opened:
        message = Held(role="robot", content="hi")
        call = opened.episode.ask(request_of(message))
        if leaves_early:
            opened.episode.note_departure(call)
        waits = asyncio.create_task(refused(call, opened.episode))
        await waits
        if not leaves_early:
            opened.episode.note_departure(call)
        held = weakref.ref(message)
        del message, waits
        gc.collect()
        assert held() is None


async def test_an_answer_stays_for_whoever_asks_again() -> None:
    async with open_episode() as opened:
        request = request_of(user("hi"))
        call = opened.episode.ask(request)
        await opened.episode.wait(call)
        opened.episode.note_departure(call)
        again = opened.episode.ask(request)
        await opened.episode.wait(again)
        assert again is call


async def test_a_call_that_is_given_up_leaves_with_its_last_reader() -> None:
    now = [0.0]
    async with open_episode(clock=lambda: now[0]) as opened:
        begun = asyncio.Event()

        async def hangs(request: SampleRequest) -> None:
            begun.set()
            await asyncio.Event().wait()

        opened.replicas["replica-1"].before = hangs
        message = Held(user("hi"))
        call = opened.episode.ask(request_of(message))
        await begun.wait()
        now[0] += opened.episode.session.clocks.call_s
        opened.episode.look()
        waits = asyncio.create_task(opened.episode.wait(call))
        await asyncio.wait([waits])
        assert "agents.call_s" in str(waits.exception())
        opened.episode.note_departure(call)
        held = weakref.ref(message)
        del message, waits
        gc.collect()
        assert held() is None
