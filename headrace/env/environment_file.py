"""`FILE.py:NAME`: an environment named by the file of its class, or of its reward function (`reward_function`). `check` parses the text;
`load` runs it.

`python -m headrace.env.environment_file FILE.py:NAME PORT` serves it for as long as the process that started it lives.
"""

from __future__ import annotations

import ast
import importlib.util
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType

import headrace
from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.parent import die_with_parent
from headrace.env.environment import Environment, describe_error
from headrace.env.reward_function import SIGNATURES, make_environment, signature_in, signature_text, style_of


def is_file(target: str) -> bool:
    """Whether `target` names a file, with or without a class or function, and not an address."""
    return re.fullmatch(r".+\.py(:[A-Za-z_][A-Za-z0-9_]*)?", target) is not None


def complete_target(target: str) -> str:
    """Return `FILE.py:NAME` for a `FILE.py` with one environment: a class that derives from `Environment`, and from which no other class
    in the file derives; or, in a file without such classes, a reward function. Raises `ConfigError` for none or several. The file is not
    run."""
    if not target.endswith(".py"):
        return target
    body = _parse(target, Path(target)).body
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for node in body
        if isinstance(node, ast.ClassDef)
    }
    derived = {"Environment"}
    for name, of_class in bases.items():  # a class comes after its bases
        derived |= {name} if of_class & derived else set()
    found = [name for name in bases if name in derived and not any(name in of_class for of_class in bases.values())]
    found = found or [name for name, node in _functions(body).items() if style_of(signature_in(node))]
    if not found:
        raise ConfigError(
            f"{target}: none of its classes derives from headrace.Environment ({', '.join(bases) or 'it has none'}), and it has no reward "
            f"function; derive one from it, or name one that inherits it through another file: {target}:CLASS"
        )
    if len(found) > 1:
        raise ConfigError(f"{target} has several environments: {', '.join(found)}; name one: {target}:CLASS")
    return f"{target}:{found[0]}"


def check(target: str) -> None:
    """Refuse a file that doesn't exist, is not Python, does not define the class or function, defines a function that is no reward
    function, or serves an environment as soon as it is loaded.

    Raises `ConfigError`. The file is not run.
    """
    if not is_file(target):
        raise ConfigError(f"{target} is not a Python file; give FILE.py, FILE.py:CLASS or FILE.py:FUNCTION")
    path, name = _parts(target)
    module = _parse(target, path)
    for line in _serving(module):
        raise ConfigError(
            f"{target}: line {line} of {path} serves an environment as soon as the file is loaded; delete the line, or put it under "
            '`if __name__ == "__main__":`'
        )
    names = set(_find_bound(module.body))
    if name not in names and "*" not in names:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        there = ", ".join(node.name for node in module.body if isinstance(node, kinds)) or "no class and no function"
        raise ConfigError(f"{target}: {path} does not define {name}; it defines {there}")
    function = _functions(module.body).get(name)
    # a decorator may give the function another signature, which shows when the file is loaded
    if function is not None and not function.decorator_list and style_of(signature_in(function)) is None:
        raise _no_reward_function(target, name, ast.unparse(function.args))


def style(target: str) -> str | None:
    """Return whose reward function `target` names, as far as its file tells without being run: `TRL`, `VERL`, or None."""
    path, name = _parts(target)
    function = _functions(_parse(target, path).body).get(name)
    return None if function is None else style_of(signature_in(function))


def _functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _no_reward_function(target: str, name: str, arguments: str) -> ConfigError:
    return ConfigError(f"{target}: {name}({arguments}) is no reward function that is known here. Give {SIGNATURES}")


def load(target: str) -> Environment:
    """Run the file and make an instance of the class, without arguments, or an environment of the function. Modules beside the file can be
    imported, after installed ones.

    Raises `ConfigError`, with the traceback of the file's exception.
    """
    check(target)
    path, name = _parts(target)
    module = run_file(target, path)
    made = getattr(module, name, None)
    if callable(made) and not isinstance(made, type | Environment):
        environment = make_environment(made, name, module.__name__)
        if environment is None:
            raise _no_reward_function(target, name, signature_text(made))
        return environment
    if not (isinstance(made, type) and issubclass(made, Environment)):
        raise ConfigError(
            f"{target}: {name} is {made!r:.80}, not a subclass of headrace.Environment; derive the class from it"
        )
    try:
        return made()
    except (Exception, SystemExit) as error:
        # without frames of the file, the call itself lacks arguments
        remedy = "correct its __init__" if _frames(error) else "it must take no arguments"
        raise ConfigError(f"{target}: {name}() raised {describe_error(error)}; {remedy}{_traceback(error)}") from error


def path_of(target: str) -> Path:
    return _parts(target)[0]


def _parts(target: str) -> tuple[Path, str]:
    file, _, name = target.rpartition(":")
    return Path(file), name


def _parse(target: str, path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(
            f"{target}: {path.absolute()} can't be read ({error.strerror}); give the file's path relative to this folder"
        ) from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{target}: {path} is not valid Python: {error}") from error


def run_file(target: str, path: Path) -> ModuleType:
    """Run the file that `target` names. Raises `ConfigError`, with the traceback of the file's exception."""
    file = str(path.absolute())
    specification = importlib.util.spec_from_file_location(path.stem, file)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    # under its own name, for pickle and tracebacks, unless that would hide another module
    if getattr(sys.modules.get(path.stem), "__file__", file) == file:
        sys.modules[path.stem] = module
    if (folder := str(path.absolute().parent)) not in sys.path:
        sys.path.append(folder)
    try:
        source = path.read_bytes()
        code = compile(source, file, "exec", dont_inherit=True)  # from the text just read, not from older bytecode
        text = importlib.util.decode_source(source)
        # tracebacks and the build use this text, even if the file changes
        linecache.cache[file] = len(source), None, text.splitlines(keepends=True), file
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{target}: {path} raised {describe_error(error)} when it was loaded{_traceback(error)}"
        ) from error
    return module


def _traceback(error: BaseException) -> str:
    """Return the lines to add to a message: the frames in the file itself show whose error it is."""
    frames = _frames(error)
    return "\n" + "".join(traceback.format_exception(type(error), error, frames)) if frames else ""


def _frames(error: BaseException) -> TracebackType | None:
    """Return the error's frames below this module's, if it has any."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return frame


def _find_bound(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements bind at module level; `*` for a star import."""
    for statement in body:
        match statement:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Assign() | ast.AnnAssign():
                yield from (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
            case ast.If() | ast.Try() | ast.With():
                for field in ("body", "orelse", "finalbody"):
                    yield from _find_bound(getattr(statement, field, []))
                for handler in getattr(statement, "handlers", []):
                    yield from _find_bound(handler.body)


def _serving(module: ast.Module) -> Iterator[int]:
    """Yield the lines that call `headrace.serve` at module level."""
    for statement in module.body:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="headrace"), attr="serve"))):
                yield statement.lineno


def _serve(target: str, port: str | None = None) -> None:
    """Serve the environment of a file. Without a port only load it, to see whether that works."""
    die_with_parent()
    try:
        environment = load(target)
        if port is not None:
            headrace.serve(environment, int(port))
    except HeadraceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
