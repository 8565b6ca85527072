"""What a program is given that owns its loop: `Environment.episode` calls the policy as often as it likes, and says what it earns."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.trajectory import Message, Score

# Of an episode, as runners make them: the name of the runner's gateway, and 128 random bits.
KEY = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{32}\b")


def without_keys(record: logging.LogRecord) -> bool:
    """A filter of log records: no key of an episode gets into a log, as part of an address neither."""
    message = record.getMessage()
    if KEY.search(message):
        record.msg, record.args = KEY.sub(r"\1-KEY", message), ()
    return True


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """Past one of these the policy answers nothing more. 0: no limit of its own."""

    calls: int = 0  # of the policy
    tokens: int = 0  # of all its calls, contexts and completions, each once


@dataclasses.dataclass(frozen=True)
class Episode:
    """One attempt at a prompt, by a program that calls the policy itself.

    `base_url` and `api_key` are for `chat`, or for any client of OpenAI's API; they are this episode's alone, dead with it, and not for
    logs. `messages` is the prompt; `public` has those fields of the problem that the run lets the program see. `deadline` is when it must
    be done, by `time.monotonic()`. `attempt` counts how often the episode was begun before. What the program puts into `artifacts`, JSON
    types, is kept with the episode and shown with it, and a grader gets it (`Sample.artifacts`).
    """

    base_url: str = dataclasses.field(repr=False)
    api_key: str = dataclasses.field(repr=False)
    messages: tuple[Message, ...] = ()
    public: dict[str, Any] = dataclasses.field(default_factory=dict)
    limits: EpisodeLimits = EpisodeLimits()
    deadline: float = float("inf")
    attempt: int = 0
    environment: str = ""
    task_name: str = ""
    group_id: str = ""
    index: int = 0
    idempotency_key: str = ""
    artifacts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, self.deadline - time.monotonic())

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Message:
        """What the policy answers to these messages: a message, to be appended to them. `options` are further fields of the request, as
        `tools=[…]`, `max_tokens=100`.

        A connection that is lost is tried again, and joins the call that it belongs to. Raises `ChatError` for what the policy refuses
        (past a limit: with the code `context_length_exceeded`), `TimeoutError` at the deadline.
        """
        from headrace.chat import chat  # a program with a client of its own needs no other

        return await chat(self.base_url, self.api_key, {"messages": list(messages), **options}, self.remaining_s)

    def chat_sync(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Message:
        """`chat`, for an `episode` that is a plain function."""
        import asyncio  # costs time, and is needed here alone

        return asyncio.run(self.chat(messages, **options))


@dataclasses.dataclass(frozen=True)
class EpisodeOutcome:
    """How a program ended. `score` is None if it said no reward: a grader gives it."""

    score: Score | None
    artifacts: dict[str, Any] = dataclasses.field(default_factory=dict)
