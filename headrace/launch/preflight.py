"""Checks what a configuration names before anything starts: files, models, environments, ports and metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from headrace.base.addresses import GRPC_PROXIES, target_is_local, through_proxy
from headrace.base.errors import ConfigError, ServiceError
from headrace.base.model_name import model_is_here, tokenizer_is_here
from headrace.config import Config
from headrace.config.environments import LLMJudgeConfig, TargetConfig
from headrace.config.loading import COMMAND_LINE, Loaded
from headrace.config.root import TEACHER_KEY
from headrace.env import judge_template
from headrace.launch import shell
from headrace.launch.entry_points import load_entry_point
from headrace.net import rpc
from headrace.net.credentials import Credentials, load_credentials
from headrace.run.folder import SAVED
from headrace.run.history import RECORD
from headrace.v1 import environment_pb2, environment_pb2_grpc

_PING_S = 2.0


def look(loaded: Loaded) -> list[str]:
    """Return warnings about what the configuration names. Raises `ConfigError` with one line per problem, each with its place in its
    file, or for a shell in which no run can work, and `MissingPackage` if the trainer's packages are not installed."""
    shell.check()
    named_by_data = load_entry_point("headrace.tools", "look", "trainer")
    config = loaded.config
    warnings = [*config.warnings, *_unused(loaded)]
    problems, reported = [], set[str]()
    named = [(model_is_here, *each) for each in config.models.items()]
    named += [(tokenizer_is_here, *each) for each in _tokenizers(config).items()]
    for is_here, key, name in named:
        if key in reported:
            continue
        origin = loaded.origin(tuple(key.split(".")))
        try:
            if not is_here(key, name):
                reported.add(key)
                warnings.append(
                    f"{key}: {name} is neither a local directory nor in the Hugging Face cache; it must be downloaded{origin}"
                )
        except ServiceError as error:
            reported.add(key)
            problems.append(f"{error}{origin}")
    problems += [f"{message}{loaded.origin(keys)}" for keys, message in named_by_data(config)]
    problems += _templates(loaded)
    if problems:
        raise ConfigError("\n".join(problems))
    path = config.security.credentials
    # `up` makes the file if it doesn't exist
    credentials = load_credentials(config) if path is not None and Path(path).exists() else None
    return warnings + asyncio.run(_unreachable(config, credentials))


def _unused(loaded: Loaded) -> list[str]:
    """Return a line for each environment that the file itself gives and no data set uses: its name may be misspelt. A file from which
    others inherit, or that a run saved, may have more than one run needs."""
    path = loaded.path
    if path is None or (path.name == SAVED and (path.resolve().parent / RECORD).exists()):
        return []
    origins = {name: loaded.origin(("env", name)) for name in loaded.config.unused_environments}
    return [
        f"env.{name} is never used: no data set names it (env_name), and no environment that one names does; correct its name, or leave it "
        f"out{origin}"
        for name, origin in origins.items()
        if not origin.startswith(" (") or origin.startswith((f" ({path}", f" ({COMMAND_LINE}"))
    ]


def _templates(loaded: Loaded) -> list[str]:
    """Return a line for each template of a judge that fails."""
    problems = []
    for name, env in loaded.config.env.items():
        if isinstance(env, LLMJudgeConfig):
            try:
                judge_template.check_template(name, env)
            except ConfigError as error:
                problems.append(f"{error}{loaded.origin(('env', name, 'template'))}")
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
