"""Acceptance 1, without an engine: whatever a program does with its conversations, each trained call's path is what the engine was given
and what it wrote, the number of roots is as predicted, and what is trained are exactly the answers that the program was given."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.net.replica_client import Sampled, SampleRequest
from headrace.records.trajectory import EpisodeTrajectory, Message
from headrace_services.agents.session import Refused, Session, SessionCall, SessionLimits, SessionSummary
from tests.support.toy_policy import END, THINK, THOUGHT, ToyPolicy, encode
from tests.support.toy_sessions import CLOCKS, LIMITS, TOOLS, Program, path_of, user

EPISODE_TOKENS, CONTEXT = 1500, 200


class Answered:
    """A call that has an answer, as its program and the engine know it."""

    def __init__(self, call: SessionCall, asked: list[Message], tools: Any, path: tuple[int, ...]) -> None:
        self.call, self.path = call, path
        self.messages, self.tools = [*asked, call.answer], tools
        self.meant = [_meaning(message) for message in self.messages]


class Prediction:
    """What a request becomes, by the rules of docs/agents.md, from its messages, the template, and what the engine was given and wrote.
    It knows nothing of what the session has decided."""

    def __init__(self, policy: ToyPolicy) -> None:
        self.policy = policy
        self.answered: list[Answered] = []

    def of(
        self, messages: list[Message], tools: Any, given: set[SessionCall]
    ) -> tuple[SessionCall | None, tuple[int, ...]]:
        """The call that it continues, or None, and the prompt that the engine has to get."""
        asked = tuple(self.policy.render(messages, tools, answered=False))
        meant = [_meaning(message) for message in messages]
        known = [
            each
            for each in self.answered
            if each.tools == tools
            and each.meant == meant[: len(each.meant)]
            and not isinstance(each.call.completion.stop_reason, str)
        ]
        longest = max((len(each.meant) for each in known), default=0)
        known = [each for each in known if len(each.meant) == longest]
        # of equal ones those first that the program was given: the most recorded tokens, else what a template makes of the newest
        for group in ([each for each in known if (each.call in given) is had] for had in (True, False)):
            group.sort(key=lambda each: -each.call.number)
            if found := [each for each in group if _begins(asked, each.path)]:
                return max(found, key=lambda each: len(each.path)).call, asked
            for each in group:
                told = tuple(self.policy.render(each.messages, tools, answered=True))
                if _begins(asked, told):
                    # what a template puts behind an answer: its end, unless the policy has written that, and a line break
                    ending = ((END, 10) if each.path[-1] != END else (10,)) if self.policy.ends_answers else ()
                    return each.call, (*each.path, *ending, *asked[len(told) :])
        return None, asked


def _begins(asked: tuple[int, ...], earlier: tuple[int, ...]) -> bool:
    return len(asked) > len(earlier) and asked[: len(earlier)] == earlier


def _meaning(message: Message) -> Any:
    """What a message says and calls; not how it is written down."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    calls = [
        (each["id"], each["function"]["name"], json.loads(each["function"]["arguments"]))
        for each in message.get("tool_calls") or ()
    ]
    return message["role"], text, message.get("tool_call_id"), calls


class Conversation:
    """A program's own copy of a conversation: its messages, the calls that answered, and whether it is still told as it was."""

    def __init__(
        self, messages: list[Message], tools: Any, last: SessionCall | None = None, *, kept: bool = True
    ) -> None:
        self.messages, self.tools, self.last, self.kept = messages, tools, last, kept


class FewWords(ToyPolicy):
    """Says so little that parallel answers are often equal, or differ in their reasoning alone."""

    def sample(self, request: SampleRequest) -> Sampled:
        chance = random.Random(f"{request.token_ids} {request.seed}")
        tokens = [THINK, *encode(chance.choice("ab")), THOUGHT] if chance.random() < 0.7 else []
        tokens += [*encode("c" * chance.randint(0, 1)), END]
        stop_reason: int | str | None = END
        if "c" in request.stop and ord("c") in tokens:
            tokens, stop_reason = tokens[:-1], "c"
        return self._sampled(request, tokens, stop_reason)


class Episode(RuleBasedStateMachine):
    @initialize(
        reasoning=st.sampled_from(["kept", "of the last answer", "stripped"]),
        ends_answers=st.booleans(),
        tight=st.booleans(),
        few_words=st.booleans(),
    )
    def start(self, reasoning: Any, ends_answers: bool, tight: bool, few_words: bool) -> None:
        limits = SessionLimits(30, EPISODE_TOKENS, 60_000, CONTEXT, 64) if tight else LIMITS
        self.policy = (FewWords if few_words else ToyPolicy)(reasoning, ends_answers)
        self.program = Program(Session(limits, CLOCKS, [END], "42 g 0", 0.0), self.policy)
        self.limits = limits
        self.conversations: list[Conversation] = []
        self.under_way: list[tuple[Conversation, SessionCall]] = []
        self.given: set[SessionCall] = set()  # whose answer the program has
        self.predicted = Prediction(self.policy)
        self.roots: set[SessionCall] = set()  # as predicted
        self.added = 0

    # -- what a program does -----------------------------------------------------------------------------------------------

    @rule(text=st.sampled_from(["hi", "go on", "what?"]), with_tools=st.booleans())
    def begin(self, text: str, with_tools: bool) -> None:
        self.added += 1
        self.conversations.append(Conversation([user(f"{text}{self.added}")], TOOLS if with_tools else ()))

    @precondition(lambda self: self.conversations)
    @rule(
        data=st.data(),
        max_tokens=st.sampled_from([None, None, 1, 3]),
        stop=st.sampled_from([(), (), ("b",), ("cd", "e")]),
        train=st.sampled_from([True, True, False]),
    )
    def ask(self, data: Any, max_tokens: int | None, stop: tuple[str, ...], train: bool) -> None:
        """A request, which goes its own way beside others."""
        conversation = data.draw(st.sampled_from(self.conversations))
        options = {"max_tokens": max_tokens, "stop": stop, "train": train, "tools": conversation.tools}
        parent, prompt = self.predicted.of(conversation.messages, conversation.tools, self.given)
        given = {name: value for name, value in options.items() if value not in (None, ())}
        try:
            call, is_new = self.program.session.ask(self.program.asked(conversation.messages, **given), 0.0)
            if not is_new:  # the answer of an equal request, whose client had gone
                self.hand_over(conversation, call)
                return
            self.program.place(call)
        except Refused:
            assert self.program.session.limit is not None
            return
        self.under_way.append((conversation, call))
        assert call.parent is parent
        assert tuple(call.reserved.token_ids.tolist()) == prompt
        if parent is None:
            self.roots.add(call)
        self.check_parent(conversation, call)

    def check_parent(self, conversation: Conversation, call: SessionCall) -> None:
        """Predicted by what the program did to its messages alone."""
        last = conversation.last
        stopped = last is not None and isinstance(last.completion.stop_reason, str)
        assert not stopped or call.parent is not last, "the tokens of a stop string are in no message"
        continues = last is not None and conversation.kept and not stopped
        if continues and last.answer.get("reasoning") and self.policy.reasoning == "of the last answer":
            continues = False  # it is no longer the last, and its reasoning goes
        if continues:
            # an equal answer to an equal conversation may be taken for it, and is as good
            assert call.parent is not None
            # so may one that was cut off, whose tokens are the beginning of this one's
            cut_off = call.parent.completion.finish_reason == "length"
            assert cut_off or self.shown(call.parent) == self.shown(last)
        elif not conversation.kept:
            assert call.parent is None or self.shown(call.parent) == self.shown_of(conversation)

    def shown(self, call: SessionCall) -> list[Any]:
        """What the template shows of a call's conversation with its answer."""
        return self.shown_of(Conversation([*call.history], call.asked.tools))

    def shown_of(self, conversation: Conversation) -> list[Any]:
        messages = conversation.messages
        answered = max((at for at, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
        shows = self.policy.reasoning == "kept"
        return [
            [each["role"], _text(each), each.get("tool_calls"), (shows and each.get("reasoning")) or None]
            for each in messages[: answered + 1]
        ]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), arrives=st.sampled_from([True, True, True, False]))
    def answer(self, data: Any, arrives: bool) -> None:
        """One of the calls under way ends, in any order."""
        conversation, call = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.finish(conversation, call)
        if not arrives:
            self.program.session.note_departure(call, 0.0)
            return
        self.hand_over(conversation, call)

    def finish(self, conversation: Conversation, call: SessionCall) -> None:
        reserved = call.reserved
        session = self.program.session
        sampled = self.policy.sample(
            SampleRequest(
                tuple(reserved.token_ids.tolist()),
                reserved.max_new_tokens,
                "now",
                0,
                stop=call.asked.stop,
                seed=reserved.seed,
            )
        )
        session.note_sampling(call, sampled)
        session.note_answer(call, self.policy.derender(sampled, call.asked.tools), 0.0)
        path = (*reserved.token_ids.tolist(), *sampled.token_ids)
        self.predicted.answered.append(Answered(call, conversation.messages, conversation.tools, path))

    def hand_over(self, conversation: Conversation, call: SessionCall) -> None:
        self.program.session.note_delivery(call)
        self.given.add(call)
        messages = [*conversation.messages, call.answer]
        for each in call.answer.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": each["id"], "content": "found"})
        self.added += 1
        messages.append(user(f"next{self.added}"))
        self.conversations.append(Conversation(messages, conversation.tools, call))

    @precondition(lambda self: any(not c.delivered and c.readers == 0 and c.answer for c in self.program.session.calls))
    @rule()
    def come_back(self) -> None:
        """A client that had gone asks for the same, in the same bytes."""
        lost = next(c for c in self.program.session.calls if not c.delivered and c.readers == 0 and c.answer)
        again, is_new = self.program.session.ask(lost.asked, 0.0)
        assert not is_new
        assert again.asked.body == lost.asked.body
        self.program.session.note_delivery(again)
        self.given.add(again)

    # -- what a program does to its messages -------------------------------------------------------------------------------

    @precondition(lambda self: self.conversations)
    @rule(data=st.data())
    def serialise_again(self, data: Any) -> None:
        one = data.draw(st.sampled_from(self.conversations))
        self.conversations.append(
            Conversation([_echo(each) for each in one.messages], one.tools, one.last, kept=one.kept)
        )

    @precondition(lambda self: any(len(each.messages) > 2 for each in self.conversations))
    @rule(data=st.data())
    def compact(self, data: Any) -> None:
        one = data.draw(st.sampled_from([each for each in self.conversations if len(each.messages) > 2]))
        self.added += 1
        messages = [user(f"summary{self.added}"), one.messages[-1]]
        self.conversations.append(Conversation(messages, one.tools, kept=False))

    @precondition(lambda self: any(each.last for each in self.conversations))
    @rule(data=st.data())
    def drop_reasoning(self, data: Any) -> None:
        """As many programs do with every answer."""
        one = data.draw(st.sampled_from([each for each in self.conversations if each.last]))
        shown = self.policy.reasoning == "kept" and any(each.get("reasoning") for each in one.messages)
        messages = [{name: value for name, value in each.items() if name != "reasoning"} for each in one.messages]
        self.conversations.append(Conversation(messages, one.tools, one.last, kept=one.kept and not shown))

    # -- what holds --------------------------------------------------------------------------------------------------------

    @invariant()
    def stays_within_its_limits(self) -> None:
        calls = [call for call in self.program.session.calls if not call.failed] if hasattr(self, "program") else []
        if calls:
            assert len(calls) <= self.limits.calls
            assert sum(call.tokens for call in calls) <= self.limits.tokens
            assert all(call.path.size <= self.limits.context for call in calls)

    def teardown(self) -> None:
        if not hasattr(self, "program"):
            return
        self.check_ending(self.program.session.end())

    def check_ending(self, ending: SessionSummary) -> None:
        assert sum(ending.dropped.values()) + len(ending.calls) == len(self.program.session.calls)
        given = sorted(call.number for call in self.given)
        kept = sorted(call.number for call in self.program.session.calls if call.answer and call.delivered)
        assert given == kept, "what is trained are the answers that the program was given"
        had: set[SessionCall] = set()  # who goes on from an answer has had it
        for call in self.given:
            each: SessionCall | None = call
            while each is not None:
                had.add(each)
                each = each.parent
        assert len(ending.calls) == len(had)
        if not ending.calls or not any(call.trained for call in ending.calls):
            return
        trajectory = EpisodeTrajectory("g", 0, 0, ending.calls, ending.limit is not None, "runner-1")
        trajectory.check()
        assert sum(call.parent < 0 for call in ending.calls) == len(self.roots & had)
        engine = {prompt + written for prompt, written in self.policy.asked}
        for number in range(len(ending.calls)):
            assert tuple(path_of(ending.calls, number)) in engine
        # each trained token once, in a context that the engine had
        rows = trajectory.paths()
        assert len(rows) == ending.paths
        assert sum(int(row.loss_mask.sum()) for row in rows) == trajectory.length
        assert len(trajectory.encode()) <= self.limits.nbytes
        for row in rows:
            assert tuple([*row.prompt_token_ids.tolist(), *row.completion_token_ids.tolist()]) in engine


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _echo(message: Message) -> Message:
    echo = {"refusal": None, **dict(reversed(message.items()))}
    if isinstance(echo.get("content"), str):
        echo["content"] = [{"type": "text", "text": echo["content"]}]
    if echo.get("tool_calls"):
        echo["tool_calls"] = [
            {
                **each,
                "function": {
                    **each["function"],
                    "arguments": json.dumps(json.loads(each["function"]["arguments"]), indent=1),
                },
            }
            for each in echo["tool_calls"]
        ]
    return echo


TestTokenTruth = Episode.TestCase
TestTokenTruth.settings = settings(deadline=None, max_examples=150, stateful_step_count=30)
