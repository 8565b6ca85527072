"""Checks, describes and starts the environments of a run that `headrace up` starts."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.base.addresses import LOOPBACK
from headrace.base.errors import ConfigError, Problems
from headrace.base.tls import trusting
from headrace.config import Config
from headrace.config.environments import (
    AttachedConfig,
    CommandConfig,
    EnvConfig,
    FunctionConfig,
    TargetConfig,
    VerifiersConfig,
)
from headrace.env import environment_file, program_function
from headrace.env.verifiers import program
from headrace.launch.runs import token_file
from headrace.launch.supervisor import Child, child_environ

_IMPORT_S = 120.0
# The variables that tell an environment what `headrace up` wants it to serve.
NAME, HOST, PORT, TOKEN_FILE = (f"ENVIRONMENT_{what}" for what in ("NAME", "HOST", "PORT", "TOKEN_FILE"))


def check(config: Config) -> None:
    """Refuse environments that can't start because their file, class, program, function or verifiers environment doesn't exist. Raises
    `ConfigError` naming all of them."""
    problems = Problems()
    for name, env in config.env.items():
        with problems.gathered():
            _check(name, env)
    problems.tell()


def _check(name: str, env: EnvConfig) -> None:
    match env:
        case CommandConfig(command=[called, *_]) if shutil.which(called) is None:
            raise ConfigError(f"env.{name}.command {called!r} is not a program; give its path, relative to this folder")
        case TargetConfig(is_started=True):
            try:
                environment_file.check(env.target)
            except ConfigError as error:
                raise ConfigError(f"env.{name}.target {error}") from error
        case FunctionConfig():
            where = f"env.{name}.function {env.function}"
            if problem := _import_problem(program_function.__name__, name, env.function, where=where):
                raise ConfigError(problem)
        case VerifiersConfig():
            program.check(name, env)


def check_loading(config: Config) -> None:
    """Refuse environments that `check` accepts and whose file can't be loaded, for example because it imports a package that is not
    installed. Each is loaded in its own process, as a run does. Raises `ConfigError` naming all of them."""
    problems = Problems()
    for name, env in config.started.items():
        if not isinstance(env, TargetConfig):
            continue
        try:
            environment_file.check(env.target)
        except ConfigError:
            continue
        if (problem := loading_problem(env.target)) is not None:
            problems.add(f"env.{name}.target {problem}")
    problems.tell()


def loading_problem(target: str) -> str | None:
    """Return why the environment of a file can't be loaded; None if it can."""
    return _import_problem(environment_file.__name__, target, where=target)


def _import_problem(module: str, *arguments: str, where: str) -> str | None:
    """Return why a module of Headrace can't import the user's code that `arguments` name, in its own process, as a run does, so that its
    imports can't affect this one; None if it can."""
    argv = [sys.executable, "-P", "-m", module, *arguments]
    environ = child_environ(os.environ)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_IMPORT_S, env=environ
        )
    except subprocess.TimeoutExpired:
        return f"{where}: it takes more than {_IMPORT_S:g} s to load"
    return None if done.returncode == 0 else done.stderr.strip() or f"{where}: it ended the process that loaded it"


def describe(config: Config) -> Iterator[str]:
    """Yield a line about each environment that is the user's own code."""
    for name, env in config.env.items():
        match env:
            case CommandConfig():
                yield f"environment {name}: `headrace up` starts {shlex.join(env.command)}"
            case TargetConfig(is_started=True):
                whose = environment_file.style(env.target)
                function = f", a reward function as for {whose}" if whose else ""
                yield f"environment {name}: `headrace up` serves {env.target}{function}"
            case TargetConfig():
                yield f"environment {name}: {env.target}; the run waits until it is up"
            case AttachedConfig():
                yield f"environment {name}: processes attach (`headrace.attach`); the run waits until one has"
            case FunctionConfig():
                yield f"environment {name}: the reward service runs {env.function}, in its own process"
            case VerifiersConfig():
                taskset = env.verifiers["taskset"]["id"]
                yield f"environment {name}: the reward service plays {taskset} of verifiers, in {env.python}"


def children(config: Config, logs: Path) -> dict[str, Child]:
    """Return the processes of the environments that `headrace up` starts, by name. Their ports must be settled.

    ENVIRONMENT_* variables give a program its address and the token to ask for. It trusts `security.tls_ca`, and otherwise inherits the
    user's environment.
    """
    started = {}
    trusts = trusting(config.security.tls_ca, logs.parent / "authorities.pem")
    for name, env in config.started.items():
        serves = {NAME: name, HOST: LOOPBACK, PORT: str(env.port), TOKEN_FILE: str(token_file(config, name))}
        own = child_environ(os.environ)
        if isinstance(env, CommandConfig):
            argv = env.command
            # a user's program finds its modules as it does outside a run
            own = {**own, "PYTHONSAFEPATH": os.environ.get("PYTHONSAFEPATH", "")}
            source = None
        else:
            source = environment_file.path_of(env.target)
            argv = [sys.executable, "-m", "headrace.cli", "env", "serve", env.target]
        label = f"environment-{name}"
        started[name] = Child(
            label, argv, logs / f"{label}.log", environ={**own, **trusts, **serves}, is_user_code=True, source=source
        )
    return started
