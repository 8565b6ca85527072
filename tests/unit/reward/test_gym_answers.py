"""Which answers, and which problems, the rules of reasoning-gym may see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from headrace import Sample
from headrace.base.tagged_json import to_json
from headrace.config.environments import ReasoningGymConfig
from headrace.env.wire import sample_to_wire
from headrace_services.reward.environments.gym_answers import ACCEPTS, SOUND, TASKS, acceptable, sound
from headrace_services.reward.environments.reasoning_gym import ReasoningGym
from headrace_services.reward.scoring_worker import score_one
from tests.support.hostile import hostile

INTEGRAL = {"answer": "x**2 + C", "metadata": {"variable": "x", "integrand": "2*x"}}
PRODUCT = {"answer": "x*y", "metadata": {"variables": ["x", "y"]}}
LOGIC = {"answer": "P", "metadata": {"variables": ["P", "Q"]}}


def test_every_task_but_those_made_of_others_has_been_looked_at() -> None:
    assert set(DATASETS) - TASKS == {"composite"}
    assert set(DATASETS) >= TASKS


@pytest.mark.parametrize(
    ("task", "answer", "entry"),
    [
        ("countdown", "6*(98 - 54) - 34 - 66", {}),
        ("countdown", "(1 + 2) / 3", {}),
        ("puzzle24", "-3*(8 - 10 + 10)", {}),
        ("simple_integration", "4*x**10/3 - 2.5*x + C", INTEGRAL),
        ("intermediate_integration", "-4*(-2*x - 8)**(3/2)/3 + C", INTEGRAL),
        ("intermediate_integration", "sqrt(pi)*erf(x)/2 + E**(2*x) - exp(x)*sin(3*x)", INTEGRAL),
        ("polynomial_multiplication", "52788*y**8 - x**2*y + 7", PRODUCT),
        ("binary_matrix", "0 1\n1 0", {}),
        ("binary_matrix", "[[0, 1], [1, 0]]", {}),
        ("n_queens", "_ Q\nQ _", {}),
        ("n_queens", "[['_', \"Q\"], ['Q', '_']]", {}),
        ("spiral_matrix", "1 2 3", {}),
        ("spiral_matrix", " ".join("7" * 6400), {}),
        ("spiral_matrix", "[1, -2, 3,]", {}),
        ("string_insertion", "ABCDE", {}),
        ("string_insertion", "['A', \"B\"]", {}),
        ("coin_flip", "3/8", {}),
        ("coin_flip", "1.25e-3", {}),
        ("propositional_logic", "(P \u2227 Q) \u2192 \u00acP", LOGIC),
        ("rubiks_cube", "U R2 F' 3Fw'", {}),
        ("rush_hour", "F+1 K+1 M-1", {}),
        ("complex_arithmetic", "-3.5 + 4i", {}),
        ("game_of_life_halting", "True", {"answer": "True"}),
        ("chain_sum", "whatever __import__", {}),
    ],
)
def test_an_answer_in_the_tasks_own_words_is_seen(task: str, answer: str, entry: dict[str, Any]) -> None:
    assert acceptable(task, answer, entry)


@pytest.mark.parametrize(
    ("task", "answer", "entry"),
    [
        ("countdown", "9**9**9", {}),
        ("countdown", "2**3", {}),
        ("countdown", "7//2", {}),
        ("countdown", "0x10 + 1", {}),
        ("countdown", "1_0 + 1", {}),
        ("countdown", "1e2 + 1", {}),
        ("countdown", "2.0 * 3", {}),
        ("countdown", "24 # 1 2 3", {}),
        ("countdown", "1, 2", {}),
        ("countdown", "1 + E", {}),
        ("countdown", "", {}),
        ("countdown", "1 +", {}),
        ("countdown", "1(2)", {}),
        ("countdown", "+".join(["1"] * 3000), {}),
        ("puzzle24", "1\n+23", {}),
        ("simple_integration", "Integral(2*x, x)", INTEGRAL),
        ("simple_integration", "y", INTEGRAL),
        ("simple_integration", "x**9**9**9", INTEGRAL),
        ("simple_integration", "x**(9**9)", INTEGRAL),
        ("simple_integration", "((x**99)**99)**99", INTEGRAL),
        ("simple_integration", "x**-1000", INTEGRAL),
        ("simple_integration", "exp(exp(exp(9)))", INTEGRAL),
        ("simple_integration", "E**(E**(E**9))", INTEGRAL),
        ("simple_integration", "x**x", INTEGRAL),
        ("simple_integration", "sin(x, evaluate=False)", INTEGRAL),
        ("simple_integration", "sin", INTEGRAL),
        ("simple_integration", "x.diff(x)", INTEGRAL),
        ("simple_integration", "x!", INTEGRAL),
        ("simple_integration", "True", INTEGRAL),
        ("simple_integration", "lambda x: x", INTEGRAL),
        ("simple_integration", "eval(x)", INTEGRAL),
        ("simple_integration", "9" * 50, INTEGRAL),
        ("polynomial_multiplication", "sin(x)", PRODUCT),
        ("polynomial_multiplication", "z", PRODUCT),
        ("binary_matrix", "[[0, 1], [1]*9]", {}),
        ("binary_matrix", "[[[0]]]", {}),
        ("binary_matrix", "[" * 4000, {}),
        ("binary_matrix", "[" + " " * 19_000, {}),
        ("binary_matrix", "0 " * 12_000, {}),
        ("n_queens", "[['Q'*9]]", {}),
        ("spiral_matrix", "range(9)", {}),
        ("string_insertion", "['A'*9]", {}),
        ("string_insertion", "['F']", {}),
        ("coin_flip", "1e999999999", {}),
        ("coin_flip", "nan", {}),
        ("propositional_logic", "a\u2227b", LOGIC),
        ("propositional_logic", "R", LOGIC),
        ("propositional_logic", "\u00ac" * 301, LOGIC),
        ("rubiks_cube", "R999999", {}),
        ("rubiks_cube", "U R99", {}),
        ("rush_hour", "A+99999999999", {}),
        ("complex_arithmetic", "nan", {}),
        ("complex_arithmetic", "inf + nan*i", {}),
        ("game_of_life_halting", "anything", {"answer": "True"}),
        ("game_of_life_halting", "False", {"answer": "True"}),
    ],
)
def test_what_is_no_answer_in_the_tasks_own_words_is_not_seen(task: str, answer: str, entry: dict[str, Any]) -> None:
    assert not acceptable(task, answer, entry)


@pytest.mark.parametrize(
    ("task", "entry"),
    [
        ("bitwise_arithmetic", {"metadata": {"problem": "__import__('os')"}}),
        ("bitwise_arithmetic", {"metadata": {"problem": "0x1 << 0xff"}}),
        ("bitwise_arithmetic", {"metadata": {"problem": "0x1 << (0x1 << 0x9)"}}),
        ("bitwise_arithmetic", {"metadata": {"problem": "(0x1)(0x2)"}}),
        ("bitwise_arithmetic", {"metadata": {"problem": 7}}),
        ("bitwise_arithmetic", {"metadata": {}}),
        ("bitwise_arithmetic", {"metadata": None}),
        ("number_sorting", {"answer": "__import__('os')"}),
        ("number_sorting", {"answer": "[1][0]"}),
        ("number_sorting", {"answer": [1]}),
        ("simple_integration", {"metadata": {"variable": "x", "integrand": "eval(x)"}}),
        ("simple_integration", {"metadata": {"variable": "sin", "integrand": "sin(sin)"}}),
        ("simple_integration", {"metadata": {"variable": "x; y", "integrand": "x"}}),
        ("simple_integration", {"metadata": {"variable": ["x"], "integrand": "x"}}),
        ("polynomial_multiplication", {"answer": "eval(x)", "metadata": {"variables": ["x"]}}),
        ("polynomial_multiplication", {"answer": "x", "metadata": {"variables": ["exit"]}}),
        ("polynomial_multiplication", {"answer": "x", "metadata": {"variables": "x"}}),
    ],
)
def test_a_problem_that_no_task_wrote_is_unsound(task: str, entry: dict[str, Any]) -> None:
    assert not sound(task, entry)


@pytest.mark.parametrize("task", sorted(SOUND))
def test_what_a_task_writes_is_sound_and_its_own_answer_is_seen(task: str) -> None:
    size = 5 if task == "intermediate_integration" else 20  # it takes long to integrate what it asks for
    for entry in reasoning_gym.create_dataset(task, size=size, seed=7):
        assert sound(task, entry), entry
        # the task itself sometimes has no better answer than the question
        assert acceptable(task, entry["answer"], entry) or "Integral" in entry["answer"], entry


@pytest.mark.parametrize("task", sorted({*ACCEPTS, *SOUND}))
def test_no_hostile_completion_earns_what_no_answer_does_not(task: str, tmp_path: Path) -> None:
    dataset = reasoning_gym.create_dataset(task, size=1, seed=3)
    entry = dataset[0]
    nothing = float(dataset.score_answer(None, entry))
    environment = ReasoningGym("gym", ReasoningGymConfig())
    info = {"task": task, "entry": to_json(entry)}
    for completion in hostile(tmp_path / "mark"):
        score = score_one(environment, sample_to_wire(Sample(completion, info, environment="gym")))
        assert score.status == "SCORED", (completion[:80], score)
        assert score.reward is not None
        assert score.reward <= max(nothing, 0.05), (completion[:80], score)
    assert not (tmp_path / "mark").exists()
