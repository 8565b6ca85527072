"""`package.module:name`: a program named by the import path of its function. `load` imports it.

`python -m headrace.env.program_function ENVIRONMENT FUNCTION` reports what is wrong with it, and then exits with 1.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback

from headrace.base.errors import ConfigError
from headrace.env.environment import Environment


def load(name: str, function: str, episodes: int) -> Environment:
    """Return an environment whose program is this function. Modules of the working directory can be imported, after installed ones.

    Raises `ConfigError`, with the traceback of the import's exception.
    """
    where = f"env.{name}.function {function}"
    path, _, attribute = function.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(path)
    except (Exception, SystemExit) as error:
        remedy = f"install it, add its folder to PYTHONPATH, or start the run in the folder of {path.partition('.')[0]}"
        trace = "".join(traceback.format_exception(error)).rstrip()
        raise ConfigError(f"{where}: {path} can't be imported; {remedy}\n{trace}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(
            f"{where}: {getattr(module, '__file__', path)} has no function {attribute}; name an existing one"
        )
    try:
        inspect.signature(found).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: it can't be called with one argument, the episode ({error}); make it take one headrace.Episode"
        ) from error
    # a class in the function's module: its source is the build, and failures name its lines
    members = {"episode": staticmethod(found), "__module__": getattr(found, "__module__", path), "episodes": episodes}
    environment: Environment = type(attribute, (Environment,), members)()
    environment.name = name
    environment.build  # noqa: B018  # a function without a build is refused here
    return environment


if __name__ == "__main__":
    try:
        load(sys.argv[1], sys.argv[2], episodes=1)
    except ConfigError as refused:
        sys.exit(str(refused))
