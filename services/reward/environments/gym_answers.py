"""Decides which answers the rules of reasoning-gym may see, after a review of the rules of all its tasks (0.1.25).

A rule that hands the answer to `eval` or sympy's `parse_expr` runs the policy's code in the process that judges it, and no sandbox makes
such a judge honest. So for these rules the answer, and the fields of the problem that are evaluated with it, must first be in a small
language. An answer that isn't counts as no answer. The same applies to rules that a short answer keeps busy for hours, or that pay for
something that is not an answer. The other rules compare text or read numbers and JSON, and see every answer.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from typing import Any

Entry = Mapping[str, Any]
Accepts = Callable[[str, Entry], bool]

_LONGEST = 20_000  # characters of an answer: a matrix of a hundred rows
# limits of an arithmetic expression: its characters, its degree (see `_degree`), the size of an exponent, and the digits of a number
_LONGEST_EXPRESSION = 4000
_LARGEST_DEGREE, _LARGEST_EXPONENT, _DIGITS = 5000, 100, 40
_LARGEST_SHIFT = 64
_EXP_DEGREE = 50

_INTEGERS = re.compile(rf"(?:\d{{1,{_DIGITS}}}(?![\w.])|[-+*/() ])*+")
_NUMBERS_AND_NAMES = re.compile(
    rf"(?:\d{{1,{_DIGITS}}}(?:\.\d{{1,{_DIGITS}}})?(?![\w.])|[A-Za-z]\w{{0,9}}|[-+*/() ])*+", re.ASCII
)
_HEXADECIMALS = re.compile(r"(?:0x[0-9a-f]{1,16}(?!\w)|<<|>>|[-+*() ])*+")
_LOGIC = re.compile(r"[A-Z\u00ac\u2227\u2228\u2192\u2194() ]{1,300}")  # not, and, or, implies, if and only if
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9]{0,9}")
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc asin acos atan acot sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs erf erfi".split()  # noqa: SIM905
)


def _list_pattern(item: str) -> str:
    return rf"\[\s*+(?:{item}\s*+(?:,\s*+{item}\s*+)*+(?:,\s*+)?)?\]"


_DIGIT, _SQUARE, _LETTER = r"-?\d{1,9}", "(?:'[Q_]'|\"[Q_]\")", "(?:'[A-E]'|\"[A-E]\")"
_NUMBER = r"'?-?\d{1,40}(?:\.\d{1,40})?'?"


def _matches(pattern: str) -> Accepts:
    compiled = re.compile(pattern, re.ASCII)
    return lambda answer, _: compiled.fullmatch(answer) is not None


def _whole_numbers(answer: str, _: Entry) -> bool:
    """Accept sums, products and quotients of whole numbers, in their plain spelling: the rule would not count another spelling as used."""
    return _arithmetic(answer, _INTEGERS)


def _antiderivative(answer: str, entry: Entry) -> bool:
    """Accept an expression without `Integral`, whose derivative is the question itself."""
    return _arithmetic(answer, _NUMBERS_AND_NAMES, {entry["metadata"]["variable"], "C", "E", "pi"}, _FUNCTIONS)


def _polynomial(answer: str, entry: Entry) -> bool:
    return _arithmetic(answer, _NUMBERS_AND_NAMES, entry["metadata"]["variables"])


def _logic(answer: str, entry: Entry) -> bool:
    """Accept formulas of the problem's own variables, because the rule tries every assignment of the variables that it finds."""
    variables = entry["metadata"]["variables"]
    return _LOGIC.fullmatch(answer) is not None and all(word in variables for word in re.findall("[A-Z]+", answer))


def _as_expected(answer: str, entry: Entry) -> bool:
    """Accept only the expected answer, because the rule treats any text as True, even the word False."""
    return answer == str(entry["answer"])


ACCEPTS: dict[str, Accepts] = {
    # evaluated by Python
    "binary_matrix": _matches(rf"[\d\s]*+|{_list_pattern(_list_pattern(_DIGIT))}"),
    "n_queens": _matches(rf"[Q_\s]*+|{_list_pattern(_list_pattern(_SQUARE))}"),
    "spiral_matrix": _matches(rf"[-\d\s]*+|{_list_pattern(_DIGIT)}"),
    "string_insertion": _matches(rf"[A-E]*+|{_list_pattern(_LETTER)}"),
    # evaluated by sympy
    "countdown": _whole_numbers,
    "puzzle24": _whole_numbers,
    "simple_integration": _antiderivative,
    "intermediate_integration": _antiderivative,
    "polynomial_multiplication": _polynomial,
    # a few characters that cost hours
    "coin_flip": _matches(r"[-+]?[\d,]{1,40}(?:\.\d{0,40})?(?:[eE][-+]?\d{1,2})?|[-+]?[\d,]{1,40}/[\d,]{1,40}"),
    "propositional_logic": _logic,
    "rubiks_cube": _matches(r"(?:\d{0,2}[^\d\s]{1,9}\d?(?:\s++|$))*+"),
    "rush_hour": _matches(r"(?:[^+-]|[+-](?!\d{3}))*+"),
    # rules that pay for something that is not an answer: not a number, any text
    "complex_arithmetic": _matches(r"[-+\d.eEijIJ() ]*+"),
    "game_of_life_halting": _as_expected,
}


def _bitwise_problem(entry: Entry) -> bool:
    problem = entry["metadata"]["problem"]
    return isinstance(problem, str) and _HEXADECIMALS.fullmatch(problem) is not None and _accepts(problem, _is_bitwise)


def _integrand(entry: Entry) -> bool:
    variable, integrand = entry["metadata"]["variable"], entry["metadata"]["integrand"]
    return (
        isinstance(variable, str)
        and _VARIABLE.fullmatch(variable) is not None
        and variable not in _FUNCTIONS
        and isinstance(integrand, str)
        and _antiderivative(integrand, entry)
    )


def _product(entry: Entry) -> bool:
    variables = entry["metadata"]["variables"]
    return (
        isinstance(variables, list)
        and all(isinstance(variable, str) and re.fullmatch("[A-Za-z]", variable) for variable in variables)
        and isinstance(entry["answer"], str)
        and _polynomial(entry["answer"], entry)
    )


def _are_sorted_numbers(entry: Entry) -> bool:
    return isinstance(entry["answer"], str) and re.fullmatch(_list_pattern(_NUMBER), entry["answer"]) is not None


# checks of the problems whose own fields are evaluated
SOUND: dict[str, Callable[[Entry], bool]] = {
    "bitwise_arithmetic": _bitwise_problem,
    "intermediate_integration": _integrand,
    "number_sorting": _are_sorted_numbers,
    "polynomial_multiplication": _product,
    "simple_integration": _integrand,
}

# Rules that compare text, or read numbers and JSON.
_COMPARING = frozenset(
    """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation boxnet caesar_cipher
    calendar_arithmetic chain_sum circuit_logic codeio color_cube_rotation count_bits count_primes course_schedule cryptarithm
    decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships figlet_font fraction_simplification futoshiki
    game_of_life gcd graph_color group_anagrams gsm_symbolic isomorphic_strings jugs kakurasu knight_swap knights_knaves
    largest_island lcm leg_counting letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku
    modulo_grid needle_haystack number_filtering number_format number_sequence palindrome_generation palindrome_partitioning
    path_star polynomial_equations pool_matrix power_function prime_factorization products quantum_lock ransom_note rearc
    rectangle_count rotate_matrix rotten_oranges self_reference sentence_reordering shortest_path simple_equations simple_geometry
    sokoban spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism time_intervals
    tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles
    """.split()  # noqa: SIM905
)
# without `composite`, whose problems are those of other tasks, by name
TASKS = _COMPARING | ACCEPTS.keys() | SOUND.keys()


def acceptable(task: str, answer: str, entry: Entry) -> bool:
    """Return whether the task's rule may see this answer to a sound problem."""
    accepts = ACCEPTS.get(task)
    return accepts is None or (len(answer) <= _LONGEST and accepts(answer, entry))


def sound(task: str, entry: Entry) -> bool:
    """Return whether the fields of a problem that the task's rule evaluates look as the task writes them."""
    check = SOUND.get(task)
    try:
        return check is None or check(entry)
    except (KeyError, TypeError):  # a field is missing or not a mapping
        return False


def _arithmetic(
    text: str, tokens: re.Pattern[str], names: Collection[str] = (), functions: Collection[str] = ()
) -> bool:
    """Return whether `text` consists of such tokens and is one expression of +, -, *, /, of these names, and of these functions of one
    argument. If `names` is given, it may also contain powers that are not too large."""

    def small(tree: ast.expr) -> bool:
        return _degree(tree, names, functions) <= _LARGEST_DEGREE

    return len(text) <= _LONGEST_EXPRESSION and tokens.fullmatch(text) is not None and _accepts(text, small)


def _accepts(text: str, check: Callable[[ast.expr], bool]) -> bool:
    """Return whether `text` is a Python expression that passes `check`. Nothing is evaluated."""
    try:
        return check(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # nesting too deep here is too deep for an evaluation as well
        return False


def _degree(tree: ast.expr, names: Collection[str], functions: Collection[str]) -> float:
    """Return a bound on how large the expression becomes when expanded. Raises `ValueError` for anything outside the language."""

    def degree(tree: ast.expr) -> float:
        match tree:
            case ast.Constant(value=bool()):
                raise ValueError("not a number")
            case ast.Constant(value=int() | float()):
                return 1
            case ast.Name(id=name) if name in names:
                return 1
            case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
                return degree(operand)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                return max(degree(left), degree(right))
            case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
                return degree(left) + degree(right)
            case ast.BinOp(left=ast.Name(id="E"), op=ast.Pow(), right=right) if "E" in names:
                return _EXP_DEGREE * degree(right)
            case ast.BinOp(left=left, op=ast.Pow(), right=right) if names:
                return degree(left) * _exponent(right)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in functions:
                return degree(argument) * (_EXP_DEGREE if name == "exp" else 1)
        raise ValueError("not in the language")

    return degree(tree)


def _exponent(tree: ast.expr) -> float:
    """Return the size of an exponent, at least 1. Raises `ValueError` unless it is a small number, or a small fraction of two numbers."""
    match tree:
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _exponent(operand)
        case ast.Constant(value=int(value)):
            size = Fraction(value)
        case ast.BinOp(left=ast.Constant(value=int(numerator)), op=ast.Div(), right=ast.Constant(value=int(divisor))):
            size = Fraction(numerator, divisor or 1)
        case _:
            raise ValueError("not a number")
    if size > _LARGEST_EXPONENT or size.denominator > _LARGEST_EXPONENT:
        raise ValueError("too large")
    return max(1.0, math.ceil(size))


def _is_bitwise(tree: ast.expr) -> bool:
    match tree:
        case ast.Constant(value=int()):
            return True
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_bitwise(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult(), right=right):
            return _is_bitwise(left) and _is_bitwise(right)
        case ast.BinOp(left=left, op=ast.LShift() | ast.RShift(), right=ast.Constant(value=int(by))):
            return by <= _LARGEST_SHIFT and _is_bitwise(left)
    return False
