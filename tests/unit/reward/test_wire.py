"""Between protobuf and Python: what goes over comes back, and what is malformed is refused or FAILED, never a number."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Sample, Score
from headrace.base.errors import CodecError
from headrace.env.episode import EpisodeOutcome
from headrace.env.wire import (
    check_result,
    check_trajectory,
    outcome_from_wire,
    outcome_to_wire,
    sample_from_wire,
    sample_to_wire,
    score_from_wire,
    score_to_wire,
    scoring_sample,
)
from headrace.records.score import Status
from headrace.records.trajectory import Group, Trajectory
from headrace.v1 import trajectory_pb2 as pb
from tests.support.buffer import make_group
from tests.support.episodes import call, episode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab é"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xy"), inner, max_size=3),
    max_leaves=8,
)


@given(info=st.dictionaries(st.text("kl"), JSON, max_size=3))
def test_a_sample_survives_the_wire(info: dict[str, object]) -> None:
    sample = Sample(
        completion="the answer is 7 é",
        extra_env_info={"exact": 2**63 + 1, **info},
        messages=(
            {"role": "system", "content": ""},
            {"role": "user", "content": "3+4"},
            {"role": "assistant", "tool_calls": [{"id": 1}]},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ),
        completion_token_ids=(5, 6, 2**31 - 1),
        finish_reason="length",
        environment="math",
        task_name="addition",
        group_id="e0-train-1",
        index=3,
        idempotency_key="run/e0-train-1/1/3",
    )
    assert sample_from_wire(pb.Trajectory.FromString(sample_to_wire(sample).SerializeToString())) == sample


CONVERSATION = (
    {"role": "user", "content": "47+85"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "132 é"},
    {"role": "assistant", "content": "132", "reasoning": "so"},
)


@given(artifacts=st.dictionaries(st.text("kl"), JSON, max_size=3))
def test_what_an_episode_said_and_left_survives_the_wire(artifacts: dict[str, object]) -> None:
    sample = Sample(
        "132", messages=CONVERSATION[:1], environment="math", conversation=CONVERSATION, artifacts=artifacts
    )
    assert sample_from_wire(pb.Trajectory.FromString(sample_to_wire(sample).SerializeToString())) == sample


def test_a_single_completions_conversation_is_not_sent() -> None:
    sample = Sample("132", messages=CONVERSATION[:1], environment="math")
    assert sample.conversation == ({"role": "user", "content": "47+85"}, {"role": "assistant", "content": "132"})
    assert sample.artifacts == {}
    wire = sample_to_wire(sample)
    assert (list(wire.conversation), wire.artifacts_json) == ([], "")
    # of a hub that knows neither field
    assert sample_from_wire(wire) == sample


def test_a_grader_gets_an_episodes_conversation_and_artifacts() -> None:
    prompt = {"role": "user", "content": "47+85"}
    calls = [
        call(-1, [1, 2], [3, 4], messages=(prompt,), answer={"role": "assistant", "content": "Hm."}),
        call(
            0, [5], [6], messages=({"role": "tool", "content": "132"},), answer={"role": "assistant", "content": "132"}
        ),
    ]
    group = make_group(0)
    played = msgspec.structs.replace(episode(calls, group_id=group.id), artifacts={"board": [1, 2]})
    sample = scoring_sample(group, played, "run")
    assert [message["content"] for message in sample.conversation] == ["47+85", "Hm.", "132", "132"]
    assert (sample.completion, sample.artifacts) == ("132", {"board": [1, 2]})
    single = scoring_sample(group, played.flat(), "run")
    assert single.conversation == (*group.messages, {"role": "assistant", "content": "132"})
    assert single.artifacts == {}


def test_an_episode_that_said_or_left_something_else_has_another_key() -> None:
    """An environment may answer a key that it knows from memory."""
    group, said = make_group(0), {"role": "assistant", "content": "132"}

    def key(artifacts: dict[str, object], asked: str) -> str:
        calls = [call(-1, [1, 2], [3, 4], messages=({"role": "user", "content": asked},), answer=said)]
        played = msgspec.structs.replace(episode(calls, group_id=group.id), artifacts=artifacts)
        return scoring_sample(group, played, "run").idempotency_key

    assert key({"left": 1}, "47+85") == key({"left": 1}, "47+85")
    assert len({key({"left": 1}, "47+85"), key({"left": 2}, "47+85"), key({"left": 1}, "48+85")}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"finish_reason": "length"},
        {"completion_token_ids": np.array([3, 5], np.int32)},
        {"messages": ({"role": "user", "content": "48+85"},)},
        {"extra_env_info": {"answer": "133"}},
        {"task_name": "sums"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_a_grader_sees_is_part_of_the_key(change: dict[str, Any]) -> None:
    group, one = make_group(0), episode([call(-1, [1, 2], [3, 4])], group_id="e0-train-0").flat()
    key = scoring_sample(group, one, "run").idempotency_key
    of_group = {name: change[name] for name in change if name in Group.__struct_fields__}
    of_trajectory = {name: change[name] for name in change if name in Trajectory.__struct_fields__}
    other, another = msgspec.structs.replace(group, **of_group), msgspec.structs.replace(one, **of_trajectory)
    assert scoring_sample(group, one, "run").idempotency_key == key
    assert scoring_sample(other, another, "run").idempotency_key != key


def test_a_value_that_msgpack_lacks_is_refused_before_it_is_sent() -> None:
    odd = msgspec.structs.replace(make_group(0), extra_env_info={"x": object()})
    with pytest.raises(CodecError, match="sample"):
        scoring_sample(odd, episode([call(-1, [1], [2])]).flat(), "run")


@pytest.mark.parametrize("left", ["nested", "round"])
def test_artifacts_without_an_end_are_a_failure_of_the_episode(left: str) -> None:
    value: list[object] = []
    if left == "round":
        value.append(value)
    for _ in range(100_000 if left == "nested" else 0):
        value = [value]
    outcome = outcome_from_wire(outcome_to_wire(EpisodeOutcome(Score("SCORED", 1.0), {"left": value})))
    assert outcome.score is not None
    assert (outcome.score.status, outcome.artifacts) == ("FAILED", {})
    assert "artifacts is not JSON" in outcome.score.message


@pytest.mark.parametrize(
    "score",
    [
        Score("SCORED", 0.0, environment="e", build="1"),
        Score("SCORED", 0.1, {"format": 0.5, "answer": -2.0}, {"n": 2**70, "steps": [1, "é"]}),
        Score("TIMED_OUT", message="late"),
        Score("INVALID", message="no"),
        Score("FAILED", message="KeyError", metadata={"seen": 1}, traceback="line 3 é"),
    ],
)
def test_a_score_survives_the_wire(score: Score) -> None:
    assert score_from_wire(pb.Result.FromString(score_to_wire(score).SerializeToString())) == score


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (pb.Result(status=pb.STATUS_SCORED), "without a reward"),
        (pb.Result(status=pb.STATUS_SCORED, reward=float("nan")), "reward is nan"),
        (pb.Result(status=pb.STATUS_SCORED, reward=float("inf")), "reward is inf"),
        (pb.Result(status=pb.STATUS_SCORED, reward=1, components={"a": float("nan")}), "component 'a' is nan"),
        (pb.Result(status=pb.STATUS_SCORED, reward=-1.7e308), "reward is -1.7e+308, and is to be between"),
        (pb.Result(status=pb.STATUS_SCORED, reward=1, metadata_json='{"a": 1e400}'), "1e400, larger than a float64"),
        (pb.Result(status=pb.STATUS_SCORED, reward=1, metadata_json="["), "metadata_json is not JSON"),
        (pb.Result(status=pb.STATUS_SCORED, reward=1, metadata_json="[]"), "not an object"),
        (pb.Result(status=pb.STATUS_UNSPECIFIED, reward=1), ""),
    ],
)
def test_law_7_failure_is_not_zero_a_result_off_contract_is_failed(result: pb.Result, words: str) -> None:
    score = score_from_wire(result)
    assert (score.status, score.reward) == ("FAILED", None)
    assert words in score.message
    assert score_from_wire(check_result(result)) == score
    assert not check_result(result).HasField("reward")


@pytest.mark.parametrize(
    "result",
    [
        pb.Result(status=pb.STATUS_SCORED, reward=0, metadata_json='{ "n": 1 }', took_ms=2, build="1"),
        pb.Result(status=pb.STATUS_INVALID, message="no answer", environment="mine"),
        pb.Result(status=pb.STATUS_FAILED),
    ],
)
def test_a_result_of_another_process_is_passed_on_as_it_is(result: pb.Result) -> None:
    assert check_result(result, 0, 1) is result


@pytest.mark.parametrize(
    "result",
    [
        pb.Result(status=pb.STATUS_SCORED, reward=2, build="1"),
        pb.Result(status=pb.STATUS_FAILED, reward=1, build="1"),
        pb.Result(status=pb.STATUS_FAILED, metadata_json="[", build="1"),
        pb.Result(status=pb.STATUS_INVALID, took_ms=-1, build="1"),
    ],
)
def test_law_7_failure_is_not_zero_a_wrong_answer_is_failed(result: pb.Result) -> None:
    passed = check_result(result, 0, 1)
    assert (passed.status, passed.HasField("reward"), passed.build) == (pb.STATUS_FAILED, False, "1")
    assert score_from_wire(passed).status == "FAILED"
    assert passed.metadata_json in ("", "{}")


@pytest.mark.parametrize("metadata", [{"x": object()}, {"x": float("nan")}, {"x": {1, 2}}])
def test_law_7_failure_is_not_zero_an_unsendable_score_is_failed(metadata: dict[str, object]) -> None:
    result = score_to_wire(Score("SCORED", 1.0, metadata=metadata, environment="mine"))
    assert result.status == pb.STATUS_FAILED
    assert not result.HasField("reward")
    assert result.environment == "mine"
    assert "can't be sent" in result.message


def _trajectory(**changes: object) -> pb.Trajectory:
    fields = {"group_id": "g", "index": 1, "environment": "math", "finish_reason": pb.FINISH_REASON_STOP, **changes}
    return pb.Trajectory(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trajectory", "words"),
    [
        (_trajectory(finish_reason=0), "finish_reason is 0"),
        (_trajectory(finish_reason=9), "finish_reason is 9"),
        (_trajectory(environment=""), "environment is empty"),
        (_trajectory(extra_env_info_json="{"), "extra_env_info_json is not JSON"),
        (_trajectory(extra_env_info_json="7"), "a JSON int, not an object"),
        (_trajectory(extra_env_info_json="[" * 100_000), "extra_env_info_json is not JSON"),
        (_trajectory(messages=[pb.ChatMessage(role="user", extra_json="x")]), "extra_json of a message is not JSON"),
        (_trajectory(conversation=[pb.ChatMessage(extra_json="x")]), "extra_json of a message is not JSON"),
        (_trajectory(artifacts_json="{"), "artifacts_json is not JSON"),
        (_trajectory(artifacts_json="[]"), "artifacts_json is a JSON list, not an object"),
    ],
)
def test_a_malformed_trajectory_is_refused_by_name(trajectory: pb.Trajectory, words: str) -> None:
    for refuses in (sample_from_wire, check_trajectory):
        with pytest.raises(CodecError, match=r"trajectory 'g'\[1\]") as refusal:
            refuses(trajectory)
        assert words in str(refusal.value)


@pytest.mark.parametrize("info", [{"x": float("nan")}, {"x": object()}])
def test_what_json_cannot_carry_is_not_sent(info: dict[str, object]) -> None:
    with pytest.raises(CodecError, match="extra_env_info is not JSON"):
        sample_to_wire(Sample("c", info))
    with pytest.raises(CodecError, match="artifacts is not JSON"):
        sample_to_wire(Sample("c", artifacts=info))


@pytest.mark.parametrize("status", ["NOT_STARTED", "INTERRUPTED"])
def test_what_was_not_begun_or_cut_off_stays_apart_from_a_failure(status: Status) -> None:
    assert score_from_wire(score_to_wire(Score(status, message="away"))) == Score(status, message="away")


def test_what_an_environment_says_it_took_is_kept() -> None:
    score = Score("SCORED", 1.0, timings={"environment": 0.25})
    assert score_to_wire(score).took_ms == 250
    assert score_from_wire(score_to_wire(score)) == score
    assert not score_to_wire(Score("SCORED", 1.0)).HasField("took_ms")


@pytest.mark.parametrize("took_ms", [-1.0, math.nan, math.inf])
def test_a_time_that_is_none_breaks_the_contract(took_ms: float) -> None:
    score = score_from_wire(pb.Result(status=pb.STATUS_SCORED, reward=1.0, took_ms=took_ms))
    assert (score.status, score.timings) == ("FAILED", {})
    assert f"took_ms {took_ms}" in score.message


def test_law_7_failure_is_not_zero_a_status_not_its_own_is_failed() -> None:
    assert score_from_wire(score_to_wire(Score("UNSENDABLE", message="mine"))).status == "FAILED"


@pytest.mark.parametrize("field", ["environment", "build"])
def test_a_name_that_no_record_can_keep_fails_its_score(field: str) -> None:
    score = score_from_wire(pb.Result(status=pb.STATUS_SCORED, reward=1.0, **{field: "é" * 129}))
    assert (score.status, score.reward) == ("FAILED", None)
    assert f"the environment returned {field} 'ééé" in score.message
    assert len(score.encode()) < 1000
