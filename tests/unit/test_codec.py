"""The codec of groups, trajectories and scores: what goes in comes out, and nothing malformed gets past it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import CodecError
from headrace.records.codec import read_schema
from headrace.records.score import LARGEST_REWARD, SCORE_BYTES, Score
from headrace.records.trajectory import Call, EpisodeTrajectory, Group, Span, Trajectory, decode_trajectory
from tests.support.records import CALL, EPISODE, GROUP, SCORE, TRAJECTORY

KINDS = [Group, Trajectory, Score, Call, EpisodeTrajectory]
Record = Group | Trajectory | Score | Call | EpisodeTrajectory


def same(a: Any, b: Any) -> bool:
    """Equality of records that hold arrays, dtypes included."""
    for name in a.__struct_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray):
            if x.dtype != y.dtype or not np.array_equal(x, y):
                return False
        elif name == "calls":
            if len(x) != len(y) or not all(map(same, x, y)):
                return False
        elif x != y:
            return False
    return type(a) is type(b)


def changed(record: Record, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The record's bytes after `change` of its map."""
    fields = msgpack.unpackb(record.encode())
    change(fields)
    return bytes(msgpack.packb(fields))


def with_default(record: Record, name: str) -> Record | None:
    """The record with the default of a field; None if it has none, or if that makes it invalid."""
    for field in msgspec.structs.fields(type(record)):
        if field.name == name and not field.required:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            with contextlib.suppress(CodecError):
                return msgspec.structs.replace(record, **{name: default})
    return None


def example(kind: Any, default: Any) -> Any:
    """A value of a field's type that is not its default."""
    kinds = {str: "x", int: 7, float: 0.5, bool: not default, Any: ["x", 1, None]}
    if kind in kinds:
        return kinds[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is dict:
        return {example(args[0], None): example(args[1], None)}
    if origin is tuple:
        return tuple(example(each, None) for each in args if each is not ...)
    if origin is np.ndarray:
        return np.ones(1, get_args(args[1])[0])
    return next(
        each if origin is Literal else example(each, None) for each in args if each not in (default, type(None))
    )


def filled(record: Any) -> Any:
    """The record with a value other than the default in every field, so that a new field is in each test below. A field with a rule
    that this value breaks needs one in the record above."""
    for field in msgspec.structs.fields(type(record)):
        plain = with_default(record, field.name)
        if plain is not None and same(plain, record):
            record = msgspec.structs.replace(record, **{field.name: example(field.type, getattr(record, field.name))})
    return record


RECORDS = [*map(filled, (GROUP, TRAJECTORY, SCORE, CALL, EPISODE)), EPISODE]


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert same(type(record).decode(record.encode()), record)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_unknown_fields_are_ignored(record: Record) -> None:
    data = changed(record, lambda fields: fields.update(from_a_later_writer=[1, {"x": 2}]))
    assert same(type(record).decode(data), record)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_the_schema_is_the_first_field(record: Record) -> None:
    schema = 2 if isinstance(record, EpisodeTrajectory) else 1
    assert next(iter(msgpack.unpackb(record.encode()).items())) == ("schema", schema)
    assert read_schema(record.encode()) == schema


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 40))
    tokens = st.integers(0, 2**31 - 1)
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
    edges = [0, *cuts, length]
    versions = draw(st.lists(st.integers(0, 2**40), min_size=len(edges) - 1, max_size=len(edges) - 1))
    spans = tuple(Span(v, a, b) for v, (a, b) in zip(versions, itertools.pairwise(edges), strict=True))
    logprobs = draw(st.lists(st.floats(-1e6, 0, width=32), min_size=length, max_size=length))
    return Trajectory(
        group_id=draw(st.text(max_size=20)),
        attempt=draw(st.integers(0, 2**31)),
        index=draw(st.integers(0, 2**31)),
        prompt_token_ids=np.array(draw(st.lists(tokens, max_size=20)), np.int32),
        completion_token_ids=np.array(draw(st.lists(tokens, min_size=length, max_size=length)), np.int32),
        logprobs=np.array(logprobs, np.float32),
        loss_mask=np.array(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)), np.uint8),
        spans=spans,
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        text=draw(st.text(max_size=50)),
        replica=draw(st.text(max_size=10)),
        turns=tuple(itertools.pairwise(edges)),
        timings=draw(st.dictionaries(st.text(max_size=5), st.floats(0, 1e6), max_size=3)),
        writers=tuple((draw(st.text(max_size=10)), a, b) for a, b in itertools.pairwise(edges)),
    )


@given(trajectories())
def test_any_trajectory_comes_back_as_it_was(trajectory: Trajectory) -> None:
    assert same(Trajectory.decode(trajectory.encode()), trajectory)


def test_age_is_counted_from_the_oldest_token() -> None:
    assert (TRAJECTORY.oldest_version, TRAJECTORY.newest_version) == (3, 4)


def test_arrays_of_any_layout_are_written_little_endian() -> None:
    tokens = np.arange(1, 9, dtype=">i4")[::2]
    written = msgspec.structs.replace(TRAJECTORY, completion_token_ids=tokens)
    assert Trajectory.decode(written.encode()).completion_token_ids.tolist() == [1, 3, 5, 7]


def test_an_array_of_another_type_is_refused_on_the_way_out() -> None:
    """What it would be read as is other numbers."""
    with pytest.raises(CodecError, match=r"int64.*int32, float32"):
        msgspec.structs.replace(TRAJECTORY, loss_mask=np.ones(4, np.int64)).encode()


# -- malformed input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(kind: type[Record], data: bytes) -> None:
    with pytest.raises(CodecError):
        kind.decode(data)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_every_truncation_is_refused(record: Record) -> None:
    data = record.encode()
    for end in range(len(data)):
        with pytest.raises(CodecError):
            type(record).decode(data[:end])


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_still_a_valid_record(record: Record, at: int, byte: int) -> None:
    data = bytearray(record.encode())
    data[at % len(data)] = byte
    try:
        decoded = type(record).decode(bytes(data))
    except CodecError:
        return
    if isinstance(decoded, Trajectory | EpisodeTrajectory):
        decoded.check()
    decoded.encode()


NOT_MAPS = [b"", b"\xc1", msgpack.packb([1, 2]), msgpack.packb(7), msgpack.packb("text"), msgpack.packb({1: 2})]


@pytest.mark.parametrize("data", NOT_MAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_map_is_refused(kind: type[Record], data: bytes) -> None:
    with pytest.raises(CodecError):
        kind.decode(data)


def fields_of(record: Record) -> list[str]:
    return list(msgpack.unpackb(record.encode()))


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_a_missing_field_has_its_default_or_is_refused_by_name(record: Record) -> None:
    """An earlier build wrote the record."""
    for name in fields_of(record):
        data = changed(record, lambda fields, name=name: fields.pop(name))
        expected = with_default(record, name)
        if expected is not None:
            assert same(type(record).decode(data), expected), name
        else:
            with pytest.raises(CodecError, match=name):
                type(record).decode(data)


WRONG: list[Any] = [True, -1, 1.5, "text", b"\0\0\0", [[]], {"x": {}}, float("nan")]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_a_wrong_type_never_becomes_a_record_that_breaks_later(record: Record) -> None:
    types = {field: type(getattr(record, field)) for field in record.__struct_fields__}
    for name, wrong in itertools.product(fields_of(record), WRONG):
        data = changed(record, lambda fields, name=name, wrong=wrong: fields.update({name: wrong}))
        try:
            decoded = type(record).decode(data)
        except CodecError:
            continue
        value = getattr(decoded, name)
        assert isinstance(value, types[name]) or (types[name] is float and isinstance(value, float)), (name, wrong)
        assert same(type(record).decode(decoded.encode()), decoded), (name, wrong)


def test_another_schema_is_refused_with_both_numbers() -> None:
    with pytest.raises(CodecError, match=r"schema 2.*schema 1"):
        Trajectory.decode(changed(TRAJECTORY, lambda fields: fields.update(schema=2)))
    with pytest.raises(CodecError, match=r"schema 1.*schema 2"):
        EpisodeTrajectory.decode(changed(EPISODE, lambda fields: fields.update(schema=1)))


def test_a_trajectory_of_either_schema_is_read() -> None:
    for record in (TRAJECTORY, EPISODE):
        assert same(decode_trajectory(record.encode()), record)


@pytest.mark.parametrize("schema", [3, "2", None, [], -1, 2.5, {"x": 1}])
def test_a_trajectory_of_no_known_schema_is_refused(schema: Any) -> None:
    with pytest.raises(CodecError, match=r"schema|Literal|int"):
        decode_trajectory(changed(EPISODE, lambda fields: fields.update(schema=schema)))
    with pytest.raises(CodecError, match=r"schema 3.*schemas 1 and 2"):
        decode_trajectory(changed(EPISODE, lambda fields: fields.update(schema=3)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs": np.zeros(3, "<f4").tobytes()}, "logprobs has 3 entries for 4 tokens"),
        ({"loss_mask": bytes([1, 1, 1])}, "loss_mask has 3 entries for 4 tokens"),
        ({"loss_mask": bytes([1, 1, 2, 1])}, "values other than 0 and 1"),
        ({"logprobs": np.array([0, 0, 0, np.nan], "<f4").tobytes()}, "not finite or above 0"),
        ({"logprobs": np.array([0, 0, 0, -np.inf], "<f4").tobytes()}, "not finite or above 0"),
        ({"logprobs": np.array([0, 0, 0, 0.1], "<f4").tobytes()}, "not finite or above 0"),
        ({"completion_token_ids": b"", "logprobs": b"", "loss_mask": b"", "spans": []}, "has no tokens"),
        ({"completion_token_ids": b"\0" * 7}, "7 bytes, not a multiple of 4"),
        ({"spans": [[3, 0, 2]]}, "spans end at 2, the completion at 4"),
        ({"spans": []}, "spans end at 0"),
        ({"spans": [[3, 0, 2], [4, 3, 4]]}, "do not cover"),
        ({"spans": [[3, 0, 3], [4, 2, 4]]}, "do not cover"),
        ({"spans": [[3, 0, 0], [4, 0, 4]]}, "do not cover"),
        ({"spans": [[-1, 0, 4]]}, "do not cover"),
        ({"spans": [[3, 0, 5]]}, "spans end at 5"),
        ({"spans": [[3, 0]]}, "length 3, got 2 - at `.*spans"),
        ({"spans": [[3, 0, True]]}, "got `bool` - at `.*spans"),
        ({"turns": [[0, 5]]}, "do not lie in"),
        ({"turns": [[-1, 2]]}, "do not lie in"),
        ({"writers": [["r0", 0, 3]]}, "writers end at 3, the completion at 4"),
        ({"writers": [["r0", 0, 2], ["r1", 3, 4]]}, "writers .* do not cover"),
        ({"writers": [["r0", 0, 0], ["r1", 0, 4]]}, "writers .* do not cover"),
        ({"writers": [[7, 0, 4]]}, "got `int` - at `.*writers"),
        ({"turns": [[2, 2]]}, "do not lie in"),
        ({"finish_reason": "tired"}, "tired.* - at `.*finish_reason"),
        ({"timings": {"generate": "long"}}, "Expected `float`, got `str` - at `.*timings"),
        ({"timings": {"generate": float("inf")}}, "timings .* are not finite"),
    ],
)
def test_arrays_spans_and_turns_must_agree(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CodecError, match=said):
        Trajectory.decode(changed(TRAJECTORY, lambda fields: fields.update(change)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": 0}, "at least one trajectory"),
        ({"prompt_token_ids": b""}, "the prompt has no tokens"),
        ({"lane": "fast"}, "fast.* - at `.*lane"),
        ({"messages": ["hello"]}, "Expected `object`, got `str` - at `.*messages"),
        ({"sampling": {}}, "temperature"),
        ({"sampling": {"temperature": 1.0, "max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling": {"temperature": float("nan"), "max_new_tokens": 1}}, "temperature is nan, not a finite number"),
        ({"loss_multiplier": float("inf")}, "loss_multiplier is inf, not a finite number"),
    ],
)
def test_a_group_that_cant_be_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CodecError, match=said):
        Group.decode(changed(GROUP, lambda fields: fields.update(change)))


@pytest.mark.parametrize("status", ["FAILED", "TIMED_OUT", "INVALID"])
def test_law_7_a_failure_carries_no_reward(status: Any) -> None:
    Score(status=status, message="the environment fell over")
    with pytest.raises(CodecError):
        Score(status=status, reward=0.0)
    with pytest.raises(CodecError):
        Score.decode(changed(SCORE, lambda fields: fields.update(status=status)))


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 2 * LARGEST_REWARD, -2 * LARGEST_REWARD])
def test_a_score_without_a_reward_to_train_on_is_refused(value: float | None) -> None:
    Score("SCORED", -LARGEST_REWARD, components={"exact": LARGEST_REWARD})
    with pytest.raises(CodecError):
        Score("SCORED", value)
    if value is not None:
        with pytest.raises(CodecError):
            Score("SCORED", 1.0, components={"form": 0.0, "exact": value})


def test_what_msgpack_cant_hold_is_refused_on_the_way_out() -> None:
    with pytest.raises(CodecError, match="can't be packed"):
        msgspec.structs.replace(GROUP, extra_env_info={"answer": object()}).encode()


def test_a_score_with_much_metadata_says_what_was_left_out() -> None:
    large = Score("SCORED", 1.0, components={"a": 0.5}, metadata={"log": "x" * 2 * SCORE_BYTES}, environment="math")
    with pytest.raises(CodecError, match=f"at most {SCORE_BYTES}"):
        large.encode()
    kept = large.fit()
    assert Score.decode(kept.encode()) == kept
    assert (kept.reward, kept.components, kept.environment) == (1.0, {"a": 0.5}, "math")
    assert list(kept.metadata) == ["headrace"]
    assert f"at most {SCORE_BYTES} bytes" in kept.metadata["headrace"]
    failed = Score("FAILED", message="x" * 2 * SCORE_BYTES).fit()
    assert len(failed.message) == 2000
    raised = Score("FAILED", message="é" * SCORE_BYTES, metadata={"seen": 1}, traceback="é" * SCORE_BYTES + "KeyError")
    assert Score.decode(raised.fit().encode()) == raised.fit()
    assert raised.fit().traceback.endswith("éKeyError")
    assert Score("FAILED", message="x", traceback="é" * SCORE_BYTES).fit().traceback == "é" * 2000
    small = Score("SCORED", 1.0, metadata={"log": "x"})
    assert small.fit() is small
    with pytest.raises(CodecError):  # components are never left out: they may be trained on
        Score("SCORED", 1.0, components={"x" * 2 * SCORE_BYTES: 1.0}).fit().encode()


@pytest.mark.parametrize(
    "score",
    [
        Score("SCORED", 1.0, metadata={"result": 10**30}, environment="math", build="b"),
        Score("SCORED", 1.0, metadata={"said": "\ud83d"}, environment="math", build="b"),
        Score("SCORED", 1.0, components={"x" * 2 * SCORE_BYTES: 1.0}, environment="math", build="b"),
        Score("FAILED", components={"x" * 2 * SCORE_BYTES: 1.0}, message="no", environment="math", build="b"),
    ],
)
def test_law_7_a_score_that_cant_be_kept_is_a_failure_that_says_why(score: Score) -> None:
    kept = score.storable()
    assert Score.decode(kept.encode()) == kept
    assert (kept.status, kept.reward, kept.environment, kept.build) == ("FAILED", None, "math", "b")
    assert kept.message.startswith("the score can't be kept: ")
    large = Score("SCORED", 1.0, metadata={"log": "x" * 2 * SCORE_BYTES})
    assert large.storable() == large.fit()
