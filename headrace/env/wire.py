"""Converts between the protobuf messages of `headrace.v1` and the records of this package. A malformed field raises `CodecError`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from headrace.base import strict_json
from headrace.base.errors import CodecError
from headrace.env.environment import Sample, check_range, describe_error, encodable, single_conversation
from headrace.env.episode import Episode, EpisodeLimits, EpisodeOutcome
from headrace.records.codec import pack
from headrace.records.score import BUILD_BYTES, Score
from headrace.records.trajectory import AnyTrajectory, FinishReason, Group, Message
from headrace.v1 import episode_pb2
from headrace.v1 import trajectory_pb2 as pb
from headrace.v1.environment_pb2 import DescribeResponse

NO_COMPLETIONS: Mapping[int, str] = MappingProxyType({})
_LONGEST_MS = 2**32 - 1
# The share of a message that answers may take. The rest is for what is around them.
_SHARE_OF_MESSAGE = 0.9
_FINISH = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
# The statuses that an environment may answer, as `Score` names them.
STATUSES = {name.removeprefix("STATUS_"): value for name, value in pb.Status.items() if value}
_FINISH_NAMES = {value: name for name, value in _FINISH.items()}
_STATUS_NAMES = {value: name for name, value in STATUSES.items()}


def scoring_sample(
    group: Group, trajectory: AnyTrajectory, scope: str, group_completions: Mapping[int, str] = NO_COMPLETIONS
) -> Sample:
    """Return a trajectory as its environment receives it. Its idempotency key is the same each time that the sample is made in `scope`: a
    run, or a smaller scope.

    A field that the group or the trajectory has under the same name is taken from there. For an episode, the completion is its last answer,
    with the tokens of all its calls, its conversation and its artifacts.
    """
    flat = trajectory.flat()
    sources = (group, flat, trajectory)
    named = {name: getattr(source, name) for source in sources for name in _SAMPLE if hasattr(type(source), name)}
    sample = Sample(
        **{
            **named,
            "completion": trajectory.text,
            "completion_token_ids": tuple(flat.completion_token_ids.tolist()),
            "environment": group.env_name,
            "group_completions": dict(group_completions),
        }
    )
    # All that a grader sees is part of the key: after a rewind another attempt may have the same number.
    digest = hashlib.blake2b(pack(sample, "a sample"), digest_size=8).hexdigest()
    key = f"{scope}/{group.id}/{trajectory.attempt}/{trajectory.index}/{digest}"
    return dataclasses.replace(sample, idempotency_key=key)


def sample_to_wire(sample: Sample) -> pb.Trajectory:
    """Convert a sample. Raises `CodecError` if `extra_env_info`, `artifacts` or a message has anything but JSON types."""
    fields = {form.place: form.write(getattr(sample, name), name) for name, form in _SAMPLE.items()}
    if sample.conversation == single_conversation(sample.messages, sample.completion):
        del fields["conversation"]
    return pb.Trajectory(**fields)


def sample_from_wire(trajectory: pb.Trajectory) -> Sample:
    tokens = tuple(trajectory.completion_token_ids[:])  # slicing reads all numbers at once
    return Sample(**_read_fields(trajectory), completion_token_ids=tokens)


def check_trajectory(trajectory: pb.Trajectory) -> None:
    """Raise `CodecError` if `sample_from_wire` would, but without reading tokens, which takes most of the time for a long trajectory."""
    _read_fields(trajectory)


def score_to_wire(score: Score) -> pb.Result:
    """Convert a score. Law 7: one that can't be sent (metadata that is not JSON, a component that is not a number) is FAILED."""
    try:
        return pb.Result(
            status=STATUSES[score.status],
            reward=score.reward,
            components=score.components,
            metadata_json=_dump(score.metadata, "metadata"),
            message=score.message,
            environment=score.environment,
            build=score.build,
            took_ms=1000 * score.timings["environment"] if "environment" in score.timings else None,
            traceback=score.traceback,
        )
    except Exception as error:  # noqa: BLE001  # the values are the user's
        reason = str(error) if isinstance(error, CodecError) else describe_error(error)
        environment, build = (
            encodable(value) if isinstance(value, str) else "" for value in (score.environment, score.build)
        )
        message = encodable(f"the score can't be sent: {reason}")
        return pb.Result(status=pb.STATUS_FAILED, message=message, environment=environment, build=build)


def score_from_wire(result: pb.Result) -> Score:
    """Convert a result. Law 7: one that breaks the contract is FAILED, with the reason as its message."""
    status: Any = _STATUS_NAMES.get(result.status, "FAILED")
    try:
        if status == "SCORED" and not result.HasField("reward"):
            raise CodecError("the environment answered SCORED without a reward")
        for name, value in (("environment", result.environment), ("build", result.build)):
            if len(value.encode()) > BUILD_BYTES:
                raise CodecError(f"the environment returned {name} {value[:40]!r}…, more than {BUILD_BYTES} bytes")
        if not 0 <= result.took_ms < math.inf:
            raise CodecError(f"the environment answered took_ms {result.took_ms}, not a number of milliseconds")
        return Score(
            status,
            reward=result.reward if status == "SCORED" else None,
            components=dict(result.components),
            metadata=_load(result.metadata_json, "metadata_json"),
            message=result.message,
            environment=result.environment,
            build=result.build,
            timings={"environment": result.took_ms / 1000} if result.HasField("took_ms") else {},
            traceback=result.traceback,
        )
    except CodecError as error:
        return Score("FAILED", message=str(error), environment=result.environment[:40], build=result.build[:40])


def check_result(result: pb.Result, least: float | None = None, most: float | None = None) -> pb.Result:
    """Return a result of another process: itself, if it keeps the contract and its reward is from `least` to `most`; otherwise FAILED
    (law 7)."""
    score = check_range(score_from_wire(result), least, most)
    read = STATUSES[score.status], score.message, score.reward is not None
    return result if read == (result.status, result.message, result.HasField("reward")) else score_to_wire(score)


def episode_to_wire(episode: Episode) -> episode_pb2.Episode:
    """Convert an episode, with the time left until its deadline. Raises `CodecError` if `public` or a message has anything but JSON
    types."""
    return episode_pb2.Episode(
        group_id=episode.group_id,
        index=episode.index,
        environment=episode.environment,
        task_name=episode.task_name,
        messages=[_message_to_wire(message) for message in episode.messages],
        public_json=_dump(episode.public, "public"),
        base_url=episode.base_url,
        api_key=episode.api_key,
        limits=episode_pb2.EpisodeLimits(calls=episode.limits.calls, tokens=episode.limits.tokens),
        deadline_ms=max(1, round(min(1000 * episode.remaining_s, _LONGEST_MS))),
        attempt=episode.attempt,
        idempotency_key=episode.idempotency_key,
    )


def episode_from_wire(episode: episode_pb2.Episode, within_s: float | None = None) -> Episode:
    """Convert an episode. Its deadline is counted from now, and is at most `within_s` away."""
    where = f"episode {episode.group_id!r}[{episode.index}]"
    if not episode.deadline_ms:
        raise CodecError(f"{where}: deadline_ms is 0; give the milliseconds that its program has")
    if not episode.base_url.startswith(("http://", "https://")):
        raise CodecError(f"{where}: base_url is not an http or https address; give the address of the policy")
    return Episode(
        base_url=episode.base_url.rstrip("/"),
        api_key=episode.api_key,
        messages=tuple(_message_from_wire(message, where) for message in episode.messages),
        public=_load(episode.public_json, f"{where}: public_json"),
        limits=EpisodeLimits(episode.limits.calls, episode.limits.tokens),
        deadline=time.monotonic() + min(episode.deadline_ms / 1000, math.inf if within_s is None else within_s),
        attempt=episode.attempt,
        environment=episode.environment,
        task_name=episode.task_name,
        group_id=episode.group_id,
        index=episode.index,
        idempotency_key=episode.idempotency_key,
    )


def outcome_to_wire(outcome: EpisodeOutcome) -> episode_pb2.EpisodeOutcome:
    """Convert an outcome. Law 7: one that can't be sent is FAILED."""
    result = None if outcome.score is None else score_to_wire(outcome.score)
    try:
        return episode_pb2.EpisodeOutcome(result=result, artifacts_json=_dump(outcome.artifacts, "artifacts"))
    except CodecError as error:
        build = "" if outcome.score is None else outcome.score.build
        refused = pb.Result(status=pb.STATUS_FAILED, message=f"its artifacts can't be sent: {error}", build=build)
        return episode_pb2.EpisodeOutcome(result=refused)


def outcome_from_wire(outcome: episode_pb2.EpisodeOutcome) -> EpisodeOutcome:
    """Convert an outcome. Law 7: one that breaks the contract is FAILED, with the reason as its message."""
    score = score_from_wire(outcome.result) if outcome.HasField("result") else None
    try:
        return EpisodeOutcome(score, _load(outcome.artifacts_json, "artifacts_json"))
    except CodecError as error:
        return EpisodeOutcome(Score("FAILED", message=f"the program's outcome is invalid: {error}"))


def fit_results(results: list[pb.Result], most: int) -> list[pb.Result]:
    """Return `results`. If they don't fit in a message of `most` bytes, those larger than their share become FAILED."""
    if sum(result.ByteSize() for result in results) <= _SHARE_OF_MESSAGE * most:
        return results
    share = int(_SHARE_OF_MESSAGE * most) // len(results)
    return [
        result
        if (size := result.ByteSize()) <= share
        else _failure(
            result, f"a score of {size} bytes is more than its share of a message ({share}); return less metadata"
        )
        for result in results
    ]


def fit_outcome(outcome: episode_pb2.EpisodeOutcome, most: int) -> episode_pb2.EpisodeOutcome:
    """Return `outcome`, or one that is FAILED if it does not fit in a message of `most` bytes."""
    if (size := outcome.ByteSize()) <= _SHARE_OF_MESSAGE * most:
        return outcome
    message = f"its outcome has {size} bytes; a message may have {most}; leave less in artifacts"
    return episode_pb2.EpisodeOutcome(result=_failure(outcome.result, message))


def _failure(result: pb.Result, message: str) -> pb.Result:
    return pb.Result(status=pb.STATUS_FAILED, message=message, environment=result.environment, build=result.build)


def bounds(description: DescribeResponse) -> tuple[float | None, float | None]:
    """Return the least and the largest reward that the environment states."""
    return (
        description.reward_min if description.HasField("reward_min") else None,
        description.reward_max if description.HasField("reward_max") else None,
    )


def _read_fields(trajectory: pb.Trajectory) -> dict[str, Any]:
    """Return the fields of a sample but for its tokens."""
    where = f"trajectory {trajectory.group_id!r}[{trajectory.index}]"
    if not trajectory.environment:
        raise CodecError(f"{where}: environment is empty; send the name of the environment that scores it")
    return {
        name: form.read(getattr(trajectory, form.place), f"{where}: {form.place}")
        for name, form in _SAMPLE.items()
        if name != "completion_token_ids"
    }


def _finish_reason(value: Any, where: str) -> str:
    if value not in _FINISH_NAMES:
        raise CodecError(f"{where} is {value}; send FINISH_REASON_STOP or _LENGTH")
    return _FINISH_NAMES[value]


def _message_to_wire(message: Message) -> pb.ChatMessage:
    rest = dict(message)
    role = rest.pop("role", "")
    if not isinstance(role, str):
        raise CodecError(f"message role is {role!r:.80}, not text")
    content = rest.pop("content") if isinstance(rest.get("content"), str) else None
    return pb.ChatMessage(role=role, content=content, extra_json=_dump(rest, "message") if rest else "")


def _message_from_wire(message: pb.ChatMessage, where: str) -> Message:
    content = {"content": message.content} if message.HasField("content") else {}
    return {"role": message.role, **content, **_load(message.extra_json, f"{where}: extra_json of a message")}


def _dump(value: dict[str, Any], what: str) -> str:
    if not value:
        return ""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"{what} is not JSON: {error}") from error


def _load(text: str, what: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = strict_json.decode(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CodecError(f"{what} is a JSON {type(value).__name__}, not an object")
    return value


class _Form(NamedTuple):
    """How a field of a sample travels: the name of the message's field, and what writes its value and what reads it. Both are told the
    field's name."""

    place: str
    write: Callable[[Any, str], Any]
    read: Callable[[Any, str], Any]


def _keep(value: Any, _: str) -> Any:
    return value


def _form(name: str, kind: Any) -> _Form:
    """Return how a field of this type travels. One that is neither JSON nor messages nor an enum travels as it is; protobuf refuses other
    types."""
    if kind == dict[str, Any]:
        return _Form(f"{name}_json", _dump, _load)
    if kind == tuple[Message, ...]:
        return _Form(
            name,
            lambda messages, _: list(map(_message_to_wire, messages)),
            lambda messages, where: tuple(_message_from_wire(message, where) for message in messages),
        )
    if kind == dict[int, str]:
        return _Form(name, _keep, lambda value, _: dict(value))
    if kind == FinishReason:
        return _Form(name, lambda value, _: _FINISH[value], _finish_reason)
    return _Form(name, _keep, _keep)


# How each field of a sample travels.
_SAMPLE = {name: _form(name, kind) for name, kind in get_type_hints(Sample).items()}
