"""Groups, trajectories and scores: the records that travel through the buffer (see `codec` for how they are written)."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.codec import SCHEMA, Reader, array_of, pack, to_bytes
from headrace.errors import CodecError

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

Lane = Literal["train", "validation"]
FinishReason = Literal["stop", "length"]
Message = dict[str, Any]

LANES = ("train", "validation")


class Span(NamedTuple):
    """Completion tokens `[start, end)` were sampled from the weights of `version`."""

    version: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the completions of a group are sampled. `temperature` 0 is greedy; `seed` makes trajectory i use `seed + i`.

    Of the probabilities at that temperature, `top_k` (None: all) keeps the largest, and `top_p` of those the fewest that sum to it.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    top_k: int | None = None
    top_p: float = 1.0


@dataclasses.dataclass(frozen=True)
class Group:
    """One prompt and its `n` trajectories: the unit of work, of age and of loss.

    `id` comes from (epoch, data set, index), so that enqueuing it again changes nothing. `order` is its place in the order
    of prompts, a function of seed and configuration (law 5). `extra_env_info` is opaque to all but the environment and
    must be made of JSON types.
    """

    id: str
    lane: Lane
    order: int
    task_name: str
    env_name: str
    messages: tuple[Message, ...]
    prompt_token_ids: Int32
    extra_env_info: dict[str, Any]
    dataset_index: int
    n: int
    sampling: Sampling
    loss_multiplier: float = 1.0

    def encode(self) -> bytes:
        return pack(
            {
                "schema": SCHEMA,
                **vars(self),
                "messages": list(self.messages),
                "prompt_token_ids": to_bytes(self.prompt_token_ids, "<i4"),
                "sampling": vars(self.sampling),
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Group:
        m = Reader(data, "group")
        sampling = Reader(m.get("sampling", dict), "group.sampling")
        group = cls(
            id=m.get("id", str),
            lane=m.choice("lane", LANES),
            order=m.natural("order"),
            task_name=m.get("task_name", str),
            env_name=m.get("env_name", str),
            messages=tuple(m.list_of("messages", dict)),
            prompt_token_ids=m.array("prompt_token_ids", "<i4"),
            extra_env_info=m.get("extra_env_info", dict),
            dataset_index=m.natural("dataset_index"),
            n=m.natural("n"),
            sampling=Sampling(
                temperature=sampling.number("temperature"),
                max_new_tokens=sampling.natural("max_new_tokens"),
                stop_token_ids=tuple(sampling.list_of("stop_token_ids", int)),
                stop_strings=tuple(sampling.list_of("stop_strings", str)),
                seed=sampling.optional("seed", int),
                top_k=sampling.optional("top_k", int),
                # a group that was queued before there was top_p
                top_p=1.0 if "top_p" not in sampling.fields else sampling.number("top_p"),
            ),
            loss_multiplier=m.number("loss_multiplier"),
        )
        if group.n < 1:
            raise CodecError(f"group {group.id!r}: n is {group.n}; a group has at least one trajectory")
        if group.prompt_token_ids.size == 0:
            raise CodecError(f"group {group.id!r}: the prompt has no tokens")
        return group


# A Struct, as making a frozen dataclass takes six times as long, and these come by the thousand.
class Trajectory(msgspec.Struct, frozen=True):
    """One completion as it was sampled: token in, token out, never re-tokenized.

    Shapes: `prompt_token_ids` [S] int32; `completion_token_ids` [T] int32; `logprobs` [T] float32, natural logarithm of the
    probability each token was sampled with (after temperature); `loss_mask` [T] uint8, 0 on tokens the environment wrote.
    `spans` cover [0, T) in order, without gaps. `turns` are `(start, end)` of each turn the policy wrote. `timings` are seconds.

    `replica` finished it. `writers` are `(replica, start, end)` of the tokens that each replica sampled, in order, without gaps; empty
    where it was one from beginning to end. An unfinished trajectory, saved for another replica to go on from, is one that was cut off
    ("length") where it was saved.
    """

    group_id: str
    attempt: int
    index: int
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
        """Which replica sampled which tokens: `writers`, also where it was one alone."""
        return self.writers or ((self.replica, 0, self.completion_token_ids.size),)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token: what age is counted from (law 2)."""
        return min(self.spans).version  # it is what spans compare by first

    @property
    def newest_version(self) -> int:
        return max(self.spans).version

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays: nearly all of what it takes encoded."""
        arrays = self.prompt_token_ids, self.completion_token_ids, self.logprobs, self.loss_mask
        return sum(array.nbytes for array in arrays)

    def encode(self) -> bytes:
        record = _TrajectoryRecord(
            schema=SCHEMA,
            group_id=self.group_id,
            attempt=self.attempt,
            index=self.index,
            prompt_token_ids=to_bytes(self.prompt_token_ids, "<i4"),
            completion_token_ids=to_bytes(self.completion_token_ids, "<i4"),
            logprobs=to_bytes(self.logprobs, "<f4"),
            loss_mask=to_bytes(self.loss_mask, "u1"),
            spans=self.spans,
            finish_reason=self.finish_reason,
            text=self.text,
            replica=self.replica,
            turns=self.turns,
            timings=self.timings,
            writers=self.writers,
        )
        try:
            return _PACK_TRAJECTORY(record)
        except (TypeError, ValueError, OverflowError) as error:
            raise CodecError(f"a trajectory can't be packed: {error}") from error

    @classmethod
    def decode(cls, data: bytes) -> Trajectory:
        try:
            record = _UNPACK_TRAJECTORY(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            Reader(data, "trajectory")  # has its own words for what is no record, or one of another schema
            raise CodecError(f"trajectory: {error}") from error
        trajectory = cls(
            group_id=record.group_id,
            attempt=record.attempt,
            index=record.index,
            prompt_token_ids=array_of(record.prompt_token_ids, _INT32, "prompt_token_ids"),
            completion_token_ids=array_of(record.completion_token_ids, _INT32, "completion_token_ids"),
            logprobs=array_of(record.logprobs, _FLOAT32, "logprobs"),
            loss_mask=array_of(record.loss_mask, _UINT8, "loss_mask"),
            spans=record.spans,
            finish_reason=record.finish_reason,
            text=record.text,
            replica=record.replica,
            turns=record.turns,
            timings=record.timings,
            writers=record.writers,
        )
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
        # not the methods of arrays, which take twice the time of a short one; nan fails both comparisons
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


class _TrajectoryRecord(msgspec.Struct):
    """A trajectory as it is written. msgspec checks the types as it reads: a tenth of the time that checks in Python take,
    for the record that comes by the thousand."""

    schema: Literal[1]
    group_id: str
    attempt: Annotated[int, msgspec.Meta(ge=0)]
    index: Annotated[int, msgspec.Meta(ge=0)]
    prompt_token_ids: bytes
    completion_token_ids: bytes
    logprobs: bytes
    loss_mask: bytes
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    text: str
    replica: str
    turns: tuple[tuple[int, int], ...]
    timings: dict[str, float]
    writers: tuple[tuple[str, int, int], ...]


_PACK_TRAJECTORY = msgspec.msgpack.Encoder().encode
_UNPACK_TRAJECTORY = msgspec.msgpack.Decoder(_TrajectoryRecord).decode
_INT32, _FLOAT32, _UINT8 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")


@dataclasses.dataclass(frozen=True)
class Score:
    """What an environment said of one trajectory. Law 7: only `SCORED` carries a reward; a failure is never a number."""

    status: Literal["SCORED", "FAILED", "TIMED_OUT", "INVALID"]
    reward: float | None = None
    components: dict[str, float] = dataclasses.field(default_factory=dict)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    message: str = ""
    environment: str = ""
    build: str = ""

    def __post_init__(self) -> None:
        if (self.status == "SCORED") != (self.reward is not None):
            raise CodecError(f"score: status {self.status} with reward {self.reward}; exactly SCORED carries a reward")
        if self.reward is not None and not all(map(math.isfinite, (self.reward, *self.components.values()))):
            raise CodecError(f"score: reward {self.reward} or a component of {self.components} is not finite")

    def encode(self) -> bytes:
        return pack({"schema": SCHEMA, **vars(self)})

    @classmethod
    def decode(cls, data: bytes) -> Score:
        try:
            record = _UNPACK_SCORE(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            Reader(data, "score")
            raise CodecError(f"score: {error}") from error
        return cls(
            record.status,
            record.reward,
            record.components,
            record.metadata,
            record.message,
            record.environment,
            record.build,
        )


class _ScoreRecord(msgspec.Struct):
    """A score as it is written."""

    schema: Literal[1]
    status: Literal["SCORED", "FAILED", "TIMED_OUT", "INVALID"]
    components: dict[str, float]
    metadata: dict[str, Any]
    message: str
    environment: str
    build: str
    reward: float | None = None


_UNPACK_SCORE = msgspec.msgpack.Decoder(_ScoreRecord).decode
