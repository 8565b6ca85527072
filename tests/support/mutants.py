"""Mutation testing: which changes of a module no test notices: `python -m pytest -p tests.support.mutants --mutate MODULE.py TESTS`.

Each change is tried on the tests, until one fails, in a fork of this process, which has imported everything: another comparison in the body
of a function, a number beside it, a term or a statement left out. Processes that tests start have the module as it is.
"""

from __future__ import annotations

import ast
import gc
import os
import select
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

_PAIRS = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Add, ast.Sub),
    (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mod), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or),
    ("min", "max"), ("any", "all"), ("minimum", "maximum"), ("amin", "amax"), ("floor", "ceil"), ("zeros", "ones"),
]  # fmt: skip
_OTHER = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
_LEFT_ALONE = (ast.Assert, ast.Raise, ast.JoinedStr)  # what a type checker needs, and the texts of errors
_OUTSIDE = ("annotation", "returns", "decorator_list", "args", "ctx")
_ALL_PASS, _LIMIT_S = "all pass", 300.0

Codes = dict[tuple[str, int], types.CodeType]  # of functions, by name and line


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of `node`."""
    match node:
        case ast.Compare(left, [op], right):
            yield ast.Compare(left, [_OTHER[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in _OTHER:
            yield ast.BinOp(left, _OTHER[type(op)](), right)
        case ast.BoolOp(op, [first, *others]):
            yield ast.BoolOp(_OTHER[type(op)](), [first, *others])
            yield from (first, others[0] if len(others) == 1 else ast.BoolOp(op, others))
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield from (ast.Constant(value - 1), ast.Constant(value + 1))
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.If(_, body, orelse):
            yield from (ast.If(ast.Constant(always), body, orelse) for always in (True, False))
        case ast.comprehension(target, each, [_, *others], is_async):
            yield ast.comprehension(target, each, others, is_async)
        case ast.Return(value) if value is not None:
            yield ast.Return(ast.Constant(None))
        case ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break() | ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Call(ast.Attribute(value, _), [], []):
            yield value
        case ast.Call(ast.Attribute(value, name, ctx), args, keywords) if name in _OTHER:
            yield ast.Call(ast.Attribute(value, _OTHER[name], ctx), args, keywords)
        case ast.Call(ast.Name(name, ctx), args, keywords) if name in _OTHER:
            yield ast.Call(ast.Name(_OTHER[name], ctx), args, keywords)


def mutants(node: ast.AST, inside: bool = False) -> Iterator[tuple[Any, ast.AST]]:
    """Yield each node of a function's body and what stands in its place, while it stands there."""
    for field, value in ast.iter_fields(node):
        if field in _OUTSIDE and not isinstance(node, ast.Call):
            continue
        within = inside or (field == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        children = value if isinstance(value, list) else [value]
        for place, child in enumerate(children):
            put = value.__setitem__ if isinstance(value, list) else lambda _, new: setattr(node, field, new)  # noqa: B023
            for new in _changes(child) if within else ():
                put(place, ast.copy_location(new, child))
                yield child, new
                put(place, child)
            if isinstance(child, ast.AST) and not isinstance(child, _LEFT_ALONE):
                yield from mutants(child, within)


def line_of(node: ast.AST) -> int:
    """Return the line of `node`: that of what is in it, if it has none of its own."""
    return next(each.lineno for each in ast.walk(node) if isinstance(each, ast.expr | ast.stmt))


def _codes(code: types.CodeType) -> Codes:
    """Return the code of every function in `code`, by its name and line."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    own = {(each.co_qualname, each.co_firstlineno): each for each in inner}
    return own | {key: each for of in inner for key, each in _codes(of).items()}


def _in_a_fork(work: Callable[[], str]) -> str:
    """Return the answer of `work`, done in a fork in silence; nothing if it dies or hangs."""
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        os.setsid()
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            os.write(writes, work().encode())
        finally:
            os._exit(0)
    os.close(writes)
    answer = os.read(reads, 2**16) if select.select([reads], [], [], _LIMIT_S)[0] else b""
    os.killpg(pid, signal.SIGKILL)  # the fork and the processes of the tests
    os.waitpid(pid, 0)
    os.close(reads)
    return answer.decode()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutate", type=Path, required=True, help="the module whose changes are tried")


def pytest_configure() -> None:
    # one failing case is enough, however large
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None)
    settings.load_profile("mutants")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    path: Path = session.config.getoption("mutate").resolve()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unchanged, items = _codes(compile(tree, path, "exec")), list(session.items)
    gc.unfreeze()  # what pytest imported while the collector slept
    functions = [each for each in gc.get_objects() if isinstance(each, types.FunctionType)]
    functions = [each for each in functions if each.__code__.co_filename == str(path)]

    def run(codes: Codes) -> str:
        for each in functions:
            each.__code__ = codes.get((each.__code__.co_qualname, each.__code__.co_firstlineno), each.__code__)
        for place, (item, following) in enumerate(zip(items, [*items[1:], None], strict=True)):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return str(place)
        return _ALL_PASS

    tried, left = 0, []
    assert _in_a_fork(lambda: run({})) == _ALL_PASS, "a test fails without any change"
    for old, new in mutants(tree):
        codes = _codes(compile(ast.fix_missing_locations(tree), path, "exec"))
        changed = {key: code for key, code in codes.items() if code != unchanged.get(key)}
        failed = _in_a_fork(lambda changed=changed: run(changed))
        tried += 1
        if failed == _ALL_PASS:
            left.append(f"{path.name}:{line_of(old)}: {ast.unparse(old)!r:.70} -> {ast.unparse(new)!r:.70}")
        elif failed:
            items.insert(0, items.pop(int(failed)))  # it finds the neighbours too
    sys.stdout.write("\n".join(["", *left, f"{len(left)} of {tried} changes of {path.name} were not noticed\n"]))
    return True
