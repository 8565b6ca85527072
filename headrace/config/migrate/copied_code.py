"""Parts of a Python script as a file of their own: some of its names, with the statements that make them. The script is not run."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from headrace.base.python_names import bound_names, global_names

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
# Methods that write what a script has made, and change nothing of it.
_WRITES = ("push_to", "save", "to_")


class Copy(NamedTuple):
    text: str
    missing: list[str]  # names that the text uses, and that only running the script would tell
    imported: list[tuple[str, str]]  # the imports in it: package, name


def copy_code(module: ast.Module, text: str, trainer: ast.AST | None, title: str, made: Sequence[str]) -> Copy:
    """Return a file that ends with the statements `made`, after what they need of the script that `text` is: imports, definitions, and what
    happens to their variables before the call `trainer`. `title` is its docstring."""
    needed = set[str]().union(*map(global_names, made))
    statements = [*_before(module.body, trainer)]
    elsewhere = {each.name: each for each in ast.walk(module) if isinstance(each, _DEFINITIONS)}
    taken: list[ast.stmt] = []
    while more := [each for each in _needed(statements, needed, elsewhere) if each not in taken]:
        taken += more
        needed |= set().union(*(global_names(ast.unparse(each)) for each in more))
    imports, imported, copied = [], [], []
    for statement in sorted(taken, key=lambda each: each.lineno):
        if isinstance(statement, _IMPORTS):
            for alias in statement.names:
                if _name(alias) in needed:
                    imports.append(ast.unparse(_with_name(statement, alias)))
                    origin = statement.module or "" if isinstance(statement, ast.ImportFrom) else alias.name
                    imported.append((origin.partition(".")[0], _name(alias)))
        else:
            copied.append(_source(statement, text.splitlines()))
    future = [each for each in module.body if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    head = "\n".join([f'"""{title}"""', "", *map(ast.unparse, future), *dict.fromkeys(imports)]).rstrip()
    whole = _joined([head, *dict.fromkeys(copied), *(each for each in made if not each.isidentifier())])
    missing = global_names(whole) - bound_names(whole) - set(dir(builtins)) - {"__file__"}
    return Copy(whole, sorted(missing), imported)


def _before(body: Iterable[ast.stmt], trainer: ast.AST | None) -> Iterator[ast.stmt]:
    """Yield the statements that run outside the trainer, those of the function that makes it among them."""
    for statement in body:
        if (isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)) or (
            trainer is not None and trainer in ast.walk(statement)
        ):
            yield from _before(getattr(statement, "body", []), trainer)
        else:
            yield statement


def _needed(statements: Sequence[ast.stmt], needed: set[str], elsewhere: Mapping[str, ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that make the names, or change a variable among them."""
    variables = needed - {
        name for each in statements if isinstance(each, (*_DEFINITIONS, *_IMPORTS)) for name in _bound(each)
    }
    found = set[str]()
    for statement in statements:
        bound = _bound(statement)
        found |= bound
        if bound & needed or _changed(statement) & variables or _seeds(statement) & needed:
            yield statement
    for name in needed - found:
        if name in elsewhere:
            yield elsewhere[name]


def _bound(statement: ast.stmt) -> set[str]:
    return bound_names(ast.unparse(statement))


def _changed(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement may change: it assigns a part of them, calls a method of theirs, or passes them on."""
    if isinstance(statement, (*_DEFINITIONS, ast.Assert)):
        return set()
    found = set[str]()
    for each in ast.walk(statement):
        match each:
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                found.add(_root(each))
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=method) as called, args=arguments)):
                if not method.startswith(_WRITES):
                    found |= {_root(called), *map(_root, arguments)}
            case ast.Expr(value=ast.Call(func=ast.Name(id=called), args=arguments)) if called != "print":
                found |= set(map(_root, arguments))
    return found


def _seeds(statement: ast.stmt) -> set[str]:
    """Return the module whose random numbers a statement begins anew."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="seed") as called)):
            return {_root(called)}
    return set()


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _with_name(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    if isinstance(statement, ast.ImportFrom):
        return ast.ImportFrom(statement.module, [alias], statement.level)
    return ast.Import([alias])


def _joined(parts: Sequence[str]) -> str:
    """Return the parts below each other, with blank lines around definitions."""
    text = f"{parts[0]}\n"
    for before, part in itertools.pairwise(parts):
        plain = before is not parts[0] and not re.match(r"@|(async )?def |class ", f"{part}") and "\n" not in before
        text += ("" if plain else "\n\n") + f"{part}\n"
    return text


def _source(statement: ast.stmt, lines: Sequence[str]) -> str:
    first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
    text = textwrap.dedent("\n".join(lines[first - 1 : statement.end_lineno]))
    try:
        ast.parse(text)
    except SyntaxError:  # a text of several lines in it begins further to the left
        return ast.unparse(statement)
    return text
