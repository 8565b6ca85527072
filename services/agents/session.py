"""The session of one episode: which call a request continues, what the policy samples, and what is trained.

A pure state machine: no I/O, no tokenizer, and no clock (`now` is the run's time, which stands still while nothing can be sampled). The
caller (`running_episode.OpenEpisode`) renders and samples.

The steps of a call: `ask` (or the request joins an earlier call), `place` (its context is known and its room reserved), `note_sampling`,
`note_answer` (it has a number and an answer, which may leave once its record is kept), `note_delivery`. It may fail at any step. Three
token sequences decide the context of a call that continues another:

    path             what the policy saw and wrote up to the end of the earlier call, as recorded
    rendered answer  the earlier call's conversation with its answer, rendered (R)
    asked            the request, rendered (F)

If `asked` begins with `path`, the rest of it is the new context, and R is not needed. If it begins with R, the program kept the
conversation too, but the policy wrote its answer in other tokens than a tokenizer would; the new context is the part of `asked` behind the
answer's end of turn. Otherwise (a template that strips reasoning, a compacted history, an edited answer) the request is a new root. So
no trained token is ever tokenized again.
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

from headrace.base.errors import HeadraceError
from headrace.net.replica_client import Sampled
from headrace.records.trajectory import Call, Message, find_path_ends

from . import conversation

Tokens = npt.NDArray[np.int32]
# The most that a record takes besides its tokens, spans and messages: names, numbers, times.
_CALL_BYTES = 1024
# A context token; a sampled token with its log-probability and mask; a span of sampled tokens.
_CONTEXT_BYTES, _SAMPLED_BYTES, _SPAN_BYTES = 4, 9, 32
# A token that is yet to be sampled, with text of the usual length; `note_answer` checks the actual length.
_RESERVED_BYTES = 16
# An episode may have this many failed calls for each call that it may have.
_FAILED_PER_CALL = 8

Refusal = Literal["limit", "ended", "conflict"]


class Refused(HeadraceError):
    """Raised for a request that is not sampled. `limit`: the episode has no room for it; `ended`: the episode is over; `conflict`: another
    request used its idempotency key."""

    def __init__(self, kind: Refusal, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class SessionLimits:
    """The limits of an episode: its calls, its tokens (contexts and completions), and the bytes of its record. A path has at most `context`
    tokens, a completion `new_tokens`."""

    calls: int
    tokens: int
    nbytes: int
    context: int
    new_tokens: int


@dataclasses.dataclass(frozen=True)
class Clocks:
    """Time limits in seconds: of one call, between calls, of the episode, and for the program to end after a limit; and how long a call
    continues after its client has gone."""

    call_s: float
    think_s: float
    episode_s: float
    finish_s: float
    retry_grace_s: float


@dataclasses.dataclass(frozen=True)
class CallRequest:
    """A request, as the state machine sees it. `train` is False if the request opts out of training. `body` is a digest of its bytes and of
    `train`. `retry` is how often the client has sent it before (None: it does not count). `turned_away`: an earlier try was refused before
    it became a call."""

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
    """What to sample: at most `max_new_tokens` behind these tokens (the path and the new context), with this seed."""

    token_ids: Tokens
    max_new_tokens: int
    seed: int


@dataclasses.dataclass(frozen=True)
class RenderedAnswer:
    """The rendered conversation of a call with its answer: its length, its digest, and where the new part of a longer rendering starts."""

    length: int
    digest: bytes
    rest: int


@dataclasses.dataclass(eq=False)
class SessionCall:
    """One request to the policy. `number` counts the answered calls in the order of their answers; -1 before the answer."""

    asked: CallRequest
    begun: float
    prefixes: tuple[bytes, ...]  # the request's digests that are still needed
    readers: int = 1  # requests that wait for its answer
    number: int = -1
    parent: SessionCall | None = None
    added: tuple[Message, ...] = ()  # the messages that it adds to the conversation that it continues
    message_bytes: int = 0  # the size of its messages
    context: Tokens = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    reserved: SamplingTask | None = None
    cut_short: bool = False  # the run allows fewer tokens than it asked for
    ends_rendered: int = 0  # end tokens in the rendering of the request
    completion: Sampled | None = None
    answer: Message = dataclasses.field(default_factory=dict)
    conversation: bytes = b""  # the digest of its conversation with its answer
    rendered_answer: RenderedAnswer | None = None
    delivered: bool = False
    failed: bool = False
    left_at: float | None = None  # when its last client left
    joined: int = 0
    retry: int = 0  # the highest `retry` of the requests that it answers
    timings: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def running(self) -> bool:
        return self.number < 0 and not self.failed

    @property
    def history(self) -> tuple[Message, ...]:
        """Its conversation with all answers as they were given. Its own answer is the last message."""
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
        """The most that its record takes. An estimate while the call is being sampled."""
        if self.completion is None:
            sampled = _RESERVED_BYTES * self._new
        else:
            sampled = _SAMPLED_BYTES * self._new + _SPAN_BYTES * len(self.completion.spans)
        return _CALL_BYTES + self.message_bytes + _CONTEXT_BYTES * self.context.size + sampled

    @property
    def tokens(self) -> int:
        """How many of the episode's tokens it takes."""
        return int(self.context.size) + self._new

    @property
    def _new(self) -> int:
        """How many tokens were sampled, or may still be."""
        if self.completion is not None:
            return len(self.completion.token_ids)
        return 0 if self.reserved is None else self.reserved.max_new_tokens

    def record(self, number_of: Callable[[SessionCall], int]) -> Call:
        """Return the record to keep. `number_of` gives the number of the parent."""
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
    """What an episode leaves behind. `calls` are the delivered calls with their new numbers, parents first. `limit` is the limit of the run
    that ended it, which `refused` a call or only cut off the last answer. `dropped` counts the other calls by reason: `abandoned` (the
    client left and did not come back), `unanswered` (still running), `failed`."""

    calls: tuple[Call, ...]
    limit: str | None
    refused: bool
    dropped: Counter[str]

    @property
    def paths(self) -> int:
        """How many paths they have: the rows of a model."""
        return len(find_path_ends(self.calls))


class Session:
    """The session of one episode. `seed` names the run, the group and the index; `end_tokens` end a turn."""

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
        self._owed: Counter[bytes] = Counter()  # requests that got an error, by body
        self._placed_before: Counter[bytes] = Counter()
        self._idle_since: float | None = now
        # the last refusal by a limit, unless another call was placed since
        self._limit: tuple[str, float] | None = None
        self._cut_short = False  # the call placed last ended for lack of room

    # -- a request -----------------------------------------------------------------------------------------------------------

    def ask(self, asked: CallRequest, now: float) -> tuple[SessionCall, bool]:
        """Return the call that answers this request, and whether it is new. Raises `Refused`."""
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
            raise self.no_room(now, f"the episode has used its {self.limits.calls} calls (agents.max_rollout_turns)")
        if (failed := len(self.calls) - taken) >= _FAILED_PER_CALL * self.limits.calls:
            many = f"{_FAILED_PER_CALL} times the number of calls that it may have (agents.max_rollout_turns)"
            raise self.no_room(now, f"{failed} calls of the episode have failed, {many}")
        call = SessionCall(dataclasses.replace(asked, prefixes=()), now, asked.prefixes, retry=asked.retry or 0)
        self.calls.append(call)
        self._by_body.setdefault(asked.body, []).append(call)
        if asked.idempotency_key is not None:
            self._by_key[asked.idempotency_key] = call
        self._note_activity(now)
        return call, True

    def _earlier(self, asked: CallRequest) -> SessionCall | None:
        """Return the call of an earlier try of this request, or None: the call of its idempotency key, one whose clients have all left, or
        one that a client asks for again, as its count of tries says.

        Clients mark every second try, even if the first one never became a call. A program may also have several equal requests under way,
        and each needs its own call. So a retry joins a call only if no retry with the same or a higher count has come for that call.
        """
        key = asked.idempotency_key
        known = None if key is None else self._by_key.get(key)
        if known is not None and known.asked.body != asked.body:
            raise Refused("conflict", "another request used this idempotency key; give each request its own key")
        if known is not None and not known.failed:
            return known
        # no call that another key names
        same = [call for call in self._by_body.get(asked.body, ()) if None in (key, call.asked.idempotency_key)]
        left = next((call for call in same if not call.delivered and call.readers == 0), None)
        if left is not None or asked.retry == 0 or asked.turned_away:
            return left
        if self._owed[asked.body]:  # an earlier try got an error
            self._owed -= Counter([asked.body])
            return None
        tried = [call for call in same if call.retry < (asked.retry or 0)]
        waiting = [call for call in tried if not call.delivered]
        # a call whose client seems to be connected still, before an answer that got lost on its way
        return min(waiting, key=lambda call: call.joined) if waiting else next(reversed(tried), None)

    def candidates(self, call: SessionCall) -> list[SessionCall]:
        """Return the calls of the longest earlier conversation that this one repeats, delivered calls first, then by age, newest first.

        Equal conversations may differ in fields that are not compared, such as reasoning. Tokens decide which of them the call continues.
        """
        for prefix in reversed(call.prefixes):
            if known := self._by_conversation.get(prefix):
                return sorted(known, key=lambda each: (each.delivered, each.number), reverse=True)
        return []

    def find_unrendered(self, call: SessionCall, rendered: Sequence[int]) -> SessionCall | None:
        """Return a candidate whose answer must be rendered (`note_rendering`) before `place` can decide, or None. `rendered` is the
        request."""
        match = self._match(call, np.asarray(rendered, np.int32))
        return match if isinstance(match, SessionCall) else None

    def _match(self, call: SessionCall, asked: Tokens) -> tuple[SessionCall, Tokens] | SessionCall | None:
        """Return the call that this one continues with the new context, or a candidate that must be rendered first, or None."""
        candidates = self.candidates(call)
        for delivered in (True, False):
            group = [each for each in candidates if each.delivered is delivered]
            found = [(each, rest) for each in group if (rest := _behind(each.path, asked)) is not None]
            if found:  # an answer that was cut off may be the beginning of another
                return min(found, key=lambda match: match[1].size)
            for each in group:
                if each.rendered_answer is None:
                    return each
                if (context := _behind_answer(each.rendered_answer, asked)) is not None:
                    return each, context
        return None

    def note_rendering(self, call: SessionCall, rendered: Sequence[int]) -> None:
        """Record how the call's conversation with its answer renders."""
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
        """Decide which call this one continues and what its context is, and reserve room for it. `rendered` is the request. Call it once
        `find_unrendered` returns None. Raises `Refused`."""
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
        # the calls before it hold the other messages; otherwise each call would hold all of them
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
        call.reserved = SamplingTask(prompt, min(room, wanted), self._derive_seed(digest, times))
        call.cut_short = call.reserved.max_new_tokens < (call.asked.max_tokens or math.inf)
        self._limit, self._cut_short = None, False
        return call.reserved

    def _room(self, call: SessionCall, prompt: int) -> tuple[int, str]:
        """Return how many tokens may be sampled, and the message about the limit that decides it."""
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
            ((limits.nbytes - nbytes) // _RESERVED_BYTES, self._too_many_bytes(nbytes)),
        )

    def _too_many_bytes(self, nbytes: int) -> str:
        return f"the episode's record has {nbytes} bytes, and may have {self.limits.nbytes} (agents.max_episode_bytes)"

    def no_room(self, now: float, message: str) -> Refused:
        """Return the error for a call that a limit of the run leaves no room for."""
        first = now if self._limit is None else self._limit[1]
        self._limit = message, first
        return Refused("limit", message)

    def _derive_seed(self, prompt: bytes, times: int) -> int:
        """Return the seed, which depends on the prompt and on how often it was asked before."""
        return int.from_bytes(hashlib.sha256(f"{self._seed} {prompt.hex()} {times}".encode()).digest()[:4], "big")

    # -- its end -------------------------------------------------------------------------------------------------------------

    def note_sampling(self, call: SessionCall, completion: Sampled) -> None:
        """Record the sampled completion and free the room that the call did not need."""
        call.completion, call.reserved = completion, None
        self._cut_short = call.cut_short and completion.finish_reason == "length"

    def note_answer(self, call: SessionCall, answer: Message, now: float) -> None:
        """Number the call and record its answer. Its tool calls are named after the number. Raises `Refused` if its text is longer than
        reserved and there is no room."""
        assert call.completion is not None
        answer = _name_calls(answer, self._numbered)
        call.message_bytes += _size([answer])
        nbytes = sum(each.nbytes for each in self.calls if each is call or each.number >= 0)
        if nbytes > self.limits.nbytes:
            raise self.no_room(now, self._too_many_bytes(nbytes))
        call.number, call.answer = self._numbered, answer
        self._numbered += 1
        call.conversation = conversation.followed_by(call.prefixes[-1], call.answer)
        # otherwise the path has tokens of the stop string, which no conversation has
        if not isinstance(call.completion.stop_reason, str):
            self._by_conversation.setdefault(call.conversation, []).append(call)
        self._note_activity(now)

    def note_failure(self, call: SessionCall, now: float, *, again: bool) -> None:
        """Record that the call has no answer, and free its room and its request. Waiting clients get an error, and then may ask `again`."""
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

    def note_delivery(self, call: SessionCall) -> None:
        """Record that a client has the answer."""
        call.readers -= 1
        call.delivered = True

    def note_departure(self, call: SessionCall, now: float) -> None:
        """Record that a client left before it had the answer."""
        call.readers -= 1
        if call.readers == 0 and not call.delivered:
            call.left_at = now

    # -- clocks --------------------------------------------------------------------------------------------------------------

    def hung(self, now: float) -> str | None:
        """Return which clock of the episode has run out, as a message, or None."""
        clocks = self.clocks
        if now - self._begun >= clocks.episode_s:
            return f"the episode took longer than {clocks.episode_s:g} s (agents.episode_s)"
        if self._limit is not None and now - self._limit[1] >= clocks.finish_s:
            return f"the program did not end within {clocks.finish_s:g} s (agents.finish_s) after: {self._limit[0]}"
        if self._idle_since is not None and now - self._idle_since >= clocks.think_s:
            return f"the program made no call for {clocks.think_s:g} s (agents.think_s)"
        return None

    def overdue(self, now: float) -> Iterator[tuple[SessionCall, str]]:
        """Yield the calls to give up, and why."""
        for call in self.calls:
            if not call.running:
                continue
            if now - call.begun >= self.clocks.call_s:
                yield call, f"no answer within {self.clocks.call_s:g} s (agents.call_s)"
            elif call.left_at is not None and now - call.left_at >= self.clocks.retry_grace_s:
                yield (
                    call,
                    f"its client left and did not come back within {self.clocks.retry_grace_s:g} s (agents.retry_grace_s)",
                )

    def _note_activity(self, now: float) -> None:
        """Start or stop the clock between calls. It runs while no call does."""
        self._idle_since = None if any(call.running for call in self.calls) else now

    # -- the end -------------------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> str | None:
        """The limit of the run that stopped the program, if it was the last answer to the program; else None."""
        if self._limit is not None:
            return self._limit[0]
        return "a limit of the run cut off the last answer" if self._cut_short else None

    def end(self) -> SessionSummary:
        """End the session. Later requests are refused. Only delivered calls are kept."""
        self.ended = True
        kept: set[SessionCall] = set()
        for call in self.calls:
            if call.number >= 0 and call.delivered:
                ancestor: SessionCall | None = call  # a program that continues from an answer has received it
                while ancestor is not None and ancestor not in kept:
                    kept.add(ancestor)
                    ancestor = ancestor.parent
        ordered = sorted(kept, key=lambda call: call.number)
        numbers = {call: number for number, call in enumerate(ordered)}
        dropped = Counter(_why_dropped(call) for call in self.calls if call not in kept)
        records = tuple(call.record(numbers.__getitem__) for call in ordered)
        return SessionSummary(records, self.limit, self._limit is not None, dropped)


def _why_dropped(call: SessionCall) -> str:
    if call.failed:
        return "failed"
    return "abandoned" if call.readers == 0 else "unanswered"


def _behind(path: Tokens, asked: Tokens) -> Tokens | None:
    """Return the part of the rendered request behind the path, or None if it does not begin with the path or ends there."""
    if asked.size <= path.size or not np.array_equal(asked[: path.size], path):
        return None
    return asked[path.size :].copy()  # a view would keep the whole request in memory


def _behind_answer(answer: RenderedAnswer, asked: Tokens) -> Tokens | None:
    """Return the part of the rendered request behind the rendered answer, or None if it does not begin with it or ends there."""
    if asked.size <= answer.length or _digest(asked[: answer.length]) != answer.digest:
        return None
    return asked[answer.rest :].copy()


def _name_calls(answer: Message, number: int) -> Message:
    """Return the answer with tool-call ids made from the call's number: nine digits, which every template accepts."""
    calls = answer.get("tool_calls")
    if not calls:
        return answer
    return {**answer, "tool_calls": [{**each, "id": f"{number:06d}{place:03d}"} for place, each in enumerate(calls)]}


def _digest(tokens: Tokens) -> bytes:
    return hashlib.sha256(tokens.tobytes()).digest()


def _size(messages: Sequence[Message]) -> int:
    return len(msgspec.msgpack.encode(messages))
