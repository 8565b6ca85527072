"""Groups, trajectories and scores: the records that travel through the buffer (see `codec` for how they are written)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from headrace.codec import Codec, Float32, Int32, UInt8
from headrace.errors import CodecError

Natural = Annotated[int, msgspec.Meta(ge=0)]
Lane = Literal["train", "validation"]
FinishReason = Literal["stop", "length"]
Message = dict[str, Any]

LANES = ("train", "validation")


class Span(NamedTuple):
    """Completion tokens `[start, end)` were sampled from the weights of `version`."""

    version: int
    start: int
    end: int


class Sampling(msgspec.Struct, frozen=True):
    """How the completions of a group are sampled. `temperature` 0 is greedy; `seed` makes trajectory i use `seed + i`.

    `top_k` (None: all) keeps the largest probabilities at that temperature, and `top_p` the fewest of those that sum to at least it.
    """

    temperature: float
    max_new_tokens: Natural
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    top_k: int | None = None
    top_p: float = 1.0


class Group(msgspec.Struct, frozen=True, tag_field="schema", tag=1):
    """One prompt and its `n` trajectories: the unit of work, of age and of loss.

    `id` comes from (epoch, data set, index), so that enqueuing it again changes nothing. `order` is its place in the order
    of prompts, a function of seed and configuration (law 5). `extra_env_info` is opaque to all but the environment and
    must be made of JSON types.
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
        """Raises `CodecError` for what msgpack can't carry."""
        return _GROUP.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Group:
        """Raises `CodecError` for bytes that are no group."""
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

    Shapes: `prompt_token_ids` [S] int32; `completion_token_ids` [T] int32; `logprobs` [T] float32, natural logarithm of the
    probability each token was sampled with (after temperature); `loss_mask` [T] uint8, 0 on tokens the environment wrote.
    `spans` cover [0, T) in order, without gaps. `turns` are `(start, end)` of each turn the policy wrote. `timings` are seconds.

    `replica` finished it. `writers` are `(replica, start, end)` of the tokens that each replica sampled, in order, without gaps; empty
    if one replica sampled all. An unfinished trajectory, saved for another replica to continue, has the finish reason "length".
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
        """`writers`, filled in if one replica sampled all tokens."""
        return self.writers or ((self.replica, 0, self.completion_token_ids.size),)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token, from which age is counted (law 2)."""
        return min(self.spans).version  # spans compare by version first

    @property
    def newest_version(self) -> int:
        return max(self.spans).version

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays: nearly all of its encoded size."""
        arrays = self.prompt_token_ids, self.completion_token_ids, self.logprobs, self.loss_mask
        return sum(array.nbytes for array in arrays)

    def encode(self) -> bytes:
        """Raises `CodecError` for what msgpack can't carry."""
        return _TRAJECTORY.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Trajectory:
        """Raises `CodecError` for bytes that are no trajectory, or whose arrays disagree."""
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
        # not the methods of arrays, which take twice as long for a short one; nan fails both comparisons
        if not (np.maximum.reduce(logprobs) <= 0 and np.minimum.reduce(logprobs) > -math.inf):
            return "a log-probability is not finite or above 0"
        if np.maximum.reduce(mask) > 1:
            return "loss_mask holds values other than 0 and 1"
        edge = 0
        for version, start, end in self.spans:
            if start != edge or end <= start or version < 0:
                return f"spans {self.spans} do not cover [0, {length}) in order"
            edge = end
        if edge != length:
            return f"spans end at {edge}, the completion at {length}"
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


Status = Literal["SCORED", "FAILED", "TIMED_OUT", "INVALID", "NOT_STARTED", "INTERRUPTED", "UNSENDABLE"]

# What a score may take in the buffer, encoded (score.lua); leases reserve it.
SCORE_BYTES = 8192
# What the name of an environment's build may take, in UTF-8 (score.lua).
BUILD_BYTES = 256


class Score(msgspec.Struct, frozen=True, tag_field="schema", tag=1):
    """An environment's result for one trajectory. Law 7: only `SCORED` carries a reward; a failure is never a number.

    `NOT_STARTED`: it did not begin on it. `INTERRUPTED`: its process died, or the connection to it was lost, while it was at it.
    `UNSENDABLE` is the scorer's: no environment can be sent this trajectory.

    `timings` are seconds: `environment`, what the environment took for it, and `waiting`, the rest of the time since it was pushed (or last
    tried), for a place in the environment above all.
    """

    status: Status
    reward: float | None = None
    components: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    message: str = ""
    environment: str = ""
    build: str = ""
    timings: dict[str, float] = {}

    def __post_init__(self) -> None:
        if (self.status == "SCORED") != (self.reward is not None):
            raise CodecError(f"score: status {self.status} with reward {self.reward}; exactly SCORED carries a reward")
        if self.reward is not None and not all(map(math.isfinite, (self.reward, *self.components.values()))):
            raise CodecError(f"score: reward {self.reward} or a component of {self.components} is not finite")

    def encode(self) -> bytes:
        """Raises `CodecError` for what msgpack can't carry, and for more than `SCORE_BYTES`."""
        record = _SCORE.encode(self)
        if len(record) > SCORE_BYTES:
            raise CodecError(
                f"score: {len(record)} bytes; with metadata, components and message it has at most {SCORE_BYTES}"
            )
        return record

    def fitted(self) -> Score:
        """The score as it is, or with a note in place of metadata that are too large, and with 2,000 characters of its message."""
        if len(_SCORE.encode(self)) <= SCORE_BYTES:
            return self
        note = f"the environment's metadata was left out: a score has at most {SCORE_BYTES} bytes"
        return msgspec.structs.replace(self, metadata={"headrace": note}, message=self.message[:2000])

    @classmethod
    def decode(cls, data: bytes) -> Score:
        """Raises `CodecError` for bytes that are no score, and for more than `SCORE_BYTES`."""
        if len(data) > SCORE_BYTES:
            raise CodecError(f"score: {len(data)} bytes; it has at most {SCORE_BYTES}")
        return _SCORE.decode(data)


_GROUP, _TRAJECTORY, _SCORE = Codec(Group), Codec(Trajectory), Codec(Score)

# The array fields, and how their elements are encoded.
ARRAYS = {**_GROUP.dtypes, **_TRAJECTORY.dtypes}
