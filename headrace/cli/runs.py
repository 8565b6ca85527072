"""A run as the command line sees it: its id, its folder with the resolved configuration and a lock, its ports, and its buffer."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace import credentials
from headrace.cli.common import load_entry_point
from headrace.config import Config, load
from headrace.config.compare import diff
from headrace.config.text import dump
from headrace.errors import ConfigError, ReplayUnavailable, ServiceError
from headrace.replay import ReplayClient
from headrace.service import bind

SAVED = "config.yaml"
_CONNECT_S = 3.0


def new_id(config_file: Path, now: datetime.datetime) -> str:
    """`<stem of the file>-<YYYYmmdd-HHMMSS>`."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", config_file.stem).lstrip("._-")[:48] or "run"
    return f"{stem}-{now:%Y%m%d-%H%M%S}"


def prepare(config_file: Path, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """Load the run's configuration; also returns what changed in it since the run was last up. Credentials lie in the run's folder unless
    the configuration says where.

    Raises `ConfigError` with the diff if a key differs that may not change.
    """
    config = load(config_file, overrides)
    if config.run.id is None:
        run_id = new_id(config_file, datetime.datetime.now())
        return _with_credentials(load(config_file, [*overrides, f"run.id={run_id}"])), []
    config = _with_credentials(config)
    saved = config.run_folder / SAVED
    if not saved.exists():
        return config, []
    changes = diff(_with_credentials(load(saved, environ={})), config)
    fixed = [change for change in changes if not change.allowed]
    if fixed:
        keys = "\n".join(f"  {change}" for change in fixed)
        raise ConfigError(
            f"run {config.run.id} can't go on with these keys changed; set them back, or take another run.id:\n{keys}"
        )
    return config, [str(change) for change in changes]


def _with_credentials(config: Config) -> Config:
    if config.security.credentials is not None:
        return config
    path = config.run_folder.absolute() / credentials.FILE
    return config.model_copy(update={"security": config.security.model_copy(update={"credentials": str(path)})})


def make_credentials(config: Config) -> None:
    """Add what the credentials of a run lack, and keep others out of its folder. Raises `ConfigError`."""
    config.run_folder.chmod(0o700)
    # the users of a server that isn't ours are its administrator's
    names = credentials.names_of(config, redis=config.replay.redis_url is None)
    credentials.complete(Path(config.security.credentials or ""), names)


def find(run: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of the run in folder `run`, or with this id under `./runs`. Raises `ConfigError` if there is none."""
    places = [Path(run) / SAVED, Path("runs") / run / SAVED]
    for saved in places:
        if saved.is_file():
            return load(saved, overrides)
    raise ConfigError(f"--run {run}: no run there; there is neither {places[0]} nor {places[1]}")


def save(config: Config) -> Path:
    """Write the resolved configuration into the run's folder; returns its absolute path."""
    path = config.run_folder.absolute() / SAVED
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)  # an address may hold a password
    fresh.write_text(dump(config), encoding="utf-8")
    fresh.rename(path)
    return path


def save_unsupervised(config: Config, given: Path) -> None:
    """Save the configuration of a trainer that `up` didn't start (in a container, or by hand), so that `--run` finds it.

    Does nothing if `given`, the file that the trainer was started with, is the saved one. Raises `ServiceError`.
    """
    saved = config.run_folder.absolute() / SAVED
    if given.absolute() == saved:
        return
    try:
        save(config)
    except OSError as error:
        raise ServiceError(f"run.dir: can't write {saved} ({error.strerror}); give a folder you may write") from error


@contextlib.contextmanager
def locked(config: Config) -> Iterator[None]:
    """Hold the run's lock. Raises `ServiceError` if another process holds it."""
    folder = config.run_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise ServiceError(f"run.dir: can't write {folder} ({error.strerror}); give a folder you may write") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().strip() or "another process"
            raise ServiceError(
                f"run {config.run.id} is already up (process {owner}); stop it first, or take another run.id"
            ) from None
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield


def settle_ports(config: Config) -> Config:
    """Check that the configured ports are free, and replace a 0 by a free port wherever other services need to know it.

    Raises `ServiceError` naming the key of a busy port, `ConfigError` if several replicas would share one.
    """
    if config.rollout.port and config.rollout.replicas > 1:
        raise ConfigError(
            f"rollout.port {config.rollout.port} with rollout.replicas {config.rollout.replicas}: "
            "each replica needs a port of its own; set rollout.port to 0"
        )
    with contextlib.ExitStack() as held:

        def take(host: str, port: int, key: str) -> int:
            sock: socket.socket = held.enter_context(bind(host, port, key))
            return int(sock.getsockname()[1])

        replay, reward, trainer = config.replay, config.reward, config.trainer
        if replay.redis_url is None:
            take(replay.redis_host, replay.redis_port, "replay.redis_port")
        if config.rollout.port:
            take(config.rollout.host, config.rollout.port, "rollout.port")
        if config.weight_channel.port:
            take(config.weight_channel.host, config.weight_channel.port, "weight_channel.port")
        settled = {
            "replay": replay.model_copy(update={"port": take(replay.host, replay.port, "replay.port")}),
            "reward": reward.model_copy(
                update={
                    "port": take(reward.host, reward.port, "reward.port"),
                    "http_port": take(reward.host, reward.http_port, "reward.http_port"),
                }
            ),
            "trainer": trainer.model_copy(update={"port": take(trainer.host, trainer.port, "trainer.port")}),
        }
    return config.model_copy(update=settled)


@contextlib.asynccontextmanager
async def open_buffer(config: Config, role: str = "reader") -> AsyncIterator[ReplayClient]:
    """A client of the run's buffer, whether the run is up or not. With `role` "operator" it may also change something.

    If the run is down, its embedded server is started from the append-only file for as long as the context is open; the run
    can't be started meanwhile. Raises `ReplayUnavailable` if there is neither, `ServiceError` while another process starts the run.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await ReplayClient.connect(credentials.buffer_url(config, role), config.run.id, timeout_s=0.0)
        except ReplayUnavailable:
            client = await _start_embedded(config, role, stack)
        stack.push_async_callback(client.aclose)
        yield client


async def _start_embedded(config: Config, role: str, stack: contextlib.AsyncExitStack) -> ReplayClient:
    folder = config.run_folder / "replay"
    if config.replay.redis_url is not None or not folder.is_dir():
        return await ReplayClient.connect(credentials.buffer_url(config, role), config.run.id, timeout_s=_CONNECT_S)
    make: Any = load_entry_point("headrace.tools", "embedded-server", extra="replay")
    stack.enter_context(locked(config))
    # a port of its own: another run may be up on the configured one
    with bind("127.0.0.1", 0, "replay.redis_port") as free:
        port = free.getsockname()[1]
    server = make.of(config, "127.0.0.1", port)
    stack.push_async_callback(server.stop)
    await server.start()
    try:
        moved = config.replay.model_copy(update={"redis_host": "127.0.0.1", "redis_port": port})
        url = credentials.buffer_url(config.model_copy(update={"replay": moved}), role)
        return await ReplayClient.connect(url, config.run.id, timeout_s=0.0)
    except ReplayUnavailable as error:
        raise ServiceError(f"{folder} holds no buffer of run {config.run.id}; was the run ever up?") from error
