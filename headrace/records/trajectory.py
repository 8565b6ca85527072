"""Groups and trajectories: the records that travel through the buffer (see `codec` for how they are written)."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from headrace.base.deferred import np
from headrace.base.errors import CodecError
from headrace.records.codec import Codec, Float32, Int32, UInt8, pack, read_schema

if TYPE_CHECKING:
    import numpy.typing as npt

    Int = npt.NDArray[np.intp]

Natural = Annotated[int, msgspec.Meta(ge=0)]
Lane = Literal["train", "validation"]
FinishReason = Literal["stop", "length"]
Message = dict[str, Any]


class Span(NamedTuple):
    """A range of completion tokens `[start, end)` that were sampled from the weights of `version`."""

    version: int
    start: int
    end: int


class Sampling(msgspec.Struct, frozen=True):
    """The sampling parameters of a group's completions. `temperature` 0 is greedy; `seed` makes trajectory i use `seed + i`.

    `top_k` (None: all) keeps the largest probabilities at that temperature, and `top_p` the fewest of those that sum to at least it.
    `bad_words` are excluded before that.
    """

    temperature: float
    max_new_tokens: Natural
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    top_k: int | None = None
    top_p: float = 1.0
    bad_words: tuple[str, ...] = ()


class Group(msgspec.Struct, frozen=True, tag_field="schema", tag=1):
    """One prompt and its `n` trajectories: the unit of work, of age and of loss.

    `id` comes from (epoch, data set, index), so that enqueuing it again changes nothing. `order` is its place in the order of prompts, a
    function of seed and configuration (law 5). `extra_env_info` is opaque to all but the environment, and must consist of JSON types.
    """

    id: str
    lane: Lane
    order: Natural
    task_name: str
    env_name: str
    messages: tuple[Message, ...]
    prompt_token_ids: Int32
    extra_env_info: dict[str, Any]
    dataset_index: Natural
    n: Natural
    sampling: Sampling
    loss_multiplier: float = 1.0

    def encode(self) -> bytes:
        """Encode the group. Raises `CodecError` for values that msgpack can't carry."""
        return _GROUP.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Group:
        """Decode a group. Raises `CodecError` for bytes that are not a group."""
        group = _GROUP.decode(data)
        group.check()
        return group

    def check(self) -> None:
        """Raise `CodecError` unless the group can be generated and trained."""
        if self.n < 1:
            raise CodecError(f"group {self.id!r}: n is {self.n}; a group has at least one trajectory")
        if self.prompt_token_ids.size == 0:
            raise CodecError(f"group {self.id!r}: the prompt has no tokens")
        sampling = self.sampling
        numbers = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "loss_multiplier": self.loss_multiplier,
        }
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise CodecError(f"group {self.id!r}: {name} is {number}, not a finite number")


class Trajectory(msgspec.Struct, frozen=True, tag_field="schema", tag=1):
    """One completion as it was sampled: token in, token out, never re-tokenized.

    Shapes: `prompt_token_ids` [S] int32; `completion_token_ids` [T] int32; `logprobs` [T] float32, the natural logarithm of the probability
    with which each token was sampled (after temperature); `loss_mask` [T] uint8, 0 on tokens that the environment wrote. `spans` cover [0,
    T) in order, without gaps. `turns` are `(start, end)` of each turn that the policy wrote. `timings` are seconds.

    `replica` finished it. `writers` are `(replica, start, end)` of the tokens that each replica sampled, in order, without gaps; empty if
    one replica sampled all. An unfinished trajectory, saved for another replica to continue, has the finish reason "length".
    """

    group_id: str
    attempt: Natural
    index: Natural
    prompt_token_ids: Int32
    completion_token_ids: Int32
    logprobs: Float32
    loss_mask: UInt8
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    text: str
    replica: str
    turns: tuple[tuple[int, int], ...] = ()
    timings: dict[str, float] = {}
    writers: tuple[tuple[str, int, int], ...] = ()

    @property
    def written(self) -> tuple[tuple[str, int, int], ...]:
        """The `writers`, filled in if one replica sampled all tokens."""
        return self.writers or ((self.replica, 0, self.completion_token_ids.size),)

    @property
    def oldest_version(self) -> int:
        """The version of the oldest token, from which age is counted (law 2)."""
        return min(self.spans).version  # spans compare by version first

    @property
    def newest_version(self) -> int:
        return max(self.spans).version

    @property
    def length(self) -> int:
        """The number of tokens that the policy wrote."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def truncated(self) -> bool:
        """Whether a limit of the run ended it."""
        return self.finish_reason == "length"

    @property
    def places(self) -> Int:
        """The places of the policy's tokens in the completion, [length]."""
        return np.flatnonzero(self.loss_mask)

    def paths(self) -> tuple[Trajectory]:
        """Return itself as the only path; see `EpisodeTrajectory.paths`."""
        return (self,)

    def flat(self) -> Trajectory:
        """Return itself; see `EpisodeTrajectory.flat`."""
        return self

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays: nearly all of its encoded size."""
        arrays = self.prompt_token_ids, self.completion_token_ids, self.logprobs, self.loss_mask
        return sum(array.nbytes for array in arrays)

    def encode(self) -> bytes:
        """Encode the trajectory. Raises `CodecError` for values that msgpack can't carry."""
        return _TRAJECTORY.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Trajectory:
        """Decode a trajectory. Raises `CodecError` for bytes that are not a trajectory, or whose arrays disagree."""
        trajectory = _TRAJECTORY.decode(data)
        trajectory.check()
        return trajectory

    def check(self) -> None:
        """Raise `CodecError` unless arrays, spans and turns agree with each other."""
        problem = self._problem(self.completion_token_ids.size)
        if problem is not None:
            raise CodecError(f"trajectory {self.group_id!r}[{self.index}]: {problem}")

    def _problem(self, length: int) -> str | None:
        logprobs, mask = self.logprobs, self.loss_mask
        if length == 0:
            return "the completion has no tokens"
        for name, array in (("logprobs", logprobs), ("loss_mask", mask)):
            if array.size != length:
                return f"{name} has {array.size} entries for {length} tokens"
        if not _are_logprobs(logprobs):
            return "a log-probability is not finite or above 0"
        if np.maximum.reduce(mask) > 1:
            return "loss_mask has values other than 0 and 1"
        problem = _problem_of_spans(self.spans, length)
        if problem is not None:
            return problem
        for start, end in self.turns:
            if not 0 <= start < end <= length:
                return f"turns {self.turns} do not lie in [0, {length})"
        if not all(map(math.isfinite, self.timings.values())):
            return f"timings {self.timings} are not finite numbers"
        return self._problem_of_writers(length) if self.writers else None

    def _problem_of_writers(self, length: int) -> str | None:
        edge = 0
        for _, start, end in self.writers:
            if start != edge or end <= start:
                return f"writers {self.writers} do not cover [0, {length}) in order"
            edge = end
        return None if edge == length else f"writers end at {edge}, the completion at {length}"


def _are_logprobs(logprobs: Float32) -> bool:
    # the methods of arrays take twice as long for a short one; nan fails both comparisons
    return bool(np.maximum.reduce(logprobs) <= 0 and np.minimum.reduce(logprobs) > -math.inf)


def _problem_of_spans(spans: Sequence[Span], length: int) -> str | None:
    edge = 0
    for version, start, end in spans:
        if start != edge or end <= start or version < 0:
            return f"spans {spans} do not cover [0, {length}) in order"
        edge = end
    return None if edge == length else f"spans end at {edge}, the completion at {length}"


class Call(msgspec.Struct, frozen=True, tag_field="schema", tag=1):
    """One request to the policy in an episode, as it was sampled.

    `parent` is the number of the call that it continues, -1 at a root. `context_token_ids` [C] int32 are the tokens that the policy did not
    write here and that follow the parent's completion: at a root the prompt, later observations and results of tools.
    `completion_token_ids` [T] int32, `logprobs` [T] float32 and `spans` are as in a `Trajectory`. `replica` sampled the call. A call that
    is not `trained` is context for those that follow.

    For people: `messages` are those that the request added to its parent's conversation (at a root all of them), and `answer` is the
    assistant's message as the program got it. `timings` are seconds.
    """

    parent: int
    context_token_ids: Int32
    completion_token_ids: Int32
    logprobs: Float32
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    replica: str
    trained: bool = True
    messages: tuple[Message, ...] = ()
    answer: Message = {}
    timings: dict[str, float] = {}

    @property
    def text(self) -> str:
        """The text of the answer."""
        return write_message(self.answer)

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays and messages: nearly all of its encoded size."""
        arrays = self.context_token_ids, self.completion_token_ids, self.logprobs
        return sum(array.nbytes for array in arrays) + len(msgspec.msgpack.encode((self.messages, self.answer)))

    def encode(self) -> bytes:
        """Encode the call. Raises `CodecError` for values that msgpack can't carry."""
        return _CALL.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Call:
        """Decode a call. Raises `CodecError` for bytes that are not a call, or whose fields disagree."""
        call = _CALL.decode(data)
        problem = call.problem()
        if problem is not None:
            raise CodecError(f"call: {problem}")
        return call

    def problem(self) -> str | None:
        """Return why the call can't be part of an episode, or None. The episode checks that the parent comes before it."""
        context, completion, length = self.context_token_ids, self.completion_token_ids, self.completion_token_ids.size
        if length == 0:
            return "the completion has no tokens"
        if self.parent == -1 and context.size == 0:
            return "a root has no context: no token precedes its completion"
        if self.logprobs.size != length:
            return f"logprobs has {self.logprobs.size} entries for {length} tokens"
        if not _are_logprobs(self.logprobs):
            return "a log-probability is not finite or above 0"
        for name, ids in (("context", context), ("completion", completion)):
            if ids.size and np.minimum.reduce(ids) < 0:
                return f"its {name} has the token id {np.minimum.reduce(ids)}"
        if not all(map(math.isfinite, self.timings.values())):
            return f"timings {self.timings} are not finite numbers"
        if not all(_is_json(message) for message in (*self.messages, self.answer)):
            return f"a message is not made of JSON types, at most {JSON_DEPTH} deep"
        return _problem_of_spans(self.spans, length)


def write_message(message: Message) -> str:
    """Return a message as text: its content, then its tool calls."""
    content, tools = message.get("content"), message.get("tool_calls")
    parts = [part for part in (content, *(tools if isinstance(tools, list) else (tools,))) if part]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)


def apply_template(apply: Callable[..., Any], messages: Iterable[Message], **options: Any) -> Any:
    """Call a tokenizer's `apply_chat_template` with messages as vLLM shows those of an agent.

    Data and clients have the arguments of a tool call as JSON. Most templates expect a value, and would write JSON as a text in quotes.
    """
    messages = list(messages)
    try:
        return apply([_as_templates_take_it(message) for message in messages], **options)
    except TypeError:  # templates of DeepSeek take them as JSON
        return apply(messages, **options)


def _as_templates_take_it(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    if not calls:  # some templates ask only whether there is a list
        return {name: value for name, value in message.items() if name != "tool_calls"}
    return {**message, "tool_calls": [_with_arguments(call) for call in calls]}


def _with_arguments(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(text)} as function}:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(arguments := json.loads(text), dict):
                    return {**call, "function": {**function, "arguments": arguments}}
    return call


# The deepest nesting of messages and artifacts in an episode: programs write them, and every reader must be able to write them as JSON.
JSON_DEPTH = 64


def artifacts_bytes(artifacts: dict[str, Any]) -> int:
    """Return the size of artifacts in a record. Raises `CodecError` if a record can't hold them."""
    return len(pack(artifacts, "artifacts"))


def _is_json(value: Any, depth: int = 0) -> bool:
    match value:
        case None | bool() | int() | str():
            return True
        case float():
            return math.isfinite(value)
        case list() | tuple() if depth < JSON_DEPTH:
            return all(_is_json(item, depth + 1) for item in value)
        case dict() if depth < JSON_DEPTH:
            return all(isinstance(key, str) and _is_json(item, depth + 1) for key, item in value.items())
    return False


def find_path_ends(calls: Sequence[Call]) -> list[int]:
    """Return the trained calls that no other trained call continues: each ends a path (`EpisodeTrajectory.paths`)."""
    ends, continued = [], [False] * len(calls)
    for number in reversed(range(len(calls))):  # children before parents
        call = calls[number]
        if call.trained and not continued[number]:
            ends.append(number)
        if call.parent >= 0 and (call.trained or continued[number]):
            continued[call.parent] = True
    return ends[::-1]


class EpisodeTrajectory(msgspec.Struct, frozen=True, tag_field="schema", tag=2, omit_defaults=True):
    """The record of an episode of several calls, or with artifacts: a tree of calls, parents before children.

    They are the calls whose answers the program got, and with which it ended. `truncated`: a limit of the run ended the episode. `runner`
    ran it; `timings` are seconds. `artifacts` is what the program left for people and graders; training does not read it. The record of
    an episode without artifacts has no such field, so that it is the same as before the field existed.
    """

    group_id: str
    attempt: Natural
    index: Natural
    calls: tuple[Call, ...]
    truncated: bool
    runner: str
    timings: dict[str, float] = msgspec.field(default_factory=lambda: {})  # omit_defaults leaves out an empty `{}`
    artifacts: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """The text of its last answer."""
        return self.calls[-1].text

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages on the path from the root to its last call, that call's answer included."""
        last = len(self.calls) - 1
        path = [self.calls[number] for number in (*sorted(self._before(last)), last)]
        return tuple(message for call in path for message in (*call.messages, call.answer))

    @property
    def length(self) -> int:
        """The number of tokens that the policy wrote and that are trained."""
        return sum(call.completion_token_ids.size for call in self._trained)

    @property
    def oldest_version(self) -> int:
        """The version of the oldest trained token, from which age is counted (law 2)."""
        return min(span for call in self._trained for span in call.spans).version

    @property
    def newest_version(self) -> int:
        return max(span for call in self._trained for span in call.spans).version

    @property
    def nbytes(self) -> int:
        """The bytes of its calls and artifacts: nearly all of its encoded size."""
        return sum(call.nbytes for call in self.calls) + artifacts_bytes(self.artifacts)

    @property
    def _trained(self) -> list[Call]:
        return [call for call in self.calls if call.trained]

    def paths(self) -> tuple[Trajectory, ...]:
        """Return its rows for a model: one for each trained call that no other trained call continues, in order, each starting at its
        root.

        The prompt of a path is the root's context; its completion is everything that follows. `loss_mask` is 1 on the trained tokens that
        no earlier path has, so that each token counts once, in the context in which it was sampled. `logprobs` are 0 elsewhere. The
        versions and writers of a context are those of the completion after it.
        """
        return tuple(self._row(chain, own, with_context=True) for chain, own in self._chains())

    def flat(self) -> Trajectory:
        """Return the completions of its calls, one after the other, as if they were one completion. This is for people and lineage; it is
        not a row for a model. `loss_mask` is 1 on the trained ones, and `turns` are their ranges."""
        everything = range(len(self.calls))
        own = {number for number in everything if self.calls[number].trained}
        return self._row(everything, own, with_context=False)

    @property
    def places(self) -> Int:
        """The places of the trained tokens in the completion of `flat`, in the order of `paths`, [length]."""
        ends = np.cumsum([call.completion_token_ids.size for call in self.calls])
        order = [number for chain, own in self._chains() for number in chain if number in own]
        return np.concatenate(
            [np.arange(ends[i] - self.calls[i].completion_token_ids.size, ends[i]) for i in order], dtype=np.intp
        )

    def _chains(self) -> Iterator[tuple[Sequence[int], set[int]]]:
        """Yield the calls of each path, from its root on, and those of them that the path trains."""
        left = {number for number, call in enumerate(self.calls) if call.trained}
        for leaf in find_path_ends(self.calls):
            chain = [*sorted(self._before(leaf)), leaf]
            own = left.intersection(chain)
            left -= own
            yield chain, own

    def _before(self, number: int) -> Iterator[int]:
        """Yield the calls that this one continues, its parent first."""
        while (number := self.calls[number].parent) >= 0:
            yield number

    def _row(self, numbers: Sequence[int], own: set[int], *, with_context: bool) -> Trajectory:
        """Return the completions of these calls as one trajectory, and with `with_context` the contexts between them. The completions of
        calls in `own` have a `loss_mask` of 1."""
        tokens, logprobs, masks = [np.empty(0, np.int32)], [np.empty(0, np.float32)], [np.empty(0, np.uint8)]
        spans: list[Span] = []
        writers: list[tuple[str, int, int]] = []
        turns: list[tuple[int, int]] = []
        edge = 0
        for number in numbers:
            call = self.calls[number]
            context = call.context_token_ids if with_context and edge else call.context_token_ids[:0]
            start, end = edge + context.size, edge + context.size + call.completion_token_ids.size
            is_own = number in own
            tokens += [context, call.completion_token_ids]
            logprobs += [np.zeros(context.size, np.float32), call.logprobs if is_own else np.zeros_like(call.logprobs)]
            masks += [np.zeros(context.size, np.uint8), np.full(end - start, is_own, np.uint8)]
            for version, first, last in call.spans:
                begun = start + first if first else edge
                if spans and spans[-1].version == version:
                    begun = spans.pop().start
                spans.append(Span(version, begun, start + last))
            writers.append(
                (call.replica, writers.pop()[1] if writers and writers[-1][0] == call.replica else edge, end)
            )
            turns += [(start, end)] if call.trained else []
            edge = end
        last_call = self.calls[numbers[-1]]
        return Trajectory(
            **{name: getattr(self, name) for name in _SHARED},
            prompt_token_ids=self.calls[numbers[0]].context_token_ids,
            completion_token_ids=np.concatenate(tokens),
            logprobs=np.concatenate(logprobs),
            loss_mask=np.concatenate(masks),
            spans=tuple(spans),
            finish_reason="length" if self.truncated else "stop",
            text=last_call.text,
            replica=last_call.replica,
            turns=tuple(turns),
            writers=tuple(writers),
        )

    def encode(self) -> bytes:
        """Encode the episode. Raises `CodecError` for values that msgpack can't carry."""
        return _EPISODE.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> EpisodeTrajectory:
        """Decode an episode. Raises `CodecError` for bytes that are not an episode, or whose calls don't form trees."""
        episode = _EPISODE.decode(data)
        episode.check()
        return episode

    def check(self) -> None:
        """Raise `CodecError` unless its calls form trees with something to train, and each is valid."""
        problem = self._problem()
        if problem is not None:
            raise CodecError(f"trajectory {self.group_id!r}[{self.index}]: {problem}")

    def _problem(self) -> str | None:
        for number, call in enumerate(self.calls):
            if not -1 <= call.parent < number:
                return f"call {number}: its parent {call.parent} is not before it"
            problem = call.problem()
            if problem is not None:
                return f"call {number}: {problem}"
        if not self._trained:
            return f"none of its {len(self.calls)} calls is trained"
        if not all(map(math.isfinite, self.timings.values())):
            return f"timings {self.timings} are not finite numbers"
        if not _is_json(self.artifacts):
            return f"artifacts are not made of JSON types, at most {JSON_DEPTH} deep"
        return None


# The fields that an episode has in common with a single completion.
_SHARED = [name for name in EpisodeTrajectory.__struct_fields__ if name in Trajectory.__struct_fields__]
# The record of an attempt at a group's prompt.
AnyTrajectory = Trajectory | EpisodeTrajectory


def decode_trajectory(data: bytes) -> AnyTrajectory:
    """Decode a trajectory of either schema. Raises `CodecError` for bytes that are not a trajectory."""
    match read_schema(data):
        case None | 1:
            return Trajectory.decode(data)
        case 2:
            return EpisodeTrajectory.decode(data)
        case unknown:
            raise CodecError(f"trajectory: schema {unknown!r:.80}; this build reads schemas 1 and 2")


def episode_record(
    group_id: str,
    attempt: int,
    index: int,
    calls: Sequence[Call],
    *,
    truncated: bool,
    runner: str,
    timings: dict[str, float],
    artifacts: dict[str, Any] | None = None,
) -> AnyTrajectory:
    """Return the record of an episode with these calls: of a single call without artifacts, the single completion that it is (schema 1);
    otherwise a tree. Raises `CodecError` for invalid calls or artifacts.

    The finish reason of a single completion is whether a limit of the run ended it, like `truncated`. The finish reason of the call, which
    may come from its own limit, is not kept.
    """
    episode = EpisodeTrajectory(group_id, attempt, index, tuple(calls), truncated, runner, timings, artifacts or {})
    episode.check()
    return episode if len(calls) > 1 or episode.artifacts else episode.flat()


_GROUP, _TRAJECTORY = Codec(Group), Codec(Trajectory)
_CALL, _EPISODE = Codec(Call), Codec(EpisodeTrajectory)

# What the fields of these records hold, by name: arrays, with the encoding of their elements; values of data sets and environments, of any
# type; records.
ARRAYS = {**_GROUP.dtypes, **_TRAJECTORY.dtypes, **_EPISODE.dtypes}
FREE = _GROUP.free | _TRAJECTORY.free | _EPISODE.free
RECORDS = _EPISODE.records
