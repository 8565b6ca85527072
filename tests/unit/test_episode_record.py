"""An episode's record: a tree of calls, its rows, and what is no tree of calls."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given

from headrace.base.errors import CodecError
from headrace.records.trajectory import (
    JSON_DEPTH,
    Call,
    EpisodeTrajectory,
    Span,
    Trajectory,
    artifacts_bytes,
    decode_trajectory,
    episode_record,
)
from tests.support.episodes import call, episode, episodes


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def test_the_rows_of_a_chain() -> None:
    one = episode(
        [
            call(-1, [1, 2], [3, 4], [-0.5, -1.0], version=3, replica="a"),
            call(0, [5], [6], [-2.0], version=4, replica="b"),
            call(1, [7, 8], [9], [-3.0], version=4, replica="b", answer={"content": "so", "tool_calls": [{"id": "1"}]}),
        ]
    )
    (path,) = one.paths()
    path.check()
    assert path.prompt_token_ids.tolist() == [1, 2]
    assert path.completion_token_ids.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert path.loss_mask.tolist() == [1, 1, 0, 1, 0, 0, 1]
    assert path.logprobs.tolist() == [-0.5, -1.0, 0, -2.0, 0, 0, -3.0]
    assert path.spans == (Span(3, 0, 2), Span(4, 2, 7))
    assert path.written == (("a", 0, 2), ("b", 2, 7))
    assert path.turns == ((0, 2), (3, 4), (6, 7))
    assert (path.text, one.text) == ('so\n{"id": "1"}', 'so\n{"id": "1"}')
    assert (one.length, one.oldest_version, one.newest_version) == (4, 3, 4)
    assert one.places.tolist() == [0, 1, 2, 3]


def test_a_prefix_that_paths_share_is_trained_on_the_first_of_them() -> None:
    """Calls 1 and 3 continue call 0, call 2 is a subagent's, and call 3 opted out of training."""
    one = episode(
        [
            call(-1, [1], [2, 3]),
            call(0, [4], [5]),
            call(-1, [6], [7]),
            call(0, [8], [9], trained=False),
            call(3, [], [10]),
        ]
    )
    paths = one.paths()
    for path in paths:
        path.check()
    assert [(p.prompt_token_ids.tolist(), p.completion_token_ids.tolist()) for p in paths] == [
        ([1], [2, 3, 4, 5]),
        ([6], [7]),
        ([1], [2, 3, 8, 9, 10]),
    ]
    assert [path.loss_mask.tolist() for path in paths] == [[1, 1, 0, 1], [1], [0, 0, 0, 0, 1]]
    assert paths[2].turns == ((0, 2), (4, 5))
    assert one.flat().completion_token_ids.tolist() == [2, 3, 5, 7, 9, 10]
    assert one.flat().loss_mask.tolist() == [1, 1, 1, 1, 0, 1]
    assert one.places.tolist() == [0, 1, 2, 3, 5]


def test_calls_that_are_interleaved_keep_the_order_of_their_paths() -> None:
    one = episode([call(-1, [1], [2]), call(-1, [3], [4, 5]), call(0, [6], [7]), call(1, [8], [9])])
    assert [path.completion_token_ids.tolist() for path in one.paths()] == [[2, 6, 7], [4, 5, 8, 9]]
    assert one.flat().completion_token_ids[one.places].tolist() == [2, 7, 4, 5, 9]


@given(episodes())
def test_every_trained_token_is_on_one_path_in_its_own_context(one: EpisodeTrajectory) -> None:
    """Each call's tokens follow what its parents and contexts say, and are trained once."""

    def history(number: int) -> list[int]:
        if number < 0:
            return []
        own = one.calls[number]
        return [*history(own.parent), *own.context_token_ids.tolist(), *own.completion_token_ids.tolist()]

    expected = []
    for number, made in enumerate(one.calls):
        tokens = history(number)
        begun = len(tokens) - made.completion_token_ids.size
        versions = [span.version for span in made.spans for _ in range(span.start, span.end)]
        for i, logprob in enumerate(made.logprobs.tolist()):
            if made.trained:
                expected.append((tuple(tokens[: begun + i + 1]), logprob, versions[i], made.replica))
    found = []
    for path in one.paths():
        path.check()
        whole = [*path.prompt_token_ids.tolist(), *path.completion_token_ids.tolist()]
        for i in np.flatnonzero(path.loss_mask).tolist():
            (version,) = [span.version for span in path.spans if span.start <= i < span.end]
            (writer,) = [replica for replica, start, end in path.written if start <= i < end]
            before = tuple(whole[: path.prompt_token_ids.size + i + 1])
            found.append((before, path.logprobs.tolist()[i], version, writer))
    assert sorted(found) == sorted(expected)
    flat = one.flat()
    flat.check()
    assert flat.length == one.length == len(expected)
    assert flat.logprobs[one.places].tolist() == [logprob for _, logprob, _, _ in found]


@given(episodes())
def test_any_episode_comes_back_as_it_was(one: EpisodeTrajectory) -> None:
    back = decode_trajectory(one.encode())
    assert isinstance(back, EpisodeTrajectory)
    assert back.encode() == one.encode()
    assert one.nbytes > 0


# -- one call ------------------------------------------------------------------------------------------------------------


def test_one_trained_call_is_written_as_a_single_completion() -> None:
    made = call(-1, [1, 2], [3, 4, 5], [-0.5, -1.0, 0.0], version=7, replica="r1", answer={"content": "132"})
    record = episode_record("g", 2, 1, [made], truncated=True, runner="run", timings={"generate_s": 0.5})
    single = Trajectory(
        group_id="g",
        attempt=2,
        index=1,
        prompt_token_ids=np.array([1, 2], np.int32),
        completion_token_ids=np.array([3, 4, 5], np.int32),
        logprobs=np.array([-0.5, -1.0, 0.0], np.float32),
        loss_mask=np.ones(3, np.uint8),
        spans=(Span(7, 0, 3),),
        finish_reason="length",
        text="132",
        replica="r1",
        turns=((0, 3),),
        timings={"generate_s": 0.5},
        writers=(("r1", 0, 3),),
    )
    assert record.encode() == single.encode()
    assert (single.paths()[0] is single, single.flat() is single, single.truncated, single.length) == (
        True,
        True,
        True,
        3,
    )


def test_one_call_with_artifacts_is_a_tree_of_one_call() -> None:
    made = call(-1, [1, 2], [3, 4], version=7, answer={"role": "assistant", "content": "132"})
    record = episode_record("g", 2, 1, [made], truncated=False, runner="run", timings={}, artifacts={"left": [1]})
    assert isinstance(record, EpisodeTrajectory)
    fields = msgpack.unpackb(record.encode())
    assert (fields["schema"], fields["artifacts"]) == (2, {"left": [1]})
    back = decode_trajectory(record.encode())
    assert isinstance(back, EpisodeTrajectory)
    assert (back.artifacts, back.encode()) == ({"left": [1]}, record.encode())
    # what learns sees the single completion that it is
    single = episode_record("g", 2, 1, [made], truncated=False, runner="run", timings={})
    assert isinstance(single, Trajectory)
    (path,) = back.paths()
    assert path.encode() == back.flat().encode() == single.encode()
    assert (back.length, back.oldest_version, back.newest_version, back.text) == (2, 7, 7, "132")
    assert back.places.tolist() == single.places.tolist()


def test_a_record_without_artifacts_is_that_of_earlier_builds() -> None:
    calls = [call(-1, [1], [2]), call(0, [3], [4])]
    record = episode_record("g", 1, 0, calls, truncated=False, runner="run", timings={}, artifacts={})
    fields = msgpack.unpackb(record.encode())
    assert list(fields) == ["schema", "group_id", "attempt", "index", "calls", "truncated", "runner", "timings"]
    found = decode_trajectory(record.encode())
    assert isinstance(found, EpisodeTrajectory)
    assert found.artifacts == {}


def test_the_conversation_of_an_episode_is_that_of_its_last_call() -> None:
    def said(role: str, content: str) -> dict[str, Any]:
        return {"role": role, "content": content}

    one = episode(
        [
            call(-1, [1], [2], messages=(said("user", "47+85"),), answer=said("assistant", "let me see")),
            call(0, [3], [4], messages=(said("tool", "no"),), answer=said("assistant", "a branch")),
            call(-1, [5], [6], messages=(said("user", "of another root"),), answer=said("assistant", "so?")),
            call(0, [7], [8], messages=(said("tool", "132"),), answer=said("assistant", "132")),
        ]
    )
    assert [message["content"] for message in one.conversation] == ["47+85", "let me see", "132", "132"]
    assert [message["role"] for message in one.conversation] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("artifacts", "said"),
    [
        ({"left": nested(JSON_DEPTH)}, "at most 64 deep"),
        ({"left": b"bytes"}, "artifacts are not made of JSON types"),
        ({"left": {1: 2}}, "artifacts are not made of JSON types"),
        ({"left": float("inf")}, "artifacts are not made of JSON types"),
        ({"left": float("nan")}, "artifacts are not made of JSON types"),
        ([1], "Expected `object`, got `array` - at `.*artifacts"),
        (None, "Expected `object`, got `None` - at `.*artifacts"),
    ],
)
def test_artifacts_are_json(artifacts: Any, said: str) -> None:
    fields = msgpack.unpackb(episode([call(-1, [1], [2])]).encode())
    fields["artifacts"] = artifacts
    with pytest.raises(CodecError, match=said):
        decode_trajectory(msgpack.packb(fields))


@pytest.mark.parametrize(
    "left",
    ["\ud83d", 2**64, -(2**63) - 1, nested(100_000), {"\ud83d": 1}],
    ids=["text", "large", "small", "deep", "key"],
)
def test_artifacts_that_msgpack_cant_hold_are_refused(left: Any) -> None:
    with pytest.raises(CodecError, match="artifacts"):
        artifacts_bytes({"left": left})


def test_the_size_of_artifacts_is_that_in_the_record() -> None:
    calls = [call(-1, [1], [2])]
    few, more = (
        episode_record("g", 1, 0, calls, truncated=False, runner="run", timings={}, artifacts={"left": "x" * length})
        for length in (1, 10)
    )
    assert artifacts_bytes({"left": "x" * 10}) - artifacts_bytes({"left": "x"}) == 9
    assert len(more.encode()) - len(few.encode()) == 9
    assert more.nbytes - few.nbytes == 9


def test_more_calls_are_a_tree_and_one_of_them_must_be_trained() -> None:
    calls = [call(-1, [1], [2]), call(0, [3], [4])]
    record = episode_record("g", 1, 0, calls, truncated=False, runner="run", timings={})
    assert isinstance(record, EpisodeTrajectory)
    assert msgpack.unpackb(record.encode())["schema"] == 2
    for untrained in ([call(-1, [1], [2], trained=False)], []):
        with pytest.raises(CodecError, match=f"none of its {len(untrained)} calls"):
            episode_record("g", 1, 0, untrained, truncated=False, runner="run", timings={})


# -- what is no tree of calls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parent": 1}, "call 1: its parent 1 "),
        ({"parent": 2}, "call 1: its parent 2 "),
        ({"parent": -2}, "call 1: its parent -2 "),
        ({"parent": True}, "Expected `int`, got `bool` - at `.*calls.*parent"),
        ({"parent": -1, "context_token_ids": b""}, "call 1: a root has no context"),
        ({"completion_token_ids": b"", "logprobs": b"", "spans": []}, "call 1: the completion has no tokens"),
        ({"logprobs": b"\0" * 4}, "call 1: logprobs has 1 entries for 2 tokens"),
        ({"logprobs": np.array([-1, np.nan], "<f4").tobytes()}, "call 1: a log-probability"),
        ({"logprobs": np.array([-1, -np.inf], "<f4").tobytes()}, "call 1: a log-probability"),
        ({"logprobs": np.array([-1, 0.5], "<f4").tobytes()}, "call 1: a log-probability"),
        ({"logprobs": b"\0" * 7}, "call: field 'logprobs' has 7 bytes"),
        ({"completion_token_ids": np.array([1, -2], "<i4").tobytes()}, "completion has the token id -2"),
        ({"context_token_ids": np.array([-1], "<i4").tobytes()}, "context has the token id -1"),
        ({"spans": [[3, 0, 1]]}, "call 1: spans end at 1, the completion at 2"),
        ({"spans": [[3, 1, 2]]}, "call 1: spans .* do not cover"),
        ({"spans": [[-3, 0, 2]]}, "call 1: spans .* do not cover"),
        ({"timings": {"sample": float("inf")}}, "call 1: timings .* are not finite"),
        ({"finish_reason": "tired"}, "tired.* - at `.*calls.*finish_reason"),
        ({"messages": [{"content": b"bytes"}]}, "call 1: a message"),
        ({"messages": [{"content": {"a": {1: 2}}}]}, "call 1: a message"),
        ({"answer": {"content": nested(JSON_DEPTH)}}, "call 1: a message"),
        ({"messages": [{"content": float("inf")}]}, "call 1: a message"),
        ({"schema": 2}, "episode trajectory: .*calls"),
    ],
)
def test_calls_must_agree_with_themselves_and_their_parents(change: dict[str, Any], said: str) -> None:
    fields = msgpack.unpackb(episode([call(-1, [1], [2, 3]), call(0, [4], [5, 6])]).encode())
    fields["calls"][1].update(change)
    with pytest.raises(CodecError, match=said):
        decode_trajectory(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"calls": []}, "none of its 0 calls is trained"),
        ({"calls": [{}]}, "missing required field"),
        ({"timings": {"episode": float("nan")}}, "timings .* are not finite"),
        ({"truncated": 1}, "Expected `bool`, got `int` - at `.*truncated"),
        ({"attempt": -1}, "attempt"),
    ],
)
def test_an_episode_must_have_something_to_train(change: dict[str, Any], said: str) -> None:
    fields = msgpack.unpackb(episode([call(-1, [1], [2, 3])]).encode())
    fields.update(change)
    with pytest.raises(CodecError, match=said):
        decode_trajectory(msgpack.packb(fields))


def test_the_deepest_message_that_is_taken_can_be_written_as_json() -> None:
    deep = call(-1, [1], [2], answer={"content": nested(JSON_DEPTH - 1)})
    one = episode([deep])
    assert msgspec.json.encode(decode_trajectory(one.encode()).flat().text)
    assert Call.decode(deep.encode()).answer == deep.answer
    with pytest.raises(CodecError, match="token id -1"):
        Call.decode(call(-1, [-1], [2]).encode())
