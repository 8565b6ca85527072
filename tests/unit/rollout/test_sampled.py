"""What was sampled, joined with what another replica had sampled before."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.records.trajectory import Sampling, Span, Trajectory
from headrace.replay import Lease
from headrace_services.rollout.generate import GenerationError, SampledTokens, end_at_stop, merge_spans
from tests.support.buffer import make_group


def lease(prefix: Trajectory | None = None) -> Lease:
    group = make_group(0, n=1, group_id="g", prompt_token_ids=np.array([1, 2], np.int32), sampling=Sampling(1.0, 64))
    return Lease(group, "token", 1, 0, 0, "t", "i", 15.0, 1, (0,), {0: prefix} if prefix else {})


def output(ids: list[int], logprobs_of: list[int] | None = None) -> Any:
    of = ids if logprobs_of is None else logprobs_of
    return SimpleNamespace(
        token_ids=ids, text="x" * len(ids), logprobs=SimpleNamespace(token_ids=of, logprobs=[-0.5] * len(of))
    )


def written(
    replica: str, ids: list[int], labels: list[tuple[str, int]], prefix: Trajectory | None = None
) -> Trajectory:
    sampled = SampledTokens(lease(prefix), 0, replica, clock=iter((7.0, 8.0)).__next__)
    for token in ids:
        sampled.add(output([token]))
    return sampled.record(labels, "length", "", len(sampled.ids))


def test_three_replicas_write_one_trajectory() -> None:
    one = written("one", [5, 6, 7], [("3", 0), ("4", 2)])
    two = written("two", [8], [("4", 0)], one)
    three = written("three", [9, 10], [("4", 0), ("6", 1)], two)
    assert three.completion_token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert three.writers == (("one", 0, 3), ("two", 3, 4), ("three", 4, 6))
    assert three.spans == (Span(3, 0, 2), Span(4, 2, 5), Span(6, 5, 6))
    assert (three.oldest_version, three.newest_version, three.replica) == (3, 6, "three")
    assert three.timings == {"generate_s": 3.0}
    assert three.turns == ((0, 6),)


def test_law_2_age_tokens_of_unnamed_weights_never_leave() -> None:
    for labels in ([], [("default", 0)], [("3", 0), ("default", 1)]):
        with pytest.raises(GenerationError, match="no refit has given a version"):
            written("one", [5, 6], labels)


def test_log_probabilities_of_other_tokens_are_refused() -> None:
    sampled = SampledTokens(lease(), 0, "one")
    with pytest.raises(GenerationError, match="2 sampled tokens"):
        sampled.add(output([5, 6], [5, 7]))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=6), st.integers(1, 24))
def test_joined_spans_name_the_same_version_of_every_token(runs: list[tuple[int, int]], length: int) -> None:
    spans, versions = [], []
    for version, size in runs:
        spans.append(Span(version, len(versions), len(versions) + size))
        versions += [version] * size
    whole = merge_spans(spans, length)
    assert [span.version for span in whole for _ in range(span.start, span.end)] == versions[:length]
    assert all(a.version != b.version and a.end == b.start for a, b in itertools.pairwise(whole))


@pytest.mark.parametrize(
    ("text", "begun", "stops", "length", "said"),
    [
        ("abcSTOPde", 5, ("STOP",), 7, "abc"),  # begins before the cut
        ("abcdSTOP", 2, ("STOP",), 8, "abcd"),  # after it: where the engine has found it, at the end
        ("abcdefgh", 4, ("STOP",), 8, "abcdefgh"),
        ("abXcYYd", 3, ("YY", "Xc"), 4, "ab"),  # the first of several
    ],
)
def test_a_stop_string_ends_what_was_gone_on_from(
    text: str, begun: int, stops: tuple[str, ...], length: int, said: str
) -> None:
    ids = [ord(character) for character in text]
    assert end_at_stop(lambda part: "".join(map(chr, part)), ids, begun, stops) == (length, said)
