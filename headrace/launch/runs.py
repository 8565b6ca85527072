"""A run as the command line sees it: its id, its folder (with the resolved configuration and a lock), its ports, and its buffer."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import fcntl
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.base.addresses import LOOPBACK, replace_wildcard, with_port
from headrace.base.errors import ConfigError, PortTaken, ReplayUnavailable, ServiceError
from headrace.base.files import cannot_write, is_locked
from headrace.config import Config, load
from headrace.config.compare import diff, digest
from headrace.config.environments import CommandConfig
from headrace.config.yaml_text import dump
from headrace.launch.entry_points import load_entry_point
from headrace.net import credentials
from headrace.net.http_access import new_code
from headrace.net.service import bind, reserve
from headrace.replay import ReplayClient
from headrace.run.checkpoints import find_published
from headrace.run.folder import SAVED, resume_hint
from headrace.run.folder import load_saved as read_saved
from headrace.run.history import RECORD, RUN_LOCK, recorded
from headrace.run.journal import JOURNAL, read_bytes, read_journal
from headrace.run.start import START

_CONNECT_S = 3.0
_PORT_TRIES = 5
_SHOWN_RUNS = 5  # in an error


def new_id(name: str, now: datetime.datetime) -> str:
    """Return `<name>-<YYYYmmdd-HHMMSS>`, with only the characters that an id may have."""
    return f"{plain(name).lstrip('._-')[:48] or 'run'}-{now:%Y%m%d-%H%M%S}"


def plain(name: str) -> str:
    """Return the name without characters that the ids of runs and data sets may not have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def prepare(config_file: Path, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """Load the run's configuration. Also returns what changed in it since the run was last up. Credentials are in the run's folder unless
    the configuration gives another place.

    Raises `ConfigError` with the differences if a fixed key has changed.
    """
    config = load(config_file, overrides)
    here = config_file.resolve().parent
    own = (
        config_file.name == SAVED
        and (here / RECORD).exists()
        and not any(each.startswith("run.id=") for each in overrides)
    )
    if own and here.name != config.run.id:
        raise _renamed(here, config)
    if config.run.id is None:
        run_id = new_id(config_file.stem, datetime.datetime.now())
        return with_credentials(load(config_file, [*overrides, f"run.id={run_id}"])), []
    config = with_credentials(_with_own_credentials(config))
    saved = config.run_folder / SAVED
    if not saved.exists():
        return config, []
    before = with_credentials(_with_own_credentials(load(saved, environ={})))
    config = _with_digest(config)
    if before.run.id != config.run.id:
        raise _renamed(saved.parent, before)
    changes = [
        change
        for change in diff(before, config)
        if change.key not in _chosen(config)
        and not _is_same_path(change.before, change.after)
        and not (change.key == "run.from_environment" and change.before is None)
    ]
    fixed = [change for change in changes if not change.allowed]
    if fixed and (trained := _describe_results(before) or _describe_results(config)):
        keys = "\n".join(f"  {change}" for change in fixed)
        raise ConfigError(
            f"run {config.run.id} has {trained}, and can't continue with these keys changed; restore them, or give another run.id:\n{keys}"
        )
    return config, [str(change) for change in changes]


def _with_digest(config: Config) -> Config:
    """Return the configuration with the digest of what its fixed keys have from the environment now."""
    return config.model_copy(update={"run": config.run.model_copy(update={"from_environment": digest(config)})})


def _is_same_path(one: object, other: object) -> bool:
    return isinstance(one, str) and isinstance(other, str) and Path(one).resolve() == Path(other).resolve()


def _renamed(folder: Path, config: Config) -> ConfigError:
    return ConfigError(
        f"{folder} is the folder of run {config.run.id}, renamed or copied, and a run can continue only under its own name: "
        f"{resume_hint(config.relocate(folder))}"
    )


def _describe_results(config: Config) -> str | None:
    """Return a description of the run's training results, or None. Until there are any, no key is fixed."""
    if checkpoints := find_published(config.checkpoint_folder):
        return f"checkpoint {checkpoints[-1]}"
    trained = any(line.kind == "train" for line in read_journal(config.run_folder / JOURNAL))
    return "trained steps" if trained else None


def with_credentials(config: Config) -> Config:
    """Return the configuration with the credentials in the run's folder, unless it gives another place."""
    if config.security.credentials is not None:
        return config
    return _with(config, config.run_folder.absolute() / credentials.FILE)


def _with_own_credentials(config: Config) -> Config:
    """Return the configuration with the credentials in the run's folder if it was saved with them, wherever the folder was then."""
    saved, own = Path(config.security.credentials or ""), config.run_folder.absolute() / credentials.FILE
    is_own = (saved.parent.name, saved.name) == (config.run.id, own.name) and own.exists()
    return _with(config, own) if is_own else config


def _with(config: Config, path: Path) -> Config:
    return config.model_copy(update={"security": config.security.model_copy(update={"credentials": str(path)})})


def make_credentials(config: Config) -> None:
    """Add the missing credentials of a run, and make its folder private. Each environment that is started here gets a file with its own
    token alone. Raises `ConfigError`."""
    config.run_folder.chmod(0o700)
    # on an external server, its administrator manages the users
    names = credentials.list_roles(config, redis=config.replay.redis_url is None)
    whole = Path(config.security.credentials or "")
    credentials.complete(whole, names)
    known = credentials.Credentials(whole)
    for name in config.started:
        role = f"environment {name}"
        credentials.write(token_file(config, name), "".join(f"{role} {token}\n" for token in known.tokens(role)))


def token_file(config: Config, environment: str) -> Path:
    """Return the path of the credentials of an environment that `headrace up` starts."""
    return config.run_folder.absolute() / f"environment-{environment}.{credentials.FILE}"


def find(run: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the run in folder `run`, or with this id under `./runs`. It doesn't matter where the run was started, or
    whether its folder has moved. Raises `ConfigError` if it does not exist."""
    return load_saved(_saved(run), overrides)


def find_folder(run: str) -> Path:
    """Return the folder of the run that `find` finds. Raises `ConfigError` if it does not exist."""
    return _saved(run).parent


def load_saved(saved: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration that a run saved in its folder, which may have been moved, renamed or copied since."""
    return _with_own_credentials(read_saved(saved, overrides))


def may_be_up(config: Config) -> bool:
    """Whether some process may be running the run in its folder. For a renamed or copied folder, the listener on its ports may be the
    original."""
    folder = config.run_folder
    return folder.name == config.run.id or config.replay.redis_url is not None or is_locked(folder / RUN_LOCK)


def _saved(run: str) -> Path:
    saved = find_saved(run)
    if saved is None:
        raise ConfigError(
            f"{run} is not a run: there is no {' and no '.join(map(str, dict.fromkeys(places(run))))}{_describe_known(Path(run))}"
        )
    return saved


def _describe_known(run: Path) -> str:
    """Return the ids of the runs beside `run`, or under `./runs`, those that are spelt most like it first, as the end of a message."""
    for folder in (run.parent, Path("runs")):
        known = {path.parent.name: path.stat().st_mtime for path in folder.glob(f"*/{SAVED}")}
        if known:
            close = difflib.get_close_matches(run.name, known, _SHOWN_RUNS, 0.6)
            others = sorted(known.keys() - close, key=lambda each: known[each], reverse=True)
            shown = [*close, *others][:_SHOWN_RUNS]
            more = (
                f" and {len(known) - len(shown)} more (`headrace runs` lists them)" if len(known) > len(shown) else ""
            )
            meant = f"did you mean {shown[0]}? " if close else ""
            return f"; {meant}{folder} holds {', '.join(shown)}{more}"
    return "; `headrace runs --dir FOLDER` lists the runs of another folder"


def find_saved(run: str) -> Path | None:
    """Return the path of the saved configuration of a run; None if it is at none of its `places`."""
    return next((place for place in places(run) if place.is_file()), None)


def places(run: str) -> list[Path]:
    """Return the possible paths of a run's saved configuration. `run` is the run's folder, or its id under `./runs`."""
    return [Path(run) / SAVED, Path("runs") / run / SAVED]


def save(config: Config) -> Path:
    """Write the resolved configuration into the run's folder. Returns its absolute path."""
    path = config.run_folder.absolute() / SAVED
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    start = os.path.relpath(Path.cwd(), path.parent.resolve())
    saved = _with_digest(config)
    saved = saved.model_copy(update={"run": saved.run.model_copy(update={"started_in": start})})
    _replace(path, dump(saved).encode())
    return path


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)  # an address may hold a password
    fresh.write_bytes(data)
    fresh.rename(path)


@contextlib.contextmanager
def locked(config: Config) -> Iterator[None]:
    """Hold the run's lock. If the folder contains nothing else at the end, it is removed. Raises `ServiceError` if another process holds
    the lock."""
    folder = config.run_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / RUN_LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise cannot_write(folder, error) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().strip() or "another process"
            raise ServiceError(
                f"run {config.run.id} is already up (process {owner}); stop it first, or give another run.id"
            ) from None
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        try:
            yield
        finally:
            if folder.is_dir() and [path.name for path in folder.iterdir()] == [RUN_LOCK]:
                (folder / RUN_LOCK).unlink()
                folder.rmdir()


@contextlib.contextmanager
def refusable(config: Config) -> Iterator[None]:
    """Restore the record of the run (its configuration and its state) if a start ends before a trainer has resumed the run. A run that has
    never trained keeps what its first start wrote."""
    folder = config.run_folder
    past = read_bytes(folder / JOURNAL) if folder.is_dir() else b""
    record = {
        path: path.read_bytes() for path in (folder / SAVED, folder / RECORD, folder / START) if past and path.exists()
    }
    try:
        yield
    except BaseException:
        # a trainer that resumes notes this in the journal first
        if record and read_bytes(folder / JOURNAL) == past:
            with contextlib.suppress(OSError):  # the error that ended the start matters more
                for path, before in record.items():
                    _replace(path, before)
        raise


@contextlib.contextmanager
def unsupervised(config: Config, given: Path) -> Iterator[None]:
    """Keep the record of the run for a trainer that `up` didn't start (in a container, or by hand), so that `--run` finds it. `given` is
    the file that the trainer was started with. Raises `ServiceError`."""
    saved = config.run_folder.absolute() / SAVED
    with refusable(config):
        if given.absolute() != saved:
            try:
                save(config)
            except OSError as error:
                raise cannot_write(saved, error) from error
        with recorded(config.run_folder, SystemExit):
            yield


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


def _chosen(config: Config) -> list[str]:
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


def keys_of_a_copy(config: Config) -> dict[str, None]:
    """Return the keys that a copy of the run, under another name, must not share with it, for removal: its ports, and credentials."""
    ports = dict.fromkeys(key for key in _listeners(config))
    own = Path(config.security.credentials or "").parent.absolute() == config.run_folder.absolute()
    return ports | (dict.fromkeys(["security.credentials"]) if own else {})


def busy_ports(config: Config) -> list[str]:
    """Return a line for each configured port that is in use."""
    lines, chosen = [], _chosen(config)
    for key, (host, port) in _listeners(config).items():
        if port and key not in chosen:
            try:
                bind(host, port, key).close()
            except ServiceError as error:
                lines.append(f"{error}{_holder(port)}")
    return lines


@contextlib.contextmanager
def settled_ports(config: Config) -> Iterator[tuple[Config, dict[str, socket.socket]]]:
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
    chosen, settled, environments = _chosen(config), dict[str, dict[str, int]](), dict(config.env)
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
        sections = {section: getattr(config, section).model_copy(update=ports) for section, ports in settled.items()}
        checked.close()
        yield config.model_copy(update={**sections, "env": environments}), reserved


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


@contextlib.asynccontextmanager
async def open_buffer(config: Config, role: str = "reader") -> AsyncIterator[ReplayClient]:
    """Open a client of the run's buffer, whether the run is up or not. With `role` "operator" the client may also change the buffer.

    If the run is down, its embedded server is started from the append-only file while the context is open; the run can't be started
    meanwhile. Raises `ReplayUnavailable` if neither a server nor a file exists, `ServiceError` while another process starts the run, or if
    another build of the buffer wrote the file.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            if not may_be_up(config):
                raise ReplayUnavailable("no process of the run is alive")
            client = await ReplayClient.connect(credentials.buffer_url(config, role), config.run.id, timeout_s=0.0)
        except ReplayUnavailable:
            client = await _start_embedded(config, role, stack)
        stack.push_async_callback(client.aclose)
        yield client


async def _start_embedded(config: Config, role: str, stack: contextlib.AsyncExitStack) -> ReplayClient:
    folder = config.run_folder / "replay"
    if config.replay.redis_url is not None or not folder.is_dir():
        try:
            return await ReplayClient.connect(credentials.buffer_url(config, role), config.run.id, timeout_s=_CONNECT_S)
        except ReplayUnavailable as error:
            if config.replay.redis_url is not None:
                raise
            address = with_port(config.replay.redis_host, config.replay.redis_port)
            raise ReplayUnavailable(
                f"run {config.run.id} is not up: its buffer can't be reached at {address}, and its folder {folder} doesn't exist. "
                f"To start the run: {resume_hint(config)}"
            ) from error
    make: Any = load_entry_point("headrace.tools", "embedded-server", extra="replay")
    stack.enter_context(locked(config))
    server = await _start_on_a_free_port(lambda port: make.of(config, LOOPBACK, port))
    stack.push_async_callback(server.stop)
    try:
        moved = config.replay.model_copy(update={"redis_host": LOOPBACK, "redis_port": server.port})
        url = credentials.buffer_url(config.model_copy(update={"replay": moved}), role)
        return await ReplayClient.connect(url, config.run.id, timeout_s=0.0)
    except ReplayUnavailable as error:
        raise ServiceError(
            f"{folder} holds no buffer of run {config.run.id} that this version can read ({error}). Look at it with the version that the "
            f"run was last up with, or continue the run with this one: {resume_hint(config)}"
        ) from error


async def _start_on_a_free_port(make: Callable[[int], Any]) -> Any:
    """Start an embedded server, not on the configured port, where another run may be up. It takes the number of a port, and no socket, so
    another process may get the port first. Then another port is chosen. Raises `ServiceError`."""
    for _ in range(_PORT_TRIES):
        with bind(LOOPBACK, 0, "replay.redis_port") as free:
            server = make(free.getsockname()[1])
        with contextlib.suppress(PortTaken):
            await server.start()
            return server
    raise ServiceError(
        f"other processes took {_PORT_TRIES} free ports of {LOOPBACK} one after the other before the run's buffer could listen; try again"
    )


def page_address(config: Config, run: str | None = None) -> str:
    """Return the URL of the page that a run serves on this machine, with a new code: of itself there, or of `run`. Raises `ConfigError`."""
    assert config.page.port is not None  # the caller has seen to it
    url = page_url(config, config.page.host, config.page.port)
    return f"{url}/runs/{quote(run or config.run_folder.name)}#code={new_code(config.run_folder)}"


def tunnel(port: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the command that brings a page on this machine's `port` to the machine from which the user has logged in by SSH; None if the
    user hasn't."""
    words = environ.get("SSH_CONNECTION", "").split()
    if len(words) != 4:
        return None
    user = f"{environ['USER']}@" if environ.get("USER") else ""
    server = f" -p {words[3]}" if words[3] != "22" else ""
    return f"ssh -N -L {port}:127.0.0.1:{port}{server} {user}{words[2]}"


def page_url(config: Config, host: str, port: int) -> str:
    """Return the URL of a service's pages on this machine."""
    scheme = "http" if config.security.tls_cert is None else "https"
    return f"{scheme}://{with_port(replace_wildcard(host), port)}"
