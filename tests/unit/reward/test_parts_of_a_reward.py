"""`regex`, `format`, `length`, `repetition`, and what `math` compares besides expressions."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import Sample, Score
from headrace.config.environments import SandboxedConfig, read_environment
from headrace.env.wire import sample_to_wire
from headrace_services.reward.environments import make
from headrace_services.reward.environments.base import SandboxedEnvironment, choice, extract_answer
from headrace_services.reward.scoring_worker import score_one


def made(name: str, **options: Any) -> SandboxedEnvironment[Any]:
    env = read_environment(options)
    assert isinstance(env, SandboxedConfig)
    return make(name, env)


def scored(kind: str, completion: str = "", answer: Any = None, tokens: int = 0, **env: Any) -> Score:
    environment = made("mine", type=kind, **env)
    sample = Sample(completion, {"answer": answer}, completion_token_ids=tuple(range(tokens)), environment="mine")
    return score_one(environment, sample_to_wire(sample))


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so \\boxed{7} or \\boxed{\\frac{1}{2}}, then", "\\frac{1}{2}"),
        ("\\boxed{ 7 }", "7"),
        ("\\boxed{7} \\boxed{open", None),
        ("7", None),
    ],
)
def test_a_box_is_taken_whole(completion: str, answer: str | None) -> None:
    assert extract_answer(completion, "boxed") == answer


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("B", "B"),
        (" (C). ", "C"),
        ("**D**", "D"),
        ("Answer: B", "B"),
        ("It may be A. The answer is (C).", "C"),
        ("Answer: A\nNo. Answer: D", "D"),
        ("so \\boxed{B}", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("<answer>B</answer>", "B"),
        ("**Answer:** B", "B"),
        ("The answer is Berlin", None),
        ("the answer is b", None),
        ("A or B", None),
        ("", None),
    ],
)
def test_the_letter_of_a_choice_is_the_last_one_said(completion: str, letter: str | None) -> None:
    assert choice(completion) == letter


def test_math_compares_letters_under_multiple_choice() -> None:
    assert scored("math", "Answer: B", "B", extract="choice").reward == 1
    assert scored("math", "Answer: A", "(B)", extract="choice").reward == 0
    assert scored("math", "no idea", "B", extract="choice").reward == 0
    nothing = scored("math", "Answer: A", "42", extract="choice")
    assert (nothing.status, nothing.reward) == ("INVALID", None)
    assert "extra_env_info.answer is '42'" in nothing.message


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("3.14", 1),
        ("\\boxed{\\frac{22}{7}}", 1),
        ("3.1", 0),
        ("-3.14", 0),
        ("\\infty", 0),
        ("x", 0),
        ("", 0),
        ("nan", 0),
        ("\\{3.14, 5\\}", 0),
    ],
)
def test_math_takes_what_is_near_enough(said: str, reward: float) -> None:
    assert scored("math", said, "3.14159", tolerance=0.01).reward == reward


def test_the_tolerance_is_a_share_of_the_expected_number() -> None:
    assert scored("math", "1009", "1000", tolerance=0.01).reward == 1
    assert scored("math", "1011", "1000", tolerance=0.01).reward == 0
    assert scored("math", "0.009", "0", tolerance=0.01).reward == 1
    assert scored("math", "0.011", "0", tolerance=0.01).reward == 0
    assert scored("math", "1009", "1000").reward == 0


def test_a_regex_is_looked_for_in_what_is_extracted() -> None:
    pattern = r"^\d+ km$"
    found = scored("regex", "It is far.\n<answer>42 km</answer>", pattern=pattern, extract="answer_tag")
    assert (found.reward, found.metadata) == (1, {"found": "42 km"})
    assert scored("regex", "<answer>far</answer>", pattern=pattern, extract="answer_tag").reward == 0
    assert scored("regex", "42 km", pattern=pattern, extract="answer_tag").reward == 0
    assert scored("regex", "42 km", pattern=pattern).reward == 1


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think><answer>7</answer>", 1),
        ("\n<think></think>\n\n<answer></answer> ", 1),
        ("<answer>7</answer><think></think>", 0),
        ("<think>a</think><answer>7</answer> so", 0),
        ("well <think>a</think><answer>7</answer>", 0),
        ("<think>a</think> and <answer>7</answer>", 0),
        ("<think>a</think><answer>7</answer><answer>8</answer>", 0),
        ("<think>a<answer>7</answer></think>", 0),
        ("<think>a</think><answer>7", 0),
        ("</think><think><answer>7</answer>", 0),
        ("", 0),
    ],
)
def test_format_wants_each_tag_once_in_its_order_and_nothing_else(completion: str, reward: float) -> None:
    assert scored("format", completion).reward == reward


def test_format_takes_tags_of_ones_own() -> None:
    assert scored("format", "<plan>a</plan> <code>b</code>", tags=["plan", "code"]).reward == 1


@pytest.mark.parametrize(
    ("tokens", "reward"), [(0, 0), (5, 0), (8, 0.6), (10, 1), (20, 1), (21, 0.8), (25, 0), (99, 0)]
)
def test_length_falls_off_on_both_sides(tokens: int, reward: float) -> None:
    score = scored("length", tokens=tokens, min_tokens=10, max_tokens=20, fade_tokens=5)
    assert score.reward == pytest.approx(reward)
    assert score.metadata == {"tokens": tokens}
    assert scored("length", tokens=tokens, min_tokens=10, max_tokens=20).reward == float(10 <= tokens <= 20)


def test_length_needs_no_child() -> None:
    environment = made("brief", type="length", max_tokens=3)
    sample = Sample("x", completion_token_ids=(1, 2, 3, 4))
    assert environment.quick_score(sample) == environment.judge(sample)


@pytest.mark.parametrize(
    ("tokens", "reward"), [((1, 2, 3, 4), 1), ((1, 2, 1, 2, 1, 2), 2 / 5), ((7,) * 101, 1 / 100), ((1,), 1), ((), 1)]
)
def test_repetition_is_the_share_of_distinct_runs(tokens: tuple[int, ...], reward: float) -> None:
    environment = made("fresh", type="repetition", ngram=2)
    assert score_one(
        environment, sample_to_wire(Sample("x", completion_token_ids=tokens, environment="fresh"))
    ).reward == pytest.approx(reward)
