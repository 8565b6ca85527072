"""Which completions a judge compares, and in which order."""

from __future__ import annotations

import collections
import json

import pytest

from headrace_services.reward.judge.comparison import in_order, pairs_with
from headrace_services.reward.judge.verdicts import Kind, NoVerdict, Scale, read_completion, verdict_in

TEXTS = [f"answer {number}" for number in range(7)]


def answered(content: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": json.dumps(content)}}]}).encode()


def test_the_order_of_a_group_is_its_own_and_stays() -> None:
    assert in_order("g", 0, TEXTS) == in_order("g", 0, reversed(TEXTS))
    assert sorted(in_order("g", 0, TEXTS)) == TEXTS
    assert in_order("g", 0, TEXTS) != in_order("g", 1, TEXTS) != in_order("h", 1, TEXTS)


def test_over_many_groups_no_place_is_any_completions() -> None:
    places = collections.Counter(in_order(f"g{group}", 0, TEXTS).index(TEXTS[0]) for group in range(1400))
    assert set(places) == set(range(7))
    assert max(places.values()) - min(places.values()) < 100


def test_equal_completions_are_shown_once() -> None:
    assert in_order("g", 0, ["a", "b", "a"]) in (["a", "b"], ["b", "a"])


@pytest.mark.parametrize(("opponents", "met"), [(1, 2), (2, 2), (3, 4), (4, 4), (6, 6), (99, 6)])
def test_all_meet_equally_many_and_a_pair_is_the_same_for_both(opponents: int, met: int) -> None:
    order = in_order("g", 0, TEXTS)
    of_each = {own: pairs_with(order, own, opponents) for own in order}
    assert {len(pairs) for pairs in of_each.values()} == {met}
    assert all(own in pair for own, pairs in of_each.items() for pair in pairs)
    every = collections.Counter(pair for pairs in of_each.values() for pair in pairs)
    assert set(every.values()) == {2}
    assert len({frozenset(pair) for pair in every}) == len(every)


def test_two_or_one_completions() -> None:
    assert pairs_with(["a", "b"], "a", 4) == pairs_with(["a", "b"], "b", 4) == [("a", "b")]
    assert pairs_with(["a"], "a", 4) == []


def test_a_completion_is_shown_first_about_as_often_as_second() -> None:
    first = [own == pair[0] for own in TEXTS for pair in pairs_with(in_order("g", 0, TEXTS), own, 6)]
    assert sum(first) * 2 == len(first)
    of_one = [pairs_with(in_order(f"g{group}", 0, TEXTS[:2]), TEXTS[0], 1)[0][0] == TEXTS[0] for group in range(400)]
    assert 150 < sum(of_one) < 250


@pytest.mark.parametrize(
    ("kind", "answer", "scores"),
    [
        ("group", {"reason": "", "scores": {"2": 1, "1": 5}}, (5, 1)),
        ("pair", {"reason": "", "better": "1"}, (1,)),
        ("pair", {"reason": "", "better": "tie"}, (0.5,)),
        ("pair", {"reason": "", "better": "2"}, (0,)),
    ],
)
def test_what_a_comparison_says(kind: Kind, answer: object, scores: tuple[float, ...]) -> None:
    assert verdict_in(read_completion(answered(answer)), Scale(1, 5), kind, 2).scores == scores


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("group", {"reason": "", "scores": {"1": 5}}),
        ("group", {"reason": "", "scores": {"1": 5, "2": 4, "3": 3}}),
        ("group", {"reason": "", "scores": {"1": 5, "2": 9}}),
        ("group", {"reason": "", "scores": [5, 4]}),
        ("group", {"reason": "", "score": 5}),
        ("pair", {"reason": "", "better": "3"}),
        ("pair", {"reason": "", "better": 1}),
        ("pair", {"reason": ""}),
    ],
)
def test_law_7_failure_is_not_zero_half_a_comparison_is_none(kind: Kind, answer: object) -> None:
    with pytest.raises(NoVerdict):
        verdict_in(read_completion(answered(answer)), Scale(1, 5), kind, 2)
