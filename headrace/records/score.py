"""What a trajectory was worth: the record that an environment's answer becomes in the buffer (see `codec` for how it is written)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headrace.base.errors import CodecError
from headrace.records.codec import Codec

# Those of the contract (trajectory.proto) and one that no environment answers. A type can't be derived from the enum, so a test compares.
Status = Literal["SCORED", "FAILED", "TIMED_OUT", "INVALID", "NOT_STARTED", "INTERRUPTED", "UNSENDABLE"]

# The most bytes of an encoded score in the buffer (score.lua); leases reserve them.
SCORE_BYTES = 8192
# What msgpack adds to an empty text when it becomes one of up to `SCORE_BYTES`.
_TEXT_HEADER_BYTES = 2
# The most bytes of an environment's build, in UTF-8 (score.lua).
BUILD_BYTES = 256
# In the metadata of an INVALID score: what scored has no opinion of this completion, and `combine` leaves it out.
NOT_APPLICABLE = "not_applicable"
# The largest magnitude of a reward and of its components.
LARGEST_REWARD = 1e9


def reward_problem(reward: float, components: Mapping[str, float] | None = None) -> str | None:
    """Return why a run can't train on the reward or one of its components, or None. Sums of squares over a batch stay finite in float32
    only for values that are far from its limits."""
    for what, value in (
        ("reward", reward),
        *((f"component {name!r}", each) for name, each in (components or {}).items()),
    ):
        if not math.isfinite(value):
            return f"{what} is {value}, not a finite number"
        if abs(value) > LARGEST_REWARD:
            return f"{what} is {value:g}, and is to be between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}; scale it"
    return None


class Score(msgspec.Struct, frozen=True, tag_field="schema", tag=1):
    """An environment's result for one trajectory. Law 7: only `SCORED` carries a reward; a failure is never a number.

    `NOT_STARTED`: the environment did not start on it. `INTERRUPTED`: its process died, or the connection to it was lost, while it worked
    on it. `UNSENDABLE` is set by the scorer: no environment can be sent this trajectory.

    `message` says why there is no reward, and `traceback` is that of the exception behind it, if there was one.

    `timings` are seconds: `environment` is the environment's own time, and `waiting` the rest of the time since the trajectory was pushed
    (or last tried), mainly for a place in the environment.
    """

    status: Status
    reward: float | None = None
    components: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    message: str = ""
    environment: str = ""
    build: str = ""
    timings: dict[str, float] = {}
    traceback: str = ""

    def __post_init__(self) -> None:
        if (self.status == "SCORED") != (self.reward is not None):
            raise CodecError(f"score: status {self.status} with reward {self.reward}; exactly SCORED carries a reward")
        if self.reward is not None and (problem := reward_problem(self.reward, self.components)):
            raise CodecError(f"score: {problem}")

    def encode(self) -> bytes:
        """Encode the score. Raises `CodecError` for values that msgpack can't carry, and for more than `SCORE_BYTES`."""
        record = _SCORE.encode(self)
        if len(record) > SCORE_BYTES:
            raise CodecError(
                f"score: {len(record)} bytes; with metadata, components, message and traceback it has at most {SCORE_BYTES}"
            )
        return record

    def fit(self) -> Score:
        """Return the score as it is, or, if it is too large, with a note in place of its metadata, with 2,000 characters of its message,
        and with as much of the end of its traceback as there is room for, at most 2,000 characters."""
        if len(_SCORE.encode(self)) <= SCORE_BYTES:
            return self
        note = f"the environment's metadata was left out: a score has at most {SCORE_BYTES} bytes"
        short = msgspec.structs.replace(self, metadata={"headrace": note}, message=self.message[:2000], traceback="")
        room = SCORE_BYTES - len(_SCORE.encode(short)) - _TEXT_HEADER_BYTES
        end = self.traceback[-2000:].encode()[-room:] if room > 0 else b""
        return msgspec.structs.replace(short, traceback=end.decode(errors="ignore"))

    def storable(self) -> Score:
        """Return the score in a form that the buffer can keep: `fit`, or FAILED with the reason if that is not enough (an integer of
        more than 64 bits in its metadata, half a surrogate pair, components that are too large)."""
        try:
            if (score := self.fit()) is not self:
                score.encode()
        except CodecError as error:
            message = f"the score can't be kept: {error}"
            return Score("FAILED", message=message, environment=self.environment, build=self.build)
        return score

    @classmethod
    def decode(cls, data: bytes) -> Score:
        """Decode a score. Raises `CodecError` for bytes that are not a score, and for more than `SCORE_BYTES`."""
        if len(data) > SCORE_BYTES:
            raise CodecError(f"score: {len(data)} bytes; it has at most {SCORE_BYTES}")
        return _SCORE.decode(data)


_SCORE = Codec(Score)

# The fields that hold values of environments, of any type.
FREE_OF_SCORE = _SCORE.free
