"""`headrace.testing`: what an author tests an environment with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import Environment, Sample, Score
from headrace.base.errors import ConfigError
from headrace.env.kit.example_samples import read_samples
from headrace.testing import ODD_COMPLETIONS, GoldenSample, Served, sample, served

ServeEnvironment = Callable[[Environment], Served]


class Exact(Environment):
    build = "1"
    reward_min, reward_max = 0, 1

    def score(self, sample: Sample) -> float | Score:
        if "answer" not in sample.extra_env_info:
            return Score("INVALID", message="extra_env_info has no answer")
        if sample.completion == "twice":
            return 2.0
        return float(sample.completion == sample.extra_env_info["answer"])


def test_a_sample_is_as_a_run_sends_it() -> None:
    one, other = sample("5"), sample("5", {"answer": "5"}, prompt="2+3", finish_reason="length")
    assert (one.completion, one.extra_env_info, one.finish_reason) == ("5", {"answer": "4"}, "stop")
    assert (other.messages, other.finish_reason) == (({"role": "user", "content": "2+3"},), "length")
    assert one.completion_token_ids
    assert one.idempotency_key != other.idempotency_key
    assert sample(extra_env_info={}).extra_env_info == {}


def test_a_golden_episode_has_its_conversation_and_artifacts(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    line = {"completion": "4", "conversation": [*said, *said], "artifacts": {"board": [1, 2]}, "reward": 4}
    path = tmp_path / "golden.jsonl"
    path.write_text(json.dumps(line))
    (golden,) = read_samples(path)
    assert golden.sample().conversation == (*said, *said)

    class Grader(Environment):
        def score(self, sample: Sample) -> float:
            return len(sample.conversation) * float(sample.artifacts == {"board": [1, 2]})

    with served(Grader()) as grader:
        assert golden.difference(grader.score(golden.sample())[0]) is None
        assert grader.reward(sample("4")) == 0


def test_the_fixture_serves_environments_as_a_run_sees_them(serve_environment: ServeEnvironment) -> None:
    exact, other = serve_environment(Exact()), serve_environment(Exact())
    assert exact.target != other.target
    right, wrong, invalid = exact.score(sample("4"), sample("5"), sample(extra_env_info={}))
    assert (right.reward, wrong.reward) == (1, 0)
    assert (right.environment, right.build) == ("Exact", "1")
    assert (invalid.status, invalid.message) == ("INVALID", "extra_env_info has no answer")
    assert exact.reward(sample("4")) == 1
    with pytest.raises(AssertionError, match="FAILED: reward 2 is not between"):
        exact.reward(sample("twice"))


def test_it_says_what_the_check_finds_wrong() -> None:
    class Careless(Exact):
        def score(self, sample: Sample) -> float:
            return float(sample.completion or "no")

    golden = [GoldenSample(completion=text, reward=float(text)) for text in ("0", "1")]
    with served(Careless()) as careless:
        (fault,) = careless.faults(golden)
    assert fault.check == "odd completions"
    assert "could not convert string to float: 'no'" in str(fault)
    with served(Exact()) as exact:
        assert exact.faults() == []


def test_more_samples_than_it_has_room_for_are_scored_all_the_same() -> None:
    assert len(ODD_COMPLETIONS) > Exact.concurrency
    with served(Exact()) as exact:
        scores = exact.score(*map(sample, ODD_COMPLETIONS.values()), sample("4"))
    assert [score.reward for score in scores] == [0.0] * len(ODD_COMPLETIONS) + [1.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("\n", "has no samples"),
        ('{"completion": "4"}\n{"completion": 4}\n', ":2: not a sample (Expected `str`, got `int`"),
        ('{"completion": "4", "rewrad": 1}', ":1: not a sample (Object contains unknown field `rewrad`)"),
        ("{", ":1: not a sample (Input data was truncated)"),
    ],
)
def test_a_file_of_samples_that_is_none_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "samples.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_samples(file)
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(file))


@pytest.mark.parametrize(
    ("golden", "score", "difference"),
    [
        ({}, Score("SCORED", 0.3), None),
        ({"reward": 0.3}, Score("SCORED", 0.1 + 0.2), None),
        ({"reward": 0.3}, Score("SCORED", 0.0), "reward 0, not 0.3"),
        ({}, Score("FAILED", message="no"), "FAILED (no), not SCORED"),
        ({"status": "INVALID"}, Score("INVALID", message="no"), None),
        ({"components": {"format": 1}}, Score("SCORED", 1.0, {"format": 1.0, "more": 2.0}), None),
        ({"components": {"format": 1}}, Score("SCORED", 1.0, {"format": 0.5}), "component format 0.5, not 1"),
        ({"components": {"format": 1}}, Score("SCORED", 1.0), "component format is missing"),
    ],
)
def test_a_golden_sample_says_how_scores_differ(
    golden: dict[str, object], score: Score, difference: str | None
) -> None:
    assert GoldenSample(completion="4", **golden).difference(score) == difference
