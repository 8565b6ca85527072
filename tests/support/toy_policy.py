"""A policy with a chat template and a parser, in a few lines and without a model: tokens are characters, and what it writes follows from
the prompt and the seed alone."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headrace.net.replica_client import Sampled, SampleRequest
from headrace.records.trajectory import Message, Span

BOS, END, SYSTEM, USER, ASSISTANT, TOOL, THINK, THOUGHT, CALL, CALLED = range(1, 11)
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
LETTERS = "abcde"
# what the template does with the reasoning of answers
Reasoning = Literal["kept", "of the last answer", "stripped"]


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens if token >= 32)


@dataclasses.dataclass
class ToyPolicy:
    """`asked` are the prompts that it was given and what it made of them, as an engine has them."""

    reasoning: Reasoning = "kept"
    ends_answers: bool = True  # whether the template does
    asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = dataclasses.field(default_factory=list)
    version: int = 3
    replica: str = "replica-1"
    timeline: str = "now"

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, answered: bool) -> list[int]:
        tokens = [BOS, *encode(json.dumps(list(tools)) if tools else "")]
        last = max((place for place, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
        for place, message in enumerate(messages):
            tokens.append(ROLES[message["role"]])
            shows = {"kept": True, "of the last answer": place == last == len(messages) - 1, "stripped": False}
            if message.get("reasoning") and shows[self.reasoning]:
                tokens += [THINK, *encode(message["reasoning"]), THOUGHT]
            tokens += encode(_text(message.get("content")))
            for call in message.get("tool_calls") or ():
                arguments = json.dumps(_arguments(call["function"].get("arguments")), sort_keys=True)
                tokens += [CALL, *encode(call["function"]["name"] + arguments), CALLED]
            if message["role"] != "assistant" or self.ends_answers:
                tokens += [END, ord("\n")]
        return tokens if answered else [*tokens, ASSISTANT]

    def sample(self, request: SampleRequest) -> Sampled:
        """Letters, sometimes with reasoning before and the call of a tool behind, an end token unless there is no room."""
        chance = random.Random(f"{request.token_ids} {request.seed}")
        tokens = []
        if chance.random() < 0.5:
            tokens += [THINK, *encode(chance.choice(LETTERS) * chance.randint(1, 3)), THOUGHT]
        tokens += encode("".join(chance.choices(LETTERS, k=chance.randint(0, 4))))
        if chance.random() < 0.4:
            tokens += [CALL, *encode('look{"at": 1, "in": [2]}'), CALLED]
        tokens.append(END)
        stop_reason: int | str | None = END
        for length in range(1, len(tokens) + 1):
            found = [stop for stop in request.stop if stop in decode(tokens[:length])]
            if found:
                tokens, stop_reason = tokens[:length], found[0]
                break
        return self._sampled(request, tokens, stop_reason)

    def _sampled(self, request: SampleRequest, tokens: list[int], stop_reason: int | str | None) -> Sampled:
        """The answer to a request; cut off where it has no room for all of them."""
        if len(tokens) > request.max_new_tokens:
            tokens, stop_reason = tokens[: request.max_new_tokens], None
        self.asked.append((tuple(request.token_ids), tuple(tokens)))
        return Sampled(
            token_ids=tokens,
            logprobs=[-0.5] * len(tokens),
            spans=(Span(self.version, 0, len(tokens)),),
            finish_reason="length" if stop_reason is None else "stop",
            stop_reason=stop_reason,
            timeline=self.timeline,
            version=self.version,
            replica=self.replica,
        )

    def derender(self, sampled: Sampled, tools: Sequence[Mapping[str, Any]]) -> Message:
        tokens = list(sampled.token_ids)
        message: Message = {"role": "assistant"}
        if tokens[0] == THINK:
            end = tokens.index(THOUGHT) if THOUGHT in tokens else len(tokens)
            message["reasoning"], tokens = decode(tokens[1:end]), tokens[end + 1 :]
        if tools and CALL in tokens and CALLED in tokens:
            start, end = tokens.index(CALL), tokens.index(CALLED)
            called = decode(tokens[start + 1 : end])
            name, arguments = called[: called.index("{")], called[called.index("{") :]
            message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
            tokens = tokens[:start]
        text = decode(tokens)
        if isinstance(sampled.stop_reason, str):
            text = text.partition(sampled.stop_reason)[0]
        message["content"] = text or None
        return message


def _arguments(given: Any) -> dict[str, Any]:
    """Return the arguments of an earlier call as vLLM has its template see them: what is no JSON object is an empty one."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = None
    return given if isinstance(given, dict) else {}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""
