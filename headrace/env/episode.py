"""The interface for a program that owns its loop: `Environment.episode` calls the policy as often as it needs, and returns the reward."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.records.score import Score
from headrace.records.trajectory import Message


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """Limits beyond which the policy refuses calls. 0: no limit of its own."""

    calls: int = 0  # to the policy
    tokens: int = 0  # of all calls, contexts and completions, each counted once


@dataclasses.dataclass(frozen=True)
class Episode:
    """One attempt at a prompt, by a program that calls the policy itself.

    `base_url` and `api_key` are for `chat`, or for any client of OpenAI's API. They belong to this episode alone, stop working when it
    ends, and must not be logged. `messages` is the prompt; `public` has the fields of the problem that the run lets the program see.
    `deadline` is the time by `time.monotonic()` by which the program must end. `attempt` counts how often the episode was started before.
    What the program puts into `artifacts`, as JSON types, is stored and shown with the episode, and sent to its grader
    (`Sample.artifacts`).
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
        """Send messages to the policy and return its answer: a message, to be appended to them. `options` are further fields of the
        request, for example `tools=[…]` or `max_tokens=100`.

        After a lost connection the call is retried, and joins the earlier try. Raises `ChatError` if the policy refuses the call (beyond a
        limit with the code `context_length_exceeded`), `TimeoutError` at the deadline.
        """
        from headrace.env.chat import chat  # a program with its own client doesn't need it

        return await chat(self.base_url, self.api_key, {"messages": list(messages), **options}, self.remaining_s)

    def chat_sync(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Message:
        """`chat`, for an `episode` that is a plain function."""
        import asyncio  # slow to import, and needed here alone

        return asyncio.run(self.chat(messages, **options))


@dataclasses.dataclass(frozen=True)
class EpisodeOutcome:
    """The outcome of a program. `score` is None if it returned no reward: then a grader scores the episode."""

    score: Score | None
    artifacts: dict[str, Any] = dataclasses.field(default_factory=dict)
