"""Data sets and processors of the user's own: a function or class by its file, `FILE.py:NAME`, or by its path, `package.module.NAME`.

Their code runs in the trainer, and wherever the prompts are read: `headrace config check`, `headrace data show`.
"""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.environment_file import run_file
from headrace.errors import ConfigError

Row = dict[str, Any]


def processor(name: str, key: str) -> Callable[[Row, str], Row]:
    """What makes a row of a row, given its place. Raises `ConfigError` if there is no such function; so does a call that goes wrong."""
    with _blaming(key):
        function = _load(name, key)

    @_blaming(key)
    def process(row: Row, where: str) -> Row:
        try:
            made = function(row)
        except Exception as error:  # whatever the user's code raises is shown to them
            raise _raised(f"{where}: {key} {name}", error) from error
        if not isinstance(made, dict):
            raise ConfigError(
                f"{where}: {key} {name} returned {made!r:.80}, not a mapping of fields; return one for each row"
            )
        return made

    return process


def rows(name: str, arguments: dict[str, Any], key: str) -> Iterator[tuple[str, Row]]:
    """The rows of the data set that `name` makes of `arguments`, each after its place: what a call returns, or its attribute `dataset`."""
    with _blaming(key):
        made = _load(name, key)
        number = 0
        try:
            returned = made(**arguments)
            for row in getattr(returned, "dataset", returned):
                if not isinstance(row, dict):
                    raise ConfigError(
                        f"{key} {name}, row {number}: it is {row!r:.80}, not a mapping of fields; yield one for each problem"
                    )
                yield f"{key}: row {number} of {name}", row
                number += 1
        except ConfigError:
            raise
        except Exception as error:  # whatever the user's code raises is shown to them
            raise _raised(f"{key} {name}, row {number}", error) from error


@contextlib.contextmanager
def _blaming(key: str) -> Iterator[None]:
    """Errors raised inside are about `key`."""
    try:
        yield
    except ConfigError as error:
        error.key = key.rpartition(".")[2]
        raise


def _load(name: str, key: str) -> Callable[..., Any]:
    if ".py:" in name:
        file, _, attribute = name.rpartition(":")
        if not Path(file).is_file():
            raise ConfigError(
                f"{key} {name}: there is no file {file}; give it by its path from the file that names it, or from here"
            )
        module = run_file(f"{key} {name}", Path(file))
    else:
        path, _, attribute = name.rpartition(".")
        try:
            module = importlib.import_module(path)
        except Exception as error:  # whatever the user's code raises is shown to them
            remedy = f"install it, put its folder into PYTHONPATH, or name the file: FILE.py:{attribute}"
            raise ConfigError(f"{key} {name}: {path} can't be imported; {remedy}\n{_trace(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{key} {name}: {module.__file__} has no function or class {attribute}; name one that it has")
    return found


def _raised(what: str, error: Exception) -> ConfigError:
    at = traceback.extract_tb(error.__traceback__)[-1]
    # a call that its arguments don't fit ends here, where it is made
    where = "" if at.filename == __file__ else f"{at.filename}:{at.lineno} "
    return ConfigError(f"{what}: {where}raised {type(error).__name__}: {error}\n{_trace(error)}")


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
