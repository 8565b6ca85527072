"""A program and its session, without tasks and connections: what the gateway does, one step after the other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from headrace.net.replica_client import SampleRequest
from headrace.records.trajectory import Message
from headrace_services.agents import conversation
from headrace_services.agents.session import (
    CallRequest,
    Clocks,
    Refused,
    SamplingTask,
    Session,
    SessionCall,
    SessionLimits,
)
from tests.support.toy_policy import END, ToyPolicy

LIMITS = SessionLimits(calls=100, tokens=10**6, nbytes=10**7, context=4096, new_tokens=64)
CLOCKS = Clocks(call_s=20.0, think_s=10.0, episode_s=100.0, finish_s=5.0, retry_grace_s=3.0)
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {}}},)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


class Held(dict[str, Any]):
    """A message whose end can be watched."""


class Program:
    def __init__(self, session: Session, policy: ToyPolicy) -> None:
        self.session, self.policy = session, policy

    def asked(self, messages: Sequence[Message], *, tools: Any = (), **options: Any) -> CallRequest:
        own = {
            name: options.pop(name) for name in ("retry", "turned_away", "idempotency_key", "train") if name in options
        }
        body = json.dumps([messages, list(tools), options]).encode()
        known = {name: value for name, value in options.items() if name in ("max_tokens", "stop")}
        prefixes = conversation.prefixes(messages, tools)
        return CallRequest(tuple(messages), hashlib.sha256(body).digest(), prefixes, tools=tuple(tools), **known, **own)

    def begin(self, messages: Sequence[Message], **options: Any) -> SessionCall:
        return self.session.ask(self.asked(messages, **options), 0.0)[0]

    def place(self, call: SessionCall) -> SamplingTask:
        rendered = self.policy.render(call.asked.messages, call.asked.tools, answered=False)
        while (earlier := self.session.find_unrendered(call, rendered)) is not None:
            answered = self.policy.render(earlier.history, earlier.asked.tools, answered=True)
            self.session.note_rendering(earlier, answered)
        try:
            return self.session.place(call, rendered, 0.0)
        except Refused:
            self.session.note_failure(call, 0.0, again=False)
            raise

    def carry_out(self, call: SessionCall, now: float = 0.0) -> None:
        placed = self.place(call)
        request = SampleRequest(
            tuple(placed.token_ids.tolist()),
            placed.max_new_tokens,
            "now",
            0,
            stop=call.asked.stop,
            stop_token_ids=(END,),
            seed=placed.seed,
        )
        sampled = self.policy.sample(request)
        self.session.note_sampling(call, sampled)
        self.session.note_answer(call, self.policy.derender(sampled, call.asked.tools), now)

    def ask(self, messages: Sequence[Message], **options: Any) -> SessionCall:
        """A request, its answer, and its delivery."""
        call = self.begin(messages, **options)
        self.carry_out(call)
        self.session.note_delivery(call)
        return call


def path_of(calls: Any, number: int) -> list[int]:
    """The tokens from the root to the end of a recorded call."""
    tokens: list[int] = []
    while number >= 0:
        call = calls[number]
        tokens = [*call.context_token_ids.tolist(), *call.completion_token_ids.tolist(), *tokens]
        number = call.parent
    return tokens
