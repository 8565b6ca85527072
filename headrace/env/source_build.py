"""The build of an environment that names none: a digest of its source, so that an edit is another build."""

from __future__ import annotations

import hashlib
import inspect
import json
import linecache
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.base.errors import ConfigError

_DIGITS = 12


def source_build(environment: object, base: type) -> str:
    """Return twelve hexadecimal digits: the digest of the files or notebook cells that define the methods of the environment's class, and
    of the classes between it and `base`, and of its attributes that are JSON, which its constructor set. The same code has the same build
    on every machine.

    Raises `ConfigError` if there is no source: for a class that was typed into an interpreter, or made by `exec`.
    """
    made = type(environment)
    own = [each for each in made.__mro__ if each not in base.__mro__] or [base]
    sources = dict.fromkeys(source for each in own for source in _sources(each))
    if not sources:
        raise ConfigError(
            f"{made.__qualname__}: its source can't be found, so two versions of it could not be distinguished; define it in a file or a "
            f'notebook cell, or name the version: class {made.__name__}: build = "1"'
        )
    return digest_texts((*sources, *sorted(_attributes(vars(environment)))))


def digest_texts(parts: Iterable[str]) -> str:
    """Return twelve hexadecimal digits: the digest of these texts, in order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()[:_DIGITS]


def _sources(made: type) -> Iterator[str]:
    """Yield the text in which the class was defined. IPython keeps a cell, and `environment_file` a file, as they were when they were
    run."""
    functions = [inspect.unwrap(getattr(value, "__func__", value)) for value in vars(made).values()]
    files = {
        each.__code__.co_filename
        for each in functions
        if inspect.isfunction(each) and each.__module__ == made.__module__
    }
    if not files:
        files = {getattr(sys.modules.get(made.__module__), "__file__", None) or ""}
    yield from filter(None, ("".join(linecache.getlines(file)) for file in sorted(files)))


def _attributes(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        try:
            yield f"{name}={json.dumps(value, sort_keys=True)}"
        except (TypeError, ValueError, RecursionError):  # a client, a lock, a model: not a setting
            continue
