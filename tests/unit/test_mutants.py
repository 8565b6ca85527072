"""The changes that `tests/support/mutants.py` makes of a module."""

from __future__ import annotations

import ast

from tests.support.mutants import line_of, mutants

SOURCE = """
LIMIT = 3

def clamp(a: int, most: int=LIMIT + 1) -> int:
    assert a > 0
    if a > 2 and most:
        return max(a, most)
    raise ValueError(f'{a + 1}')
"""


def test_each_change_is_in_one_place_of_a_functions_body() -> None:
    tree = ast.parse(SOURCE)
    original = ast.unparse(tree)
    found = {
        pair
        for _ in mutants(tree)
        for pair in zip(original.splitlines(), ast.unparse(tree).splitlines(), strict=False)
        if pair[0] != pair[1]
    }
    assert ast.unparse(tree) == original
    test = "    if a > 2 and most:"
    assert {new.strip() for old, new in found if old == test} == {
        "if True:", "if False:", "if a > 2 or most:", "if a > 2:", "if most:", "if a >= 2 and most:", "if a > 1 and most:",
        "if a > 3 and most:",
    }  # fmt: skip
    assert {new.strip() for old, new in found if "return" in old} == {"return None", "return min(a, most)"}
    assert {new.strip() for old, new in found if "raise" in old} == {"pass"}
    assert {old for old, _ in found} == {
        test,
        *(line for line in original.splitlines() if "return" in line or "raise" in line),
    }


def test_a_change_of_a_comprehension_has_a_line() -> None:
    tree = ast.parse("def odd(n: int) -> list[int]:\n    return [i for i in range(n) if i % 2]")
    assert {line_of(old) for old, _ in mutants(tree)} == {2}
