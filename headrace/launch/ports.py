"""The ports of a run's services on this machine: which are given, which are free, and which process has one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from headrace.base.addresses import LOOPBACK
from headrace.base.errors import ConfigError, ServiceError
from headrace.config import Config
from headrace.config.environments import CommandConfig
from headrace.net.service import bind, reserve

# The ports that the services of a run must know of each other; the other services choose their own.
_KNOWN = ("replay.redis_port", "replay.port", "reward.port", "reward.http_port", "trainer.port", "page.port")


def _listeners(config: Config) -> dict[str, tuple[str, int]]:
    """Return, by key, the host and port of each listener of a run on this machine."""
    found = {
        "replay.port": (config.replay.host, config.replay.port),
        "reward.port": (config.reward.host, config.reward.port),
        "reward.http_port": (config.reward.host, config.reward.http_port),
        "rollout.port": (config.rollout.host, config.rollout.port),
        "trainer.port": (config.trainer.host, config.trainer.port),
        "weight_channel.port": (config.weight_channel.host or LOOPBACK, config.weight_channel.port),
    }
    if config.page.port is not None:
        found["page.port"] = config.page.host, config.page.port
    if not config.replay.redis_url:
        found["replay.redis_port"] = config.replay.redis_host, config.replay.redis_port
    if config.has_episodes:
        found["agents.port"] = config.agents.host, config.agents.port
        found["agents.http_port"] = config.agents.host, config.agents.http_port
    return found | {f"env.{name}.port": (LOOPBACK, env.port) for name, env in config.started.items()}


def list_chosen(config: Config) -> list[str]:
    """Return the ports that `up` chooses: those that are 0, or were not given. A service that is started alone uses the default for the
    latter."""
    found = [f"env.{name}.port" for name, env in config.started.items() if env.port == 0]
    for key in _KNOWN:
        if key == "page.port" and config.page.port is None:
            continue
        section, _, name = key.partition(".")
        own = getattr(config, section)
        if getattr(own, name) == 0 or section not in config.model_fields_set or name not in own.model_fields_set:
            found.append(key)
    return found


def list_unshared(config: Config) -> list[str]:
    """Return the keys that a copy of the run, under another name, must not share with it: its ports, and credentials."""
    own = Path(config.security.credentials or "").parent.absolute() == config.run_folder.absolute()
    return [*_listeners(config), *(["security.credentials"] if own else [])]


def list_busy(config: Config) -> list[str]:
    """Return a line for each configured port that is in use."""
    lines, chosen = [], list_chosen(config)
    for key, (host, port) in _listeners(config).items():
        if port and key not in chosen:
            try:
                bind(host, port, key).close()
            except ServiceError as error:
                lines.append(f"{error}{_holder(port)}")
    return lines


@contextlib.contextmanager
def settle(config: Config) -> Iterator[tuple[Config, dict[str, socket.socket]]]:
    """Check that the configured ports are free, and choose free ones for the others that services need to know of each other. They stay
    reserved while the context is open, so that no other process gets one before its service listens, or while it is restarted. Also yields
    the sockets that reserve them, by key: only a process that inherits one can listen on its port.

    Raises `ServiceError` naming the key of a busy port and the process that uses it, `ConfigError` if several replicas would share a
    port.
    """
    if config.rollout.port and config.rollout.replicas > 1:
        raise ConfigError(
            f"rollout.port {config.rollout.port} with rollout.replicas {config.rollout.replicas}: "
            "each replica needs its own port; set rollout.port to 0"
        )
    for key, port in (("agents.port", config.agents.port), ("agents.http_port", config.agents.http_port)):
        if port and config.agents.runners > 1:
            raise ConfigError(
                f"{key} {port} with agents.runners {config.agents.runners}: each runner needs its own port; set {key} to 0"
            )
    chosen, settled, environments = list_chosen(config), dict[str, dict[str, int]](), dict(config.env)
    reserved: dict[str, socket.socket] = {}
    # a user's program doesn't know what it inherits
    of_programs = {f"env.{name}.port" for name, env in config.env.items() if isinstance(env, CommandConfig)}
    with contextlib.ExitStack() as checked, contextlib.ExitStack() as held:
        for key, (host, port) in _listeners(config).items():
            if not port and key not in chosen:
                continue
            try:
                if key in chosen and key not in of_programs:
                    sock = reserved[key] = held.enter_context(reserve(host, key))
                else:
                    sock = checked.enter_context(bind(host, port, key))
            except ServiceError as error:
                raise ServiceError(f"{error}{_holder(port)}") from error
            section, _, name = key.partition(".")
            bound = int(sock.getsockname()[1])
            if section == "env":
                name = name.removesuffix(".port")
                environments[name] = config.env[name].model_copy(update={"port": bound})
            elif key in _KNOWN:
                settled.setdefault(section, {})[name] = bound
        checked.close()
        yield config.change(**settled).model_copy(update={"env": environments}), reserved


def _holder(port: int) -> str:
    """Describe the process that listens on `port`, as the end of a message; empty if this user can't see it."""
    import psutil  # needed only for this message

    from headrace.net.listeners import listener, saved_config

    process = listener(port)
    if process is None:
        return ""
    if saved := saved_config(process):
        return f"; process {process.pid} has it, of run {saved.parent.name} in {saved.parent}"
    try:
        return f"; process {process.pid} has it ({' '.join(process.cmdline()):.80})"
    except psutil.Error:  # it has ended meanwhile, or belongs to another user
        return f"; process {process.pid} has it"
