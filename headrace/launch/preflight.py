"""Checks what a configuration names before anything starts: files, models, environments, ports and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import grpc

from headrace.base.addresses import GRPC_PROXIES, target_is_local, through_proxy
from headrace.base.errors import ConfigError, HeadraceError, MissingPackage, Problems, ServiceError
from headrace.base.model_name import MODEL, TOKENIZER
from headrace.config import Config, loading
from headrace.config.environments import LLMJudgeConfig, TargetConfig
from headrace.config.loading import InvalidConfig, Loaded
from headrace.config.references import hide_values
from headrace.config.root import TEACHER_KEY
from headrace.env.kit.example_samples import read_labels
from headrace.launch import environment_processes, shell, tracker_login
from headrace.launch.entry_points import load_entry_point
from headrace.net import rpc
from headrace.net.credentials import Credentials, load_credentials
from headrace.run.folder import SAVED
from headrace.run.history import RECORD
from headrace.run.object_store import RunStore, check_package
from headrace.v1 import environment_pb2, environment_pb2_grpc

_PING_S = 2.0


@contextlib.contextmanager
def hiding(config: Config) -> Iterator[Callable[[str], str]]:
    """Yield the function that shows what came from the environment as the expression that gives it; the error that ends the context is
    shown so, too."""
    hide = functools.partial(hide_values, references=config.references)
    try:
        yield hide
    except HeadraceError as error:
        error.args = (hide(str(error)), *error.args[1:])
        raise


def examine(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a configuration, as `headrace.config.loading.examine` does. An error also tells what is wrong with what the configuration names,
    as far as its other sections say it."""
    try:
        return loading.examine(path, overrides)
    except InvalidConfig as error:
        problems = Problems()
        problems.add(str(error))
        if error.rest is not None:
            if "env" not in error.sections:
                with problems.gathered(), hiding(error.rest.config):
                    environment_processes.check(error.rest.config)
            with problems.gathered(), contextlib.suppress(MissingPackage), hiding(error.rest.config):
                _look_at_named(error.rest, error.sections)
        raise ConfigError("\n".join(problems)) from error


def look(loaded: Loaded) -> list[str]:
    """Return warnings about what the configuration names. Raises `ConfigError` with everything that is wrong, each with its place in its
    file, or for a shell in which no run can work, and `MissingPackage` if the trainer's packages are not installed."""
    shell.check()
    config = loaded.config
    warnings = [*config.warnings, *_unused(loaded), *_look_at_named(loaded)]
    path = config.security.credentials
    # `up` makes the file if it doesn't exist
    credentials = load_credentials(config) if path is not None and Path(path).exists() else None
    return [*warnings, *asyncio.run(_unreachable(config, credentials)), *tracker_login.find_problems(config.logger)]


def _look_at_named(loaded: Loaded, without: Collection[str] = ()) -> list[str]:
    """Return warnings about models, tokenizers, metrics and data. Those that the sections in `without` name are left out."""
    named_by_data = load_entry_point("headrace.tools", "look", "trainer")
    config = loaded.config
    problems, warnings, reported = Problems(), [], set[str]()
    named = [(MODEL, *each) for each in config.models.items()]
    named += [(TOKENIZER, *each) for each in _tokenizers(config).items()]
    for kind, key, name in named:
        if key in reported or key.partition(".")[0] in without:
            continue
        origin = loaded.origin(tuple(key.split(".")))
        try:
            if not kind.is_here(key, name):
                reported.add(key)
                warnings.append(
                    f"{key}: {name} is neither a local directory nor in the Hugging Face cache; it must be downloaded{origin}"
                )
        except ServiceError as error:
            reported.add(key)
            problems.add(f"{error}{origin}")
    if "data" not in without:
        with problems.gathered():
            for keys, message in named_by_data(config):
                head, *more = message.split("\n")
                problems.add("\n".join([f"{head}{loaded.origin(keys)}", *more]))
    if "logger" not in without:
        for key, message in config.logger.missing_libraries():
            problems.add(f"{message}{loaded.origin(('logger', key))}")
    if "env" not in without:
        for message in _check_judges(loaded):
            problems.add(message)
    if config.checkpointing.store is not None and "checkpointing" not in without:
        try:
            warnings += _look_at_store(config, config.checkpointing.store)
        except MissingPackage as error:
            problems.add(f"{error}{loaded.origin(('checkpointing', 'store'))}")
    problems.tell()
    return warnings


def _unused(loaded: Loaded) -> list[str]:
    """Return a line for each environment that the file itself gives and no data set uses: its name may be misspelt. A file from which
    others inherit, or that a run saved, may have more than one run needs."""
    path = loaded.path
    if path is None or (path.name == SAVED and (path.resolve().parent / RECORD).exists()):
        return []
    return [
        f"env.{name} is never used: no data set names it (env_name), and no environment that one names does; correct its name, or leave it "
        f"out{loaded.origin(('env', name))}"
        for name in loaded.config.unused_environments
        if loaded.is_own(("env", name))
    ]


def _look_at_store(config: Config, url: str) -> list[str]:
    """Return what is wrong with the store of checkpoints, as far as this machine may use it. Raises `MissingPackage`."""
    check_package(url)
    try:
        store = None if config.run.id is None else RunStore.of(config, patient=False)
        if store is not None:
            store.try_out()
    except ServiceError as error:
        return [str(error)]
    return []


def _check_judges(loaded: Loaded) -> list[str]:
    """Return a line for each template of a judge that fails, and for each file of labels that can't be used."""
    problems = []
    for name, env in loaded.config.env.items():
        if not isinstance(env, LLMJudgeConfig):
            continue
        key = "template"
        try:
            if env.template is not None:
                load_entry_point("headrace.tools", "check-judge-template", "reward")(name, env)
            key = "calibration"
            if env.calibration is not None:
                read_labels(Path(env.calibration), env.scale)
        except ConfigError as error:
            problems.append(f"{error}{loaded.origin(('env', name, key))}")
    return problems


def _tokenizers(config: Config) -> dict[str, str]:
    """Return the tokenizers that the run loads, by key: its own, and its teacher's."""
    return dict([config.tokenizer]) | {key: name for key, name in config.models.items() if key == TEACHER_KEY}


async def _unreachable(config: Config, credentials: Credentials | None) -> list[str]:
    """Return a line for each served environment that does not answer now."""
    served = {
        name: env.target for name, env in config.env.items() if isinstance(env, TargetConfig) and not env.is_started
    }
    answers = await asyncio.gather(*(_ping(config, credentials, name, target) for name, target in served.items()))
    return [
        f"env.{name}.target {target} does not answer ({answer}); the run waits until it does"
        for (name, target), answer in zip(served.items(), answers, strict=True)
        if answer is not None
    ]


async def _ping(config: Config, credentials: Credentials | None, name: str, target: str) -> str | None:
    """Ask the environment at `target` for its description. Return None if it answers, else what is wrong."""
    channel = rpc.channel(
        target,
        security=None if target_is_local(target) else config.security,
        token=None if credentials is None else credentials.make_token_source(f"environment {name}"),
        proxied=True,
    )
    try:
        await environment_pb2_grpc.EnvironmentServiceStub(channel).Describe(
            environment_pb2.DescribeRequest(), timeout=_PING_S
        )
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:  # it answers, but does not describe itself
            return None
        return f"{error.code().name}: {error.details()}{through_proxy(target, GRPC_PROXIES)}"
    finally:
        await channel.close()
    return None
