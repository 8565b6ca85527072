"""The session of one episode: which call a request continues, what the policy is asked, and what of it is trained.

A pure state machine: no I/O, no clock (`now` is the run's time, which stands still while nothing can be sampled), no tokenizer. What it
needs rendered or sampled, its caller brings (`episode.OpenEpisode`).

A call lives through: `ask` (or an earlier call is joined), `place` (its context is known, its room reserved), `sampled`, `answered` (it
has a number and an answer, which may leave once its record is kept), `delivered`; or it fails. Of a call that continues another, the
context is made of three token sequences:

    path   what the policy saw and wrote up to the end of the call that is continued, as it was recorded
    told   that call's conversation with its answer as it was given, rendered (R)
    asked  the request, rendered (F)

If `asked` begins with `path`, token by token, the new context is the rest of it, and nobody need know `told`. If it begins with `told` (the
policy wrote its answer in other tokens than a tokenizer would), the program has kept the conversation as it was too, and the new context is
what of `asked` follows the answer's end of turn. Else (a template that strips reasoning, a compacted history, an edited answer) the
request is a new root, rendered as it is. So no token that is trained is ever tokenized again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError
from headrace.replica_client import Sampled
from headrace.trajectory import Call, Message
from headrace_services.agents import conversation

Tokens = npt.NDArray[np.int32]
# Of a record, at most, besides its tokens, spans and messages: names, numbers, times.
_CALL_BYTES = 1024
# A token of a context; one that was sampled, with its log-probability and its mask; a span of them.
_CONTEXT_BYTES, _SAMPLED_BYTES, _SPAN_BYTES = 4, 9, 32
# A token that is yet to be sampled, with a text of usual length: `answered` looks at what it has come to.
_RESERVED_BYTES = 16
# Calls of an episode that may fail, for each that it may have.
_FAILED_PER_CALL = 8

Refusal = Literal["limit", "ended", "conflict"]


class Refused(HeadraceError):
    """A request that is not sampled. `limit`: there is no room for it in the episode; `ended`: the episode is over; `conflict`: its
    idempotency key is of another request."""

    def __init__(self, kind: Refusal, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class SessionLimits:
    """The limits of an episode: its calls, its tokens (contexts and completions), the bytes of its record; of a path, `context` tokens;
    of a completion, `new_tokens`."""

    calls: int
    tokens: int
    nbytes: int
    context: int
    new_tokens: int


@dataclasses.dataclass(frozen=True)
class Clocks:
    """Seconds: of one call, between calls, of the episode, of what a program does once a limit was reached; and how long a call runs on for
    a client that has gone."""

    call_s: float
    think_s: float
    episode_s: float
    finish_s: float
    retry_grace_s: float


@dataclasses.dataclass(frozen=True)
class CallRequest:
    """A request, as the state machine sees it. `train` is False if the request opts out; `body` is a digest of its bytes and of that,
    `retry` is how often the client says it has sent it before (None: it does not count), `turned_away` whether an earlier try was refused
    before it became a call."""

    messages: tuple[Message, ...]
    body: bytes
    prefixes: tuple[bytes, ...]  # `conversation.prefixes` of its messages and tools
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    train: bool = True
    retry: int | None = None
    turned_away: bool = False
    idempotency_key: str | None = None


@dataclasses.dataclass(frozen=True)
class SamplingTask:
    """What to sample: the path's tokens with the new context, at most `max_new_tokens` more, with this seed."""

    token_ids: Tokens
    max_new_tokens: int
    seed: int


@dataclasses.dataclass(frozen=True)
class RenderedAnswer:
    """A call's conversation with its answer, rendered: its length and digest, and from where on a longer rendering is new."""

    length: int
    digest: bytes
    rest: int


@dataclasses.dataclass(eq=False)
class SessionCall:
    """One request to the policy. `number` counts those that have an answer, in the order in which they got it; -1 before."""

    asked: CallRequest
    begun: float
    prefixes: tuple[bytes, ...]  # those of its request that are still needed
    readers: int = 1  # requests that wait for its answer
    number: int = -1
    parent: SessionCall | None = None
    added: tuple[Message, ...] = ()  # its messages behind the conversation that it continues
    message_bytes: int = 0  # of its messages
    context: Tokens = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    reserved: SamplingTask | None = None
    cut_short: bool = False  # it may be sampled for less than it asked for, because the run allows no more
    ends_rendered: int = 0  # end tokens in the rendering of the request
    completion: Sampled | None = None
    answer: Message = dataclasses.field(default_factory=dict)
    conversation: bytes = b""  # the digest of its conversation with its answer
    rendered_answer: RenderedAnswer | None = None
    delivered: bool = False
    failed: bool = False
    left_at: float | None = None  # when nobody was left to wait for it
    joined: int = 0
    retry: int = 0  # the highest count of tries before, of the requests that it answers
    timings: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def running(self) -> bool:
        return self.number < 0 and not self.failed

    @property
    def history(self) -> tuple[Message, ...]:
        """Its conversation, with every answer as it was given; its own last."""
        parts: list[tuple[Message, ...]] = []
        call: SessionCall | None = self
        while call is not None:
            parts += [() if call.number < 0 else (call.answer,), call.added]
            call = call.parent
        return tuple(message for part in reversed(parts) for message in part)

    @property
    def path(self) -> Tokens:
        """The tokens from the root to the end of its completion."""
        parts: list[Any] = []
        call: SessionCall | None = self
        while call is not None:
            parts += [() if call.completion is None else call.completion.token_ids, call.context]
            call = call.parent
        return np.concatenate([np.asarray(part, np.int32) for part in reversed(parts)])

    @property
    def nbytes(self) -> int:
        """What its record takes, at most; while it is being sampled, as a rule."""
        if self.completion is None:
            sampled = _RESERVED_BYTES * self._new
        else:
            sampled = _SAMPLED_BYTES * self._new + _SPAN_BYTES * len(self.completion.spans)
        return _CALL_BYTES + self.message_bytes + _CONTEXT_BYTES * self.context.size + sampled

    @property
    def tokens(self) -> int:
        """What it takes of the episode's tokens."""
        return int(self.context.size) + self._new

    @property
    def _new(self) -> int:
        """The tokens that were sampled, or that may be."""
        if self.completion is not None:
            return len(self.completion.token_ids)
        return 0 if self.reserved is None else self.reserved.max_new_tokens

    def record(self, number_of: Callable[[SessionCall], int]) -> Call:
        """As it is kept, with the number of its parent by `number_of`."""
        assert self.completion is not None
        return Call(
            parent=-1 if self.parent is None else number_of(self.parent),
            context_token_ids=self.context,
            completion_token_ids=np.asarray(self.completion.token_ids, np.int32),
            logprobs=np.asarray(self.completion.logprobs, np.float32),
            spans=self.completion.spans,
            finish_reason=self.completion.finish_reason,
            replica=self.completion.replica,
            trained=self.asked.train,
            messages=self.added,
            answer=self.answer,
            timings=self.timings,
        )


@dataclasses.dataclass(frozen=True)
class SessionSummary:
    """What an episode leaves: its delivered calls, parents first, by their new numbers; the limit of the run that ended it, and whether
    that `refused` a call or only cut the last answer off; the calls that were left out, by reason (`abandoned`: its client had gone and
    nobody came back; `unanswered`: still under way; `failed`)."""

    calls: tuple[Call, ...]
    limit: str | None
    refused: bool
    dropped: Counter[str]

    @property
    def paths(self) -> int:
        """How many of its trained calls no other trained one continues: the rows of a model (`EpisodeTrajectory.paths`)."""
        continued = [False] * len(self.calls)
        paths = 0
        for number in reversed(range(len(self.calls))):  # children before parents
            call = self.calls[number]
            paths += call.trained and not continued[number]
            if call.parent >= 0 and (call.trained or continued[number]):
                continued[call.parent] = True
        return paths


class Session:
    """The session of one episode. `seed` is of the run, the group and the index; `end_tokens` are those that end a turn."""

    def __init__(self, limits: SessionLimits, clocks: Clocks, end_tokens: Sequence[int], seed: str, now: float) -> None:
        self.limits, self.clocks = limits, clocks
        self.calls: list[SessionCall] = []
        self.ended = False
        self.joined = 0  # retries that an earlier call answered
        self.rendered_again = 0  # context tokens of roots behind the first
        self._end_tokens = np.asarray(sorted(set(end_tokens)), np.int32)
        self._seed = seed
        self._begun = now
        self._numbered = 0
        self._by_body: dict[bytes, list[SessionCall]] = {}
        self._by_key: dict[str, SessionCall] = {}
        self._by_conversation: dict[bytes, list[SessionCall]] = {}
        self._owed: Counter[bytes] = Counter()  # requests that were answered by an error, by their bodies
        self._placed_before: Counter[bytes] = Counter()
        self._idle_since: float | None = now
        self._limit: tuple[str, float] | None = (
            None  # the last refusal by a limit, unless another call was placed since
        )
        self._cut_short = False  # the call placed last ended for want of room

    # -- a request -----------------------------------------------------------------------------------------------------------

    def ask(self, asked: CallRequest, now: float) -> tuple[SessionCall, bool]:
        """The call that answers this request, and whether it is new. Raises `Refused`."""
        if self.ended:
            raise Refused("ended", "the episode of this key has ended")
        earlier = self._earlier(asked)
        if earlier is not None:
            earlier.readers += 1
            earlier.joined += 1
            earlier.retry = max(earlier.retry, asked.retry or 0)
            earlier.left_at = None
            self.joined += 1
            self._note_activity(now)
            return earlier, False
        taken = sum(not call.failed for call in self.calls)
        if taken >= self.limits.calls:
            raise self.no_room(now, f"the episode has had its {self.limits.calls} calls (agents.max_rollout_turns)")
        if (failed := len(self.calls) - taken) >= _FAILED_PER_CALL * self.limits.calls:
            many = f"{_FAILED_PER_CALL} times as many as it may have (agents.max_rollout_turns)"
            raise self.no_room(now, f"{failed} calls of the episode have failed, {many}")
        call = SessionCall(dataclasses.replace(asked, prefixes=()), now, asked.prefixes, retry=asked.retry or 0)
        self.calls.append(call)
        self._by_body.setdefault(asked.body, []).append(call)
        if asked.idempotency_key is not None:
            self._by_key[asked.idempotency_key] = call
        self._note_activity(now)
        return call, True

    def _earlier(self, asked: CallRequest) -> SessionCall | None:
        """The call of an earlier try of this request; None if it has none.

        Clients mark every second try, those of requests that never became a call too. A program may have several equal requests under way,
        and each needs a call of its own. So a try joins only a call that no try of its count, or a later one, has come for.
        """
        if asked.idempotency_key is not None:
            known = self._by_key.get(asked.idempotency_key)
            if known is not None and known.asked.body != asked.body:
                raise Refused(
                    "conflict", "this idempotency key was sent with another request; give each request its own"
                )
            if known is not None and not known.failed:
                return known
        same = [call for call in self._by_body.get(asked.body, ()) if _may_share_key(call.asked, asked)]
        for call in same:
            if not call.delivered and call.readers == 0:
                return call
        if asked.retry == 0 or asked.turned_away:
            return None
        if self._owed.get(asked.body):  # an earlier try was answered by an error
            self._owed -= Counter([asked.body])
            return None
        if asked.retry is None:
            return None
        same = [call for call in same if call.retry < asked.retry]
        waiting = [call for call in same if not call.delivered]
        # one whose client is still thought to be there, before an answer that got lost on its way
        return min(waiting, key=lambda call: call.joined) if waiting else same[-1] if same else None

    def candidates(self, call: SessionCall) -> list[SessionCall]:
        """The calls of the longest earlier conversation that this one repeats: those that the program was given first, then the newest.

        Equal conversations may differ in fields that are not compared, as reasoning. Tokens tell which of them the call continues.
        """
        for prefix in reversed(call.prefixes):
            if known := self._by_conversation.get(prefix):
                return sorted(known, key=lambda each: (each.delivered, each.number), reverse=True)
        return []

    def unrendered(self, call: SessionCall, rendered: Sequence[int]) -> SessionCall | None:
        """A candidate whose answer has to be rendered (`note_rendering`) before `place` can tell what the call continues; None if there is
        none. `rendered` is the request."""
        match = self._match(call, np.asarray(rendered, np.int32))
        return match if isinstance(match, SessionCall) else None

    def _match(self, call: SessionCall, asked: Tokens) -> tuple[SessionCall, Tokens] | SessionCall | None:
        """The call that this one continues, and the new context behind it; or the candidate that has to be rendered first."""
        candidates = self.candidates(call)
        for delivered in (True, False):
            group = [each for each in candidates if each.delivered is delivered]
            for each in group:
                if (context := _behind(each.path, asked)) is not None:
                    return each, context
            for each in group:
                if each.rendered_answer is None:
                    return each
                if (context := _behind_answer(each.rendered_answer, asked)) is not None:
                    return each, context
        return None

    def note_rendering(self, call: SessionCall, rendered: Sequence[int]) -> None:
        """Take down how the call's conversation with its answer renders."""
        assert call.completion is not None
        tokens = np.asarray(rendered, np.int32)
        ends = np.flatnonzero(np.isin(tokens, self._end_tokens))
        if ends.size <= call.ends_rendered:  # a template that ends no answer
            rest = tokens.size
        else:
            end = int(ends[-1])
            written = call.completion.token_ids
            rest = end + 1 if written and written[-1] == tokens[end] else end  # the missing end of turn becomes context
        call.rendered_answer = RenderedAnswer(tokens.size, _digest(tokens), rest)

    def place(self, call: SessionCall, rendered: Sequence[int], now: float) -> SamplingTask:
        """Decide what the call continues and what its context is, and reserve room for it. `rendered` is the request; no candidate is
        `unrendered`, except one that got its answer since. Raises `Refused`."""
        if self.ended:
            raise Refused("ended", "the episode of this key has ended")
        asked = np.asarray(rendered, np.int32)
        match = self._match(call, asked)
        parent: SessionCall | None = None
        if isinstance(match, tuple):
            parent, context = match
            prompt = np.concatenate([parent.path, context])
            call.added = call.asked.messages[call.prefixes.index(parent.conversation) :]
        else:
            context = prompt = asked
            call.added = call.asked.messages
        call.parent, call.context = parent, context
        call.message_bytes = _size(call.added)
        # what the calls before it hold already would else be held once for every call
        call.asked, call.prefixes = dataclasses.replace(call.asked, messages=call.added), call.prefixes[-1:]
        call.ends_rendered = int(np.isin(asked, self._end_tokens).sum())
        wanted = min(call.asked.max_tokens or self.limits.new_tokens, self.limits.new_tokens)
        room, limit = self._room(call, prompt.size)
        if room < 1:
            raise self.no_room(now, limit)
        if parent is None and self._placed_before:
            self.rendered_again += prompt.size
        times = self._placed_before[digest := _digest(prompt)]
        self._placed_before[digest] += 1
        call.reserved = SamplingTask(prompt, min(room, wanted), self._seed_of(digest, times))
        call.cut_short = call.reserved.max_new_tokens < (call.asked.max_tokens or math.inf)
        self._limit, self._cut_short = None, False
        return call.reserved

    def _room(self, call: SessionCall, prompt: int) -> tuple[int, str]:
        """How many tokens may be sampled, and what bounds it."""
        limits = self.limits
        others = [each for each in self.calls if each is not call and not each.failed]
        tokens = sum(each.tokens for each in others) + call.context.size
        nbytes = sum(each.nbytes for each in others) + call.nbytes
        return min(
            (
                limits.context - prompt,
                f"the conversation has {prompt} tokens, and the policy's context is {limits.context} "
                "(policy.max_total_sequence_length)",
            ),
            (
                limits.tokens - tokens,
                f"the episode has {tokens} tokens, and may have {limits.tokens} (agents.max_episode_tokens)",
            ),
            (
                (limits.nbytes - nbytes) // _RESERVED_BYTES,
                self._too_many_bytes(nbytes),
            ),
        )

    def _too_many_bytes(self, nbytes: int) -> str:
        return f"the episode's record has {nbytes} bytes, and may have {self.limits.nbytes} (agents.max_episode_bytes)"

    def no_room(self, now: float, message: str) -> Refused:
        """What to raise for a call that a limit of the run leaves no room for."""
        first = now if self._limit is None else self._limit[1]
        self._limit = message, first
        return Refused("limit", message)

    def _seed_of(self, prompt: bytes, times: int) -> int:
        """The same question, asked as often, is sampled with the same random numbers."""
        return int.from_bytes(hashlib.sha256(f"{self._seed} {prompt.hex()} {times}".encode()).digest()[:4], "big")

    # -- its end -------------------------------------------------------------------------------------------------------------

    def sampled(self, call: SessionCall, completion: Sampled) -> None:
        """Take down what was sampled. What the call reserved and did not need is free again."""
        call.completion, call.reserved = completion, None
        self._cut_short = call.cut_short and completion.finish_reason == "length"

    def answered(self, call: SessionCall, answer: Message, now: float) -> None:
        """Number the call and take down its answer, whose tool calls are named after that number. Raises `Refused` if its text is longer
        than what was reserved for it, and there is no room."""
        assert call.completion is not None
        answer = _named(answer, self._numbered)
        call.message_bytes += _size([answer])
        nbytes = sum(each.nbytes for each in self.calls if each is call or each.number >= 0)
        if nbytes > self.limits.nbytes:
            raise self.no_room(now, self._too_many_bytes(nbytes))
        call.number, call.answer = self._numbered, answer
        self._numbered += 1
        call.conversation = conversation.followed_by(call.prefixes[-1], call.answer)
        if not isinstance(
            call.completion.stop_reason, str
        ):  # the path has tokens of the stop string that no conversation has
            self._by_conversation.setdefault(call.conversation, []).append(call)
        self._note_activity(now)

    def failed(self, call: SessionCall, now: float, *, again: bool) -> None:
        """The call has no answer, and takes no room any more, nor memory for its request; whoever waits for it gets an error, after which
        clients ask `again`."""
        call.failed, call.reserved, call.completion = True, None, None
        call.asked = dataclasses.replace(call.asked, messages=(), tools=(), stop=())
        call.added, call.prefixes, call.context = (), (), call.context[:0].copy()
        same = self._by_body[call.asked.body]
        same.remove(call)
        if not same:
            del self._by_body[call.asked.body]
        if again:
            self._owed[call.asked.body] += call.readers
        self._note_activity(now)

    def delivered(self, call: SessionCall) -> None:
        """A client has the answer."""
        call.readers -= 1
        call.delivered = True

    def left(self, call: SessionCall, now: float) -> None:
        """A client has gone before it had the answer."""
        call.readers -= 1
        if call.readers == 0 and not call.delivered:
            call.left_at = now

    # -- clocks --------------------------------------------------------------------------------------------------------------

    def hung(self, now: float) -> str | None:
        """Which of the episode's clocks has run out, in words; None if none has."""
        clocks = self.clocks
        if now - self._begun >= clocks.episode_s:
            return f"the episode took longer than {clocks.episode_s:g} s (agents.episode_s)"
        if self._limit is not None and now - self._limit[1] >= clocks.finish_s:
            return f"the program went on for {clocks.finish_s:g} s (agents.finish_s) after: {self._limit[0]}"
        if self._idle_since is not None and now - self._idle_since >= clocks.think_s:
            return f"the program made no call for {clocks.think_s:g} s (agents.think_s)"
        return None

    def overdue(self, now: float) -> Iterator[tuple[SessionCall, str]]:
        """The calls that are to be given up, and why."""
        for call in self.calls:
            if not call.running:
                continue
            if now - call.begun >= self.clocks.call_s:
                yield call, f"no answer within {self.clocks.call_s:g} s (agents.call_s)"
            elif call.left_at is not None and now - call.left_at >= self.clocks.retry_grace_s:
                yield call, f"its client has gone, and did not come back within {self.clocks.retry_grace_s:g} s"

    def _note_activity(self, now: float) -> None:
        """The program thinks while none of its calls is under way."""
        self._idle_since = None if any(call.running for call in self.calls) else now

    # -- the end -------------------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> str | None:
        """The limit of the run that stopped the program, if that is the last thing that it was told; else None."""
        if self._limit is not None:
            return self._limit[0]
        return "the last answer was cut off at a limit of the run" if self._cut_short else None

    def end(self) -> SessionSummary:
        """End the session: every later request is refused. Of its calls, those are kept that the program was given."""
        self.ended = True
        kept: set[SessionCall] = set()
        for call in self.calls:
            if call.number >= 0 and call.delivered:
                ancestor: SessionCall | None = call  # whoever goes on from an answer has had it
                while ancestor is not None and ancestor not in kept:
                    kept.add(ancestor)
                    ancestor = ancestor.parent
        ordered = sorted(kept, key=lambda call: call.number)
        numbers = {call: number for number, call in enumerate(ordered)}
        dropped = Counter(_why_dropped(call) for call in self.calls if call not in kept)
        records = tuple(call.record(numbers.__getitem__) for call in ordered)
        return SessionSummary(records, self.limit, self._limit is not None, dropped)


def _may_share_key(one: CallRequest, other: CallRequest) -> bool:
    """Whether their idempotency keys allow that they are tries of one request."""
    return one.idempotency_key is None or other.idempotency_key in (None, one.idempotency_key)


def _why_dropped(call: SessionCall) -> str:
    if call.failed:
        return "failed"
    return "abandoned" if call.readers == 0 else "unanswered"


def _behind(path: Tokens, asked: Tokens) -> Tokens | None:
    """What of the rendered request is behind the path; None if it does not begin with it, or has no more."""
    if asked.size <= path.size or not np.array_equal(asked[: path.size], path):
        return None
    return asked[path.size :].copy()  # a view would keep the whole request


def _behind_answer(answer: RenderedAnswer, asked: Tokens) -> Tokens | None:
    """What of the rendered request is behind the rendered answer; None if it does not begin with it, or has no more."""
    if asked.size <= answer.length or _digest(asked[: answer.length]) != answer.digest:
        return None
    return asked[answer.rest :].copy()


def _named(answer: Message, number: int) -> Message:
    """The answer with ids of its tool calls that come from the call's number: nine digits, which every template takes."""
    calls = answer.get("tool_calls")
    if not calls:
        return answer
    return {**answer, "tool_calls": [{**each, "id": f"{number:06d}{place:03d}"} for place, each in enumerate(calls)]}


def _digest(tokens: Tokens) -> bytes:
    return hashlib.sha256(tokens.tobytes()).digest()


def _size(messages: Sequence[Message]) -> int:
    return len(msgspec.msgpack.encode(messages))
