"""The session of an episode: what a request continues, what is trained of it, and what a retry gets."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.net.replica_client import Sampled, SampleRequest
from headrace.records.trajectory import EpisodeTrajectory, Message, Span, episode_record
from headrace_services.agents.session import Clocks, Refused, Session, SessionCall, SessionLimits, _size
from tests.support.toy_policy import ASSISTANT, BOS, CALL, END, THINK, THOUGHT, USER, ToyPolicy, decode, encode
from tests.support.toy_sessions import CLOCKS, LIMITS, TOOLS, Held, Program, path_of, user


def session(limits: SessionLimits = LIMITS, clocks: Clocks = CLOCKS) -> Session:
    return Session(limits, clocks, [END], "42 group-1 0", 0.0)


@pytest.fixture
def program() -> Program:
    return Program(session(), ToyPolicy())


# -- matching ----------------------------------------------------------------------------------------------------------------


def test_a_chat_is_one_path_whose_contexts_are_what_the_program_added(program: Program) -> None:
    messages = [user("hi")]
    first = program.ask(messages)
    second = program.ask([*messages, first.answer, user("and?")])
    assert second.parent is first
    assert second.context.tolist() == [ord("\n"), USER, *encode("and?"), END, ord("\n"), ASSISTANT]
    ending = program.session.end()
    assert [call.parent for call in ending.calls] == [-1, 0]
    assert tuple(path_of(ending.calls, 1)) == sum(program.policy.asked[1], ())
    assert ending.calls[1].messages == (user("and?"),)


def test_the_first_call_is_a_root_that_is_rendered_as_it_is(program: Program) -> None:
    call = program.ask([user("hi")])
    assert call.parent is None
    assert call.context.tolist() == [BOS, USER, *encode("hi"), END, ord("\n"), ASSISTANT]


@pytest.mark.parametrize(
    "echo",
    [
        lambda answer: {**answer, "refusal": None, "audio": None, "function_call": None, "annotations": []},
        lambda answer: dict(reversed(answer.items())),
        lambda answer: {**answer, "content": answer["content"] or ""},
        lambda answer: {**answer, "content": [{"type": "text", "text": answer["content"] or ""}]},
        lambda answer: {**answer, "tool_calls": [_spaced(call) for call in answer.get("tool_calls", [])] or None},
    ],
    ids=["fields that are null", "order of keys", "empty text", "text in parts", "spaces in arguments"],
)
def test_an_answer_that_was_serialised_otherwise_is_the_same(echo: Any) -> None:
    for hello in "abcdefgh":  # with and without tools, with and without text
        program = Program(session(), ToyPolicy())
        first = program.ask([user(hello)], tools=TOOLS)
        second = program.ask([user(hello), echo(first.answer), user("and?")], tools=TOOLS)
        assert second.parent is first


def _spaced(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(dict(reversed(json.loads(call["function"]["arguments"]).items())), indent=4)
    return {**call, "function": {**call["function"], "arguments": arguments}}


@pytest.mark.parametrize(
    "edit",
    [
        lambda messages: [user("other"), *messages[1:]],
        lambda messages: messages[1:],
        lambda messages: [messages[0], {**messages[1], "content": "what I never said"}, messages[2]],
        lambda messages: [user("a summary of all that"), messages[-1]],
        lambda messages: [messages[0], {**messages[1], "role": "user"}, messages[2]],
    ],
    ids=["first message", "left out", "edited answer", "compaction", "another's words"],
)
def test_a_changed_history_is_a_new_root(program: Program, edit: Any) -> None:
    first = program.ask([user("hi")])
    second = program.ask(edit([user("hi"), first.answer, user("and?")]))
    assert second.parent is None
    assert second.context.tolist() == list(program.policy.asked[1][0])
    assert program.session.rendered_again == second.context.size


def test_other_tools_are_another_history(program: Program) -> None:
    first = program.ask([user("hi")], tools=TOOLS)
    assert program.ask([user("hi"), first.answer, user("and?")]).parent is None


def test_the_longest_conversation_is_continued(program: Program) -> None:
    first = program.ask([user("hi")])
    second = program.ask([user("hi"), first.answer, user("two")])
    third = program.ask([user("hi"), first.answer, user("two"), second.answer, user("three")])
    branch = program.ask([user("hi"), first.answer, user("other")])
    assert third.parent is second
    assert branch.parent is first
    assert program.session.end().paths == 2


def answer_with(reasoning: bool, policy: ToyPolicy) -> tuple[Program, SessionCall, list[Message]]:
    """A program whose first answer has reasoning, or none."""
    for place in range(100):
        program = Program(session(), dataclasses.replace(policy, asked=[]))
        first = program.ask(messages := [user(f"hi {place}")])
        if bool(first.answer.get("reasoning")) is reasoning:
            return program, first, messages
    raise AssertionError


@pytest.mark.parametrize(
    ("policy", "has_reasoning", "echoes_it", "is_root"),
    [
        (ToyPolicy("kept"), True, True, False),
        (ToyPolicy("kept"), True, False, True),
        (ToyPolicy("kept"), False, False, False),
        (ToyPolicy("of the last answer"), True, True, True),
        (ToyPolicy("of the last answer"), True, False, True),
        (ToyPolicy("of the last answer"), False, False, False),
        (ToyPolicy("stripped"), True, True, False),
        (ToyPolicy("stripped"), True, False, False),
    ],
)
def test_whether_reasoning_makes_a_root_is_the_templates_to_say(
    policy: ToyPolicy, has_reasoning: bool, echoes_it: bool, is_root: bool
) -> None:
    program, first, messages = answer_with(has_reasoning, policy)
    echo = {name: value for name, value in first.answer.items() if echoes_it or name != "reasoning"}
    second = program.ask([*messages, echo, user("and?")])
    assert (second.parent is None) is is_root
    # either way: what is trained is what the engine was given and wrote
    ending = program.session.end()
    assert [tuple(path_of(ending.calls, number)) for number in range(2)] == [
        sum(each, ()) for each in program.policy.asked
    ]


@pytest.mark.parametrize("is_text", [True, False])
def test_a_history_is_rendered_only_where_the_record_does_not_lead(is_text: bool) -> None:
    """A call of no tool is lost in the text of the answer, and with it some of the tokens."""
    for place in range(100):
        program = Program(session(), ToyPolicy())
        messages = [user(f"{place}")]
        first = program.ask(messages)
        if (CALL not in first.completion.token_ids) is is_text:
            break
    second = program.ask([*messages, first.answer, user("and?")])
    assert second.parent is first
    assert (first.rendered_answer is None) is is_text


def test_a_cut_off_answer_gets_its_end_of_turn_as_context(program: Program) -> None:
    first = program.ask([user("hello")], max_tokens=1)
    assert first.completion.finish_reason == "length"
    second = program.ask([user("hello"), first.answer, user("and?")])
    assert second.parent is first
    assert second.context.tolist()[:3] == [END, ord("\n"), USER]
    assert END not in first.completion.token_ids


def test_a_template_that_ends_no_answer_adds_nothing_between() -> None:
    program = Program(session(), ToyPolicy(ends_answers=False))
    first = program.ask([user("hi")])
    second = program.ask([user("hi"), first.answer, user("and?")])
    assert second.context.tolist() == [USER, *encode("and?"), END, ord("\n"), ASSISTANT]


def test_a_call_that_a_stop_string_ended_is_not_continued() -> None:
    for place in range(100):
        program = Program(session(), ToyPolicy())
        first = program.ask([user(f"{place}")], stop=("b",))
        stopped = isinstance(first.completion.stop_reason, str)
        second = program.ask([user(f"{place}"), first.answer, user("and?")])
        assert (second.parent is None) is stopped
        if stopped:
            return
    raise AssertionError


def test_a_call_ended_by_a_stop_string_is_continued_from_before_it() -> None:
    for place in range(100):
        program = Program(session(), ToyPolicy())
        messages = [user(f"{place}")]
        first = program.ask(messages)
        messages += [first.answer, user("and?")]
        second = program.ask(messages, stop=("b",))
        if isinstance(second.completion.stop_reason, str):
            break
    third = program.ask([*messages, second.answer, user("so?")])
    assert second.parent is third.parent is first
    assert program.session.end().paths == 2


def test_tool_calls_are_named_after_the_number_of_their_call() -> None:
    named = []
    program = Program(session(), ToyPolicy())
    for place in range(30):
        call = program.ask([user(f"{place}")], tools=TOOLS)
        named += [each["id"] for each in call.answer.get("tool_calls", ())]
        assert all(each["id"] == f"{call.number:06d}000" for each in call.answer.get("tool_calls", ()))
    assert len(set(named)) == len(named) > 1


def test_equal_answers_are_told_apart_by_whether_the_program_had_them(program: Program) -> None:
    had = program.ask([user("hi")], max_tokens=1)
    lost = program.begin([user("hi")], max_tokens=1, temperature=0.5)  # other bytes: no retry
    program.carry_out(lost)
    program.session.note_departure(lost, 0.0)
    lost.answer, lost.conversation = had.answer, had.conversation
    program.session._by_conversation = {had.conversation: [had, lost]}
    assert program.ask([user("hi"), had.answer, user("and?")]).parent is had


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("delivered", [True, False])
def test_of_answers_the_one_whose_tokens_are_repeated_is_continued(which: int, delivered: bool) -> None:
    """Equal texts with other reasoning, as parallel samples have them; their program goes on from any of them."""
    program = Program(session(), ToyPolicy())
    texts = [[THINK, *encode(reasoning), THOUGHT, *encode("abc"), END] for reasoning in ("x", "y", "zz", "z")]
    # no tokenizer writes this one's tokens: only its text tells it
    texts[3][-2] = ord("c") + 2**16
    calls = [program.begin([user("hi")]) for _ in texts]
    for call, text in zip(calls, texts, strict=True):
        reserved = program.place(call)
        sampled = program.policy.sample(SampleRequest(tuple(reserved.token_ids.tolist()), 64, "now", 0))
        program.session.note_sampling(
            call, msgspec.structs.replace(sampled, token_ids=text, logprobs=[-0.5] * len(text))
        )
        reasoning = decode(text[1 : text.index(THOUGHT)])
        program.session.note_answer(call, {"role": "assistant", "reasoning": reasoning, "content": "abc"}, 0.0)
        if delivered:
            program.session.note_delivery(call)
    assert len({call.conversation for call in calls}) == 1
    again = program.ask([user("hi"), calls[which].answer, user("and?")])
    assert again.parent is calls[which]


# -- what is trained ---------------------------------------------------------------------------------------------------------


def test_an_answer_that_was_discarded_is_trained(program: Program) -> None:
    best_of = [program.ask([user("hi")]) for _ in range(3)]
    assert len({call.number for call in best_of}) == 3
    ending = program.session.end()
    assert [call.parent for call in ending.calls] == [-1, -1, -1]
    assert all(call.trained for call in ending.calls)
    assert not ending.dropped


def test_what_was_not_delivered_is_dropped_and_counted(program: Program) -> None:
    program.ask([user("had")])
    lost = program.begin([user("lost")])
    program.carry_out(lost)
    program.session.note_departure(lost, 1.0)
    program.begin([user("under way")])
    failed = program.begin([user("failed")])
    program.session.note_failure(failed, 1.0, again=True)
    ending = program.session.end()
    assert len(ending.calls) == 1
    assert ending.dropped == {"abandoned": 1, "unanswered": 1, "failed": 1}


def test_who_goes_on_from_an_answer_has_had_it(program: Program) -> None:
    first = program.begin([user("hi")])
    program.carry_out(first)
    program.session.note_departure(first, 1.0)
    second = program.ask([user("hi"), first.answer, user("and?")])
    assert second.parent is first
    assert [call.parent for call in program.session.end().calls] == [-1, 0]


def test_a_call_that_opts_out_is_context(program: Program) -> None:
    first = program.ask([user("hi")], train=False)
    program.ask([user("hi"), first.answer, user("and?")])
    assert [call.trained for call in program.session.end().calls] == [False, True]


@pytest.mark.parametrize(
    ("trains", "paths"),
    [([True, False, True], 1), ([True, False], 1), ([False, True, False], 1), ([False, False], 0), ([True, True], 1)],
)
def test_a_path_ends_at_the_last_trained_call(program: Program, trains: list[bool], paths: int) -> None:
    messages: list[Message] = []
    for train in trains:
        messages.append(user("and?"))
        messages.append(program.ask(messages, train=train).answer)
    assert program.session.end().paths == paths


def test_calls_are_numbered_anew_without_those_that_are_dropped(program: Program) -> None:
    lost = program.begin([user("lost")])
    program.carry_out(lost)
    first = program.ask([user("hi")])
    program.ask([user("hi"), first.answer, user("and?")])
    assert first.number == 1
    assert [call.parent for call in program.session.end().calls] == [-1, 0]


# -- retries -----------------------------------------------------------------------------------------------------------------


def test_equal_requests_are_calls_of_their_own_while_clients_stay(program: Program) -> None:
    calls = [program.begin([user("hi")]) for _ in range(3)]
    assert len(set(map(id, calls))) == 3
    for call in calls:
        program.carry_out(call)
    assert len({call.reserved or tuple(call.completion.token_ids) for call in calls}) > 1, "each has a seed of its own"


@pytest.mark.parametrize("answered", [False, True])
def test_a_request_equal_to_a_departed_clients_gets_its_answer(program: Program, answered: bool) -> None:
    first = program.begin([user("hi")])
    if answered:
        program.carry_out(first)
    program.session.note_departure(first, 1.0)
    again, is_new = program.session.ask(program.asked([user("hi")]), 2.0)
    assert (again, is_new) == (first, False)
    assert program.session.joined == 1
    _, is_new = program.session.ask(program.asked([user("hi ")]), 2.0)
    assert is_new


@pytest.mark.parametrize("mark", [{"retry": 1}, {"idempotency_key": "once"}])
def test_a_marked_retry_joins_a_call_with_a_client(program: Program, mark: dict[str, Any]) -> None:
    key = {"idempotency_key": mark["idempotency_key"]} if "idempotency_key" in mark else {}
    first, _ = program.session.ask(program.asked([user("hi")], **key), 0.0)
    again, is_new = program.session.ask(program.asked([user("hi")], **mark), 0.0)
    assert (again, is_new) == (first, False)
    program.carry_out(first)
    program.session.note_delivery(first)
    # the answer got lost on its way
    mark |= {"retry": 2} if "retry" in mark else {}
    assert program.session.ask(program.asked([user("hi")], **mark), 0.0) == (first, False)


def test_a_retry_after_an_error_is_a_call_of_its_own(program: Program) -> None:
    failed, other = program.begin([user("hi")]), program.begin([user("hi")])
    program.session.note_failure(failed, 1.0, again=True)
    program.session.note_departure(failed, 1.0)
    again, is_new = program.session.ask(program.asked([user("hi")], retry=1), 1.0)
    assert is_new
    assert again is not other


def test_two_retries_of_two_equal_requests_get_an_answer_each(program: Program) -> None:
    first, second = program.begin([user("hi")]), program.begin([user("hi")])
    for call in (first, second):
        program.session.note_departure(call, 1.0)
    got = [program.session.ask(program.asked([user("hi")], retry=1), 2.0)[0] for _ in range(2)]
    assert got == [first, second]


@pytest.mark.parametrize("delivered", [False, True])
def test_a_retry_joins_no_call_that_a_retry_of_its_count_has_come_for(program: Program, delivered: bool) -> None:
    first = program.begin([user("hi")])
    if delivered:
        program.carry_out(first)
        program.session.note_delivery(first)
    got = [program.session.ask(program.asked([user("hi")], retry=count), 0.0) for count in (1, 1, 2, 2, 2)]
    assert [is_new for _, is_new in got] == [False, True, False, False, True]
    # the second has no reader that retried yet
    assert [each for each, _ in got] == [first, got[1][0], got[1][0], first, got[4][0]]


def test_a_retry_of_a_refused_request_joins_no_call_with_a_client(program: Program) -> None:
    first = program.begin([user("hi")])
    assert program.session.ask(program.asked([user("hi")], retry=1, turned_away=True), 0.0)[1]
    program.session.note_departure(first, 1.0)
    assert program.session.ask(program.asked([user("hi")], retry=1, turned_away=True), 2.0) == (first, False)


@pytest.mark.parametrize(("unmarked", "is_new"), [({}, False), ({"retry": 0}, True)])
def test_an_error_is_made_up_for_once_without_a_count(program: Program, unmarked: dict[str, Any], is_new: bool) -> None:
    failed = program.begin([user("hi")])
    program.session.note_failure(failed, 1.0, again=True)
    program.session.note_departure(failed, 1.0)
    program.ask([user("hi")], **unmarked)
    assert program.session.ask(program.asked([user("hi")], retry=1), 2.0)[1] is is_new


def test_a_call_with_an_idempotency_key_is_not_joined_under_another(program: Program) -> None:
    first, _ = program.session.ask(program.asked([user("hi")], idempotency_key="one"), 0.0)
    program.session.note_departure(first, 0.0)
    for number, mark in enumerate(({}, {"retry": 1})):
        other = program.asked([user("hi")], idempotency_key=f"other {number}", **mark)
        assert program.session.ask(other, 1.0)[1]
    assert program.session.ask(program.asked([user("hi")], idempotency_key="one"), 1.0) == (first, False)


def test_an_idempotency_key_of_another_request_is_refused(program: Program) -> None:
    program.session.ask(program.asked([user("hi")], idempotency_key="once"), 0.0)
    with pytest.raises(Refused, match="idempotency key") as refused:
        program.session.ask(program.asked([user("other")], idempotency_key="once"), 0.0)
    assert refused.value.kind == "conflict"


def test_a_failed_call_is_asked_again_under_its_idempotency_key(program: Program) -> None:
    first, _ = program.session.ask(program.asked([user("hi")], idempotency_key="once"), 0.0)
    program.session.note_failure(first, 0.0, again=True)
    _, is_new = program.session.ask(program.asked([user("hi")], idempotency_key="once"), 0.0)
    assert is_new


def test_a_call_that_failed_holds_nothing_of_its_request(program: Program) -> None:
    first = program.ask([user("hi")])
    for places in (False, True):
        message = Held(user("and?"))
        call = program.begin([user("hi"), first.answer, message], tools=TOOLS if places else ())
        if places:
            program.place(call)
        program.session.note_failure(call, 0.0, again=True)
        held = weakref.ref(message)
        del message
        gc.collect()
        assert held() is None
        assert call.context.size == 0
        assert call.prefixes == ()
        assert call.asked.tools == ()


# -- limits ------------------------------------------------------------------------------------------------------------------


def test_calls_are_limited(program: Program) -> None:
    program = Program(session(dataclasses.replace(LIMITS, calls=2)), ToyPolicy())
    program.ask([user("a")])
    assert program.session.limit is None
    program.begin([user("b")])
    for _ in range(2):
        with pytest.raises(Refused, match="used its 2 calls") as refused:
            program.ask([user("c")])
        assert refused.value.kind == "limit"
    ending = program.session.end()
    assert ending.limit is not None
    assert ending.refused


def test_calls_that_fail_are_limited() -> None:
    program = Program(session(dataclasses.replace(LIMITS, calls=2)), ToyPolicy())
    for _ in range(16):
        program.session.note_failure(program.begin([user("a")]), 0.0, again=False)
    for _ in range(2):
        with pytest.raises(Refused, match=r"16 calls.*agents\.max_rollout_turns") as refused:
            program.begin([user("b")])
        assert refused.value.kind == "limit"
    ending = program.session.end()
    assert ending.refused
    assert ending.dropped == {"failed": 16}


@pytest.mark.parametrize(("max_tokens", "is_limit"), [(None, True), (2, True), (1, False)])
def test_an_answer_cut_off_by_the_run_is_a_limit_but_no_refusal(max_tokens: int | None, is_limit: bool) -> None:
    program = Program(session(dataclasses.replace(LIMITS, new_tokens=1)), ToyPolicy())
    completion = program.ask([user("hello")], max_tokens=max_tokens).completion
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")
    ending = program.session.end()
    assert (ending.limit is not None) is is_limit
    assert not ending.refused


@pytest.mark.parametrize("limit", ["tokens", "context"])
def test_the_last_token_that_a_limit_has_room_for_is_sampled(limit: str) -> None:
    prompt = len(ToyPolicy().render([user("hello")], (), answered=False))
    for room in (0, 1):
        program = Program(session(dataclasses.replace(LIMITS, **{limit: prompt + room})), ToyPolicy())
        call = program.begin([user("hello")])
        if room:
            assert program.place(call).max_new_tokens == 1
        else:
            with pytest.raises(Refused):
                program.place(call)


def test_parallel_calls_do_not_overshoot_the_tokens_of_an_episode() -> None:
    program = Program(session(dataclasses.replace(LIMITS, tokens=60, new_tokens=20)), ToyPolicy())
    calls = [program.begin([user("hello")]) for _ in range(10)]
    placed = []
    with pytest.raises(Refused, match=r"agents\.max_episode_tokens"):
        placed.extend(map(program.place, calls))
    assert sum(each.token_ids.size + each.max_new_tokens for each in placed) <= 60
    assert placed[-1].max_new_tokens >= 1


def test_what_a_call_reserved_and_did_not_need_is_free_again() -> None:
    program = Program(session(dataclasses.replace(LIMITS, tokens=100, new_tokens=60)), ToyPolicy())
    for _ in range(3):  # each of about 25 tokens with its prompt; two at once would not fit
        program.ask([user("hello")])


def test_a_path_is_no_longer_than_the_context() -> None:
    program = Program(session(dataclasses.replace(LIMITS, context=16)), ToyPolicy())
    first = program.ask([user("hello")])
    assert first.context.size + len(first.completion.token_ids) <= 16
    with pytest.raises(Refused, match=r"policy\.max_total_sequence_length"):
        program.ask([user("hello"), first.answer, user("and now something long")])
    assert program.session.limit is not None
    # a program that shortens its history goes on
    program.ask([user("short")], max_tokens=1)
    assert program.session.hung(5.0) is None
    assert program.session.end().limit is None


def test_the_record_is_bounded_in_bytes() -> None:
    program = Program(session(dataclasses.replace(LIMITS, nbytes=8000)), ToyPolicy())
    with pytest.raises(Refused, match=r"agents\.max_episode_bytes"):
        list(map(program.ask, ([user(f"{place}" * 1000)] for place in range(10))))
    ending = program.session.end()
    assert 0 < sum(len(call.encode()) for call in ending.calls) <= 8000


def test_fields_that_no_template_shows_count_as_they_are_kept() -> None:
    program = Program(session(dataclasses.replace(LIMITS, nbytes=20_000)), ToyPolicy())
    with pytest.raises(Refused, match=r"agents\.max_episode_bytes"):
        program.ask([{**user("hi"), "more": [0.5] * 2_300}])  # 9 bytes each; as JSON 5


def test_an_answer_whose_text_is_longer_than_its_room_is_refused() -> None:
    program = Program(session(dataclasses.replace(LIMITS, nbytes=8000)), ToyPolicy())
    first = program.ask([user("hi")])
    call = program.begin([user("hi"), first.answer, user("and?")])
    placed = program.place(call)
    program.session.note_sampling(call, program.policy.sample(SampleRequest(tuple(placed.token_ids), 64, "now", 0)))
    with pytest.raises(Refused, match=r"agents\.max_episode_bytes"):
        program.session.note_answer(call, {"role": "assistant", "content": "x" * 6000}, 0.0)
    program.session.note_failure(call, 0.0, again=False)
    assert program.ask([user("short")]).number == 1
    ending = program.session.end()
    assert len(ending.calls) == 2
    assert ending.dropped == {"failed": 1}


_MANY = st.builds(
    lambda value, times: [value] * times, st.sampled_from([0.5, 1, -(2**40), None, "", "é", {}]), st.integers(0, 5000)
)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=5),
)
_MESSAGES = st.builds(
    lambda fields, many: {**fields, **user("hi"), "many": many}, st.dictionaries(st.text(), _JSON, max_size=4), _MANY
)


@given(
    added=st.lists(_MESSAGES, min_size=1, max_size=4),
    answer=_MESSAGES,
    context=st.integers(1, 300),
    cuts=st.sets(st.integers(1, 400), min_size=1, max_size=50),
    version=st.integers(0, 2**53),
    name=st.text("r", min_size=1, max_size=256),
)
def test_a_record_has_no_more_bytes_than_its_call_says(
    added: list[Message], answer: Message, context: int, cuts: set[int], version: int, name: str
) -> None:
    edges = [0, *sorted(cuts)]
    call = SessionCall(Program(session(), ToyPolicy()).asked(added), 0.0, (), added=tuple(added))
    call.context, call.message_bytes = np.full(context, 2**31 - 1, np.int32), _size(added) + _size([answer])
    call.answer, call.timings = answer, {"render_s": 0.1, "sample_s": 0.1, "keep_s": 0.1}
    call.completion = Sampled(
        token_ids=[2**31 - 1] * edges[-1],
        logprobs=[-0.1] * edges[-1],
        spans=tuple(Span(version, start, end) for start, end in itertools.pairwise(edges)),
        finish_reason="length",
        stop_reason=None,
        timeline="now",
        version=version,
        replica=name,
    )
    record = call.record(lambda each: 2**31)
    assert len(record.encode()) <= call.nbytes
    episode = EpisodeTrajectory("g" * 256, 2**31, 2**31, (record,), True, name, {"episode_s": 0.1})
    assert len(episode.encode()) <= call.nbytes
    single = episode_record("g" * 256, 2**31, 2**31, (record,), truncated=True, runner=name, timings={"episode_s": 0.1})
    assert len(single.encode()) <= call.nbytes


def test_after_its_end_every_request_is_refused(program: Program) -> None:
    call = program.begin([user("hi")])
    program.session.end()
    for refused in (lambda: program.begin([user("hi")]), lambda: program.place(call)):
        with pytest.raises(Refused) as error:
            refused()
        assert error.value.kind == "ended"


# -- seeds -------------------------------------------------------------------------------------------------------------------


def test_the_same_question_asked_as_often_has_the_same_seed() -> None:
    def seeds(seed: str) -> list[int]:
        program = Program(Session(LIMITS, CLOCKS, [END], seed, 0.0), ToyPolicy())
        return [program.place(program.begin([user(text)])).seed for text in ("a", "a", "b")]

    assert seeds("42 g 0") == seeds("42 g 0")
    assert len({*seeds("42 g 0"), *seeds("42 g 1")}) == 6


# -- clocks ------------------------------------------------------------------------------------------------------------------


def test_a_program_that_asks_nothing_has_hung(program: Program) -> None:
    assert program.session.hung(9.0) is None
    assert "agents.think_s" in program.session.hung(10.0)
    call, _ = program.session.ask(program.asked([user("hi")]), 9.0)
    assert program.session.hung(30.0) is None, "it waits for the policy"
    program.carry_out(call, now=30.0)
    assert program.session.hung(39.0) is None
    assert "agents.think_s" in program.session.hung(40.0)
    program.session.note_delivery(call)
    program.session.ask(program.asked([user("hi")], retry=1), 39.0)
    assert program.session.hung(48.0) is None, "it asked again for an answer that it had"
    failed, _ = program.session.ask(program.asked([user("other")]), 48.0)
    program.session.note_failure(failed, 70.0, again=True)
    assert program.session.hung(79.0) is None
    assert "agents.think_s" in program.session.hung(80.0)


def test_an_episode_ends_at_last(program: Program) -> None:
    program.session.ask(program.asked([user("hi")]), 99.0)
    assert program.session.hung(99.0) is None
    assert "agents.episode_s" in program.session.hung(100.0)


def test_a_call_without_an_answer_is_given_up(program: Program) -> None:
    program.ask([user("answered")])
    call, _ = program.session.ask(program.asked([user("hi")]), 5.0)
    assert not list(program.session.overdue(24.0))
    ((late, why),) = program.session.overdue(25.0)
    assert late is call
    assert "agents.call_s" in why


def test_a_call_whose_client_has_gone_runs_on_for_a_while(program: Program) -> None:
    call, _ = program.session.ask(program.asked([user("hi")]), 5.0)
    program.session.note_departure(call, 6.0)
    assert not list(program.session.overdue(8.9))
    assert [each for each, _ in program.session.overdue(9.0)] == [call]
    program.session.ask(program.asked([user("hi")]), 8.0)
    assert not list(program.session.overdue(9.0)), "somebody came back for it"
    program.session.ask(program.asked([user("hi")], retry=1), 10.0)
    program.session.note_departure(call, 11.0)
    assert not list(program.session.overdue(14.0)), "one of two has stayed"
    program.session.note_departure(call, 12.0)
    assert not list(program.session.overdue(14.9))
    assert [each for each, _ in program.session.overdue(15.0)] == [call]
    program.carry_out(call, 16.0)
    assert not list(program.session.overdue(99.0)), "it has its answer"


def test_a_program_that_met_a_limit_has_to_end() -> None:
    program = Program(session(dataclasses.replace(LIMITS, calls=1)), ToyPolicy())
    program.ask([user("a")])
    with pytest.raises(Refused):
        program.session.ask(program.asked([user("b")]), 3.0)
    with pytest.raises(Refused):
        program.session.ask(program.asked([user("b")]), 4.0)
    assert program.session.hung(7.9) is None
    assert "agents.finish_s" in program.session.hung(8.0)


def test_memory_does_not_grow_with_the_square_of_the_calls(program: Program) -> None:
    messages = [user("hi")]
    for _ in range(20):
        call = program.ask(messages, max_tokens=1)
        messages = [*messages, call.answer, user("x")]
    calls = program.session.calls
    assert sum(len(call.asked.messages) + len(call.prefixes) for call in calls) <= 3 * len(messages)
    assert sum(call.context.size for call in calls) < 4 * len(program.policy.asked[-1][0])
    assert all(call.context.base is None for call in calls)  # a view would hold the whole request
    assert np.array_equal(calls[-1].path, sum(program.policy.asked[-1], ()))
