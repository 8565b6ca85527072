"""A reward and a data set given as Python objects, written into the run's folder, where the run's processes find them."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import linecache
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.files import atomic_write, cannot_write
from headrace.base.python_names import global_names
from headrace.env.environment import describe_error

REWARD, DATA = "reward.py", "train"
_REMEDY = "define or import it inside, or write both into a file and give `env.NAME.target=FILE.py:NAME`"

Reward = Callable[..., Any]


def name_of(reward: Reward) -> str:
    """Return the name of a reward function or environment class. Raises `ConfigError` for anything else."""
    if not isinstance(reward, FunctionType | type):
        raise ConfigError(
            f"reward {reward!r}: give a function, or a subclass of headrace.Environment (not an object of one)"
        )
    if not reward.__name__.isidentifier():  # <lambda>
        raise ConfigError(f"reward {reward.__name__}: it has no name; write it with `def NAME(…)`")
    return reward.__name__


def target_of(reward: Reward, folder: Path) -> str:
    """Return the `target` of a reward: the file that defines it, or, if a notebook or a script does, a copy of its source in `folder`.

    Raises `ConfigError` for one whose source can't be had, or that uses something else of the notebook.
    """
    name, module = name_of(reward), sys.modules.get(reward.__module__)
    file = getattr(module, "__file__", None)
    if reward.__module__ != "__main__" and file is not None and getattr(module, name, None) is reward:
        return f"{Path(file).resolve()}:{name}"
    source = f"from __future__ import annotations\n\n{''.join(_imports(reward))}\n\n{_source(reward)}"
    _write(folder / REWARD, source.encode())
    return f"{folder / REWARD}:{name}"


def _source(reward: Reward) -> str:
    lines = _lines_of_class(reward) if isinstance(reward, type) else None
    try:
        return textwrap.dedent(lines or inspect.getsource(reward))
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"reward {reward.__name__}: its source can't be read ({error}); write it into a file and give "
            "`env.NAME.target=FILE.py:NAME`"
        ) from error


def _lines_of_class(reward: type) -> str | None:
    """Return the source of a class, which `inspect` doesn't find in a notebook; None if none of its methods has one."""
    for method in filter(lambda each: isinstance(each, FunctionType), vars(reward).values()):
        text = "".join(linecache.getlines(method.__code__.co_filename))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == reward.__name__:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
    return None


def _imports(reward: Reward) -> Iterator[str]:
    """Yield an import for each name of its module that a reward uses. Raises `ConfigError` for what can't be imported."""
    methods = vars(reward).values() if isinstance(reward, type) else (reward,)
    functions = [each for each in methods if isinstance(each, FunctionType)]
    for free in sorted({name for each in functions for name in each.__code__.co_freevars} - {"__class__"}):
        raise ConfigError(f"reward {reward.__name__}: it uses {free} of the function around it; {_REMEDY}")
    known = functions[0].__globals__ if functions else vars(sys.modules[reward.__module__])
    for name in sorted(global_names(f"from __future__ import annotations\n{_source(reward)}") - {reward.__name__}):
        if name not in known and hasattr(builtins, name):
            continue
        line = _import(name, known[name]) if name in known else None
        if line is None:
            raise ConfigError(
                f"reward {reward.__name__}: it uses {name}, which only this notebook or script has; {_REMEDY}"
            )
        yield line


def _import(name: str, value: object) -> str | None:
    if isinstance(value, ModuleType):
        return None if value.__name__ == "__main__" else f"import {value.__name__} as {name}\n"
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not own.isidentifier():
        return None
    is_there = getattr(importlib.import_module(module), own, None) is value
    return f"from {module} import {own} as {name}\n" if is_there else None


def write_data(data: Any, folder: Path) -> Path:
    """Write a data set into `folder`: the rows of a list as JSON lines, a table of pandas or `datasets` as Parquet. Returns the file.

    Raises `ConfigError` for rows that can't be written, or if the run already has other rows.
    """
    if hasattr(data, "to_parquet"):
        import io

        buffer = io.BytesIO()
        try:
            data.to_parquet(buffer, **({"index": False} if hasattr(data, "iloc") else {}))
        except ImportError:
            raise
        except Exception as error:  # pyarrow's, of any type
            raise ConfigError(
                f"data can't be written as Parquet ({describe_error(error)}); give each column values of one type, and text as its name"
            ) from error
        path, content = folder / f"{DATA}.parquet", buffer.getvalue()
    else:
        path, content = folder / f"{DATA}.jsonl", "".join(_json_lines(data)).encode()
    for other in folder.glob(f"{DATA}.*"):
        if other != path or other.read_bytes() != content:
            raise ConfigError(f"data: the run has other rows, in {other}; give another run.id")
    _write(path, content)
    return path


def name_arguments(error: str, folder: Path) -> str:
    """Return an error of the run with the arguments in the place of their files in `folder`, which are gone if it has not started."""
    file, key = rf"{re.escape(str(folder / DATA))}\.(?:jsonl|parquet)", r"data\.train(?:\[0\])?\.data_path"
    error = re.sub(rf"{file}:(\d+)", lambda line: f"data[{int(line[1]) - 1}]", error)
    error = re.sub(rf"row (\d+) of {file}", r"row \1 of data", error)
    error = re.sub(rf" \({key}\)(?: \(command line\))?", "", error)
    error = re.sub(rf"{key} {file}|{key}|{file}", "data", error)
    return error.replace(str(folder / REWARD), "reward")


def _json_lines(data: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    if not isinstance(data, Iterable) or isinstance(data, Mapping | str | bytes):
        kind = type(data).__name__
        raise ConfigError(
            f"data is of type {kind}; give a list of dicts, a DataFrame of pandas or a Dataset of datasets"
        )
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise ConfigError(f"data[{number}] is of type {type(row).__name__}; give a dict")
        try:
            yield json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n"
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data[{number}] can't be written as JSON: {error}") from error


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(path) as unfinished:
            unfinished.write_bytes(content)
    except OSError as error:
        raise cannot_write(path, error) from error
