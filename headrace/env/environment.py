"""The environment SDK: a subclass of `Environment` with a `score` method, served by `headrace.serve`, rewards the completions of a run.

    class Length(headrace.Environment):
        def score(self, sample):
            return -abs(len(sample.completion) - 100) / 100

    headrace.serve(Length(), port=50400)

It needs only `pip install headrace`. `docs/environments.md` has the whole contract.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import traceback
from collections.abc import Awaitable, Sequence
from typing import Any, cast

import msgspec

from headrace.env.episode import Episode
from headrace.env.source_build import source_build
from headrace.records.score import Score, reward_problem
from headrace.records.trajectory import FinishReason, Message

_LONGEST_MESSAGE = 2000
# The end of a traceback, which has the exception, in characters.
_LONGEST_TRACEBACK = 2000
_CALLERS = tuple(
    f"headrace.env.{module}" for module in ("environment", "server", "programs", "slots", "reward_function")
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion of one prompt, to be scored.

    `completion` is text without special tokens; `completion_token_ids` are the ids that the model generated, including the end token.
    `finish_reason` is "length" for a truncated completion. `extra_env_info` is the data set's information about the problem. A
    second sample with the same `idempotency_key` is the same completion, sent again.

    `conversation` has all messages up to the last answer. For an episode these are the messages on the path to its last call, including
    tool calls and their results; for a single completion, `messages` and the completion. `artifacts` is what the program of an episode
    left, otherwise {}. `group_completions` are those of the whole group by their index, where the environment asks for `whole_groups`.
    """

    completion: str
    extra_env_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    completion_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    environment: str = ""
    task_name: str = ""
    group_id: str = ""
    index: int = 0
    idempotency_key: str = ""
    conversation: tuple[Message, ...] = ()
    artifacts: dict[str, Any] = dataclasses.field(default_factory=dict)
    group_completions: dict[int, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.conversation:
            object.__setattr__(self, "conversation", single_conversation(self.messages, self.completion))


def single_conversation(messages: tuple[Message, ...], completion: str) -> tuple[Message, ...]:
    """The conversation of a single completion."""
    return (*messages, {"role": "assistant", "content": completion})


Scored = float | Score


class Environment:
    """Base class of an environment. Override `score`, or `score_batch` if scoring many at once is cheaper; or `episode`, for a program that
    calls the policy itself. All may be `async def`.

    A plain `score` runs in a thread, an `async` one in the event loop, at most `concurrency` at a time; set that to 1 if yours is not
    thread-safe. The environment is never sent more than it can start at once, which is its `capacity`. An exception becomes FAILED with its
    message. So does a reward that is not a finite number, or is outside `reward_min` and `reward_max`. Return `Score("INVALID", message=…)`
    for a sample that can never be scored. All of this applies to `episode` too, at most `episodes` at a time.
    """

    name: str = ""  # default: the name of the class
    description: str = ""  # one line
    concurrency: int = 16
    max_batch_size: int = 64  # samples in one call of `score_batch`
    episodes: int = 256  # calls of `episode` at a time; by default a runner opens 128
    deterministic: bool = False  # equal samples get equal rewards, whatever is scored before or beside them
    whole_groups: bool = False  # a sample comes once its group is complete, with `group_completions`
    reward_min: float | None = None  # a lower reward becomes FAILED. None: no bound
    reward_max: float | None = None

    def score(self, sample: Sample) -> Scored | Awaitable[Scored]:
        """Return the reward of one completion: a number, or a `Score` with named components and metadata."""
        raise NotImplementedError(f"{type(self).__name__} defines neither score nor score_batch")

    def score_batch(self, samples: Sequence[Sample]) -> Sequence[Scored] | Awaitable[Sequence[Scored]]:
        """Return the rewards of a batch, one for each sample, in order. If this is not overridden, every sample goes through `score`."""
        raise NotImplementedError

    def episode(self, e: Episode) -> Scored | Awaitable[Scored | None] | None:
        """Play one episode, and return its reward: a number or a `Score`; None where the run names a grader (`env.<name>.grader`)."""
        raise NotImplementedError(f"{type(self).__name__} does not define episode")

    @functools.cached_property
    def build(self) -> str:
        """The version of the environment, stored with every reward: one build scores a group. A class may set it (`build = "1.0"`); by
        default it is a digest of the source (`source_build`)."""
        return source_build(self, Environment)

    @property
    def label(self) -> str:
        return self.name or type(self).__name__

    @property
    def scores_batches(self) -> bool:
        return type(self).score_batch is not Environment.score_batch

    @property
    def runs_episodes(self) -> bool:
        return type(self).episode is not Environment.episode

    @property
    def scores_samples(self) -> bool:
        """Whether the environment scores samples: one that runs episodes may do only that."""
        return self.scores_batches or type(self).score is not Environment.score or not self.runs_episodes

    @property
    def capacity(self) -> int:
        """The number of samples that the environment works on at a time."""
        return self.concurrency * (self.max_batch_size if self.scores_batches else 1)


def check_score(environment: Environment, value: object, method: str = "score") -> Score:
    """Turn what `method` returned into a `Score` that names the environment. Law 7: anything but a finite number in its range is FAILED.

    The value is the user's, and so is what it raises when it is looked at.
    """
    try:
        return _check(environment, value, method)
    except BaseException as error:  # noqa: BLE001
        return make_failed(environment, error)


def _check(environment: Environment, value: object, method: str) -> Score:
    if isinstance(value, Score):
        score = msgspec.structs.replace(value, environment=environment.label, build=value.build or environment.build)
        return check_range(score, environment.reward_min, environment.reward_max)
    if not hasattr(value, "__float__"):
        return make_failed(
            environment, f"{method} returned {value!r:.80} ({type(value).__name__}), not a number or a Score"
        )
    reward = float(cast(float, value))
    if problem := reward_problem(reward):
        return make_failed(environment, f"{method}: {problem}")
    score = Score("SCORED", reward=reward, environment=environment.label, build=environment.build)
    return check_range(score, environment.reward_min, environment.reward_max)


def check_range(score: Score, least: float | None, most: float | None) -> Score:
    """Return the score if its reward is between the environment's least and largest reward, else FAILED. It is never clipped."""
    if score.reward is None or (-math.inf if least is None else least) <= score.reward <= (
        math.inf if most is None else most
    ):
        return score
    message = f"reward {score.reward:g} is not between the environment's reward_min {_format(least)} and reward_max {_format(most)}"
    return Score("FAILED", message=message, environment=score.environment, build=score.build, timings=score.timings)


def _format(value: float | None) -> str:
    return "(none)" if value is None else f"{value:g}"


def make_failed(environment: Environment, reason: object) -> Score:
    """Return a FAILED score that names the environment. `reason` is a message, or the exception that `score` raised. For an exception the
    message says where it was raised, and the score has its traceback."""
    trace = ""
    if isinstance(reason, BaseException):
        message = describe_error(reason)[: _LONGEST_MESSAGE // 2] + find_place(environment, reason)
        trace = encodable("".join(_format_traceback(reason))[-_LONGEST_TRACEBACK:])
    else:
        message = str(reason)
    message = encodable(message[:_LONGEST_MESSAGE])
    return Score("FAILED", message=message, environment=environment.label, build=environment.build, traceback=trace)


def describe_error(error: BaseException) -> str:
    """Return the type and the message of a user's exception, even if it can't tell its message."""
    try:
        message = str(error)
    except BaseException as worse:  # noqa: BLE001
        message = f"(its __str__ raised {type(worse).__name__})"
    return f"{type(error).__name__}: {message}"


def encodable(text: str) -> str:
    """Return the text with half surrogate pairs, which UTF-8 can't carry, written as `\\ud800`."""
    return text.encode("utf-8", "backslashreplace").decode()


def find_place(environment: Environment, error: BaseException) -> str:
    """Return where `error` was raised, in parentheses: the innermost line in the environment's own file, or the innermost of all if none is
    there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(sys.modules.get(type(environment).__module__), "__file__", None)
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1] if frames else None)
    return f" ({frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})" if frame else ""


def _format_traceback(error: BaseException) -> list[str]:
    """Format the traceback without the frames of the environment's caller."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_globals.get("__name__") in _CALLERS:
        frame = frame.tb_next
    return traceback.format_exception(type(error), error, frame or error.__traceback__)
