"""A run as the command line sees it: its id, its folder (with the resolved configuration and a lock), and the addresses of its pages."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import fcntl
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from headrace.base.addresses import replace_wildcard, with_port
from headrace.base.errors import ConfigError, ServiceError
from headrace.base.files import cannot_write, is_locked, write_private
from headrace.config import Config, load
from headrace.config.compare import diff, digest
from headrace.config.yaml_text import dump
from headrace.launch.ports import list_chosen
from headrace.net import credentials
from headrace.net.http_access import new_code
from headrace.run.checkpoints import find_published
from headrace.run.folder import SAVED, resume_hint
from headrace.run.folder import load_saved as read_saved
from headrace.run.history import RECORD, RUN_LOCK, recorded
from headrace.run.journal import JOURNAL, read_bytes, read_journal
from headrace.run.start import START

_SHOWN_RUNS = 5  # in an error
# How the line begins, with the run's id, that `headrace up` prints once it holds the run; `headrace.api` waits for it.
HEADING = "run {} in "


def new_id(name: str, now: datetime.datetime) -> str:
    """Return `<name>-<YYYYmmdd-HHMMSS>`, with only the characters that an id may have."""
    return f"{plain(name).lstrip('._-')[:48] or 'run'}-{now:%Y%m%d-%H%M%S}"


@contextlib.contextmanager
def new_folder(runs: Path, name: str, now: datetime.datetime) -> Iterator[str]:
    """Make the folder of a new run under `runs`, and yield the run's id: `new_id`, with a number if another run has that one. Starts come
    within one second of each other where a script makes them. If nothing is in the folder at the end, it is removed."""
    first = new_id(name, now)
    try:
        is_first = not runs.exists()
        # first: below a link to a disk that is away, `parents` would raise FileExistsError, as for a name that is taken
        runs.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            run_id = first if number == 1 else f"{first}-{number}"
            with contextlib.suppress(FileExistsError):
                (runs / run_id).mkdir(mode=0o700)
                break
    except OSError as error:
        raise cannot_write(runs, error) from error
    try:
        yield run_id
    finally:
        with contextlib.suppress(OSError):  # it isn't empty
            with contextlib.suppress(FileNotFoundError):
                (runs / run_id).rmdir()
            if is_first:
                runs.rmdir()


def plain(name: str) -> str:
    """Return the name without characters that the ids of runs and data sets may not have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def prepare(config_file: Path, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """Load the run's configuration. Also returns what changed in it since the run was last up. Credentials are in the run's folder unless
    the configuration gives another place.

    Raises `ConfigError` with the differences if a fixed key has changed.
    """
    config = load(config_file, overrides)
    assert config.run.id is not None  # the caller has chosen one (`new_folder`)
    here = config_file.resolve().parent
    own = (
        config_file.name == SAVED
        and (here / RECORD).exists()
        and not any(each.startswith("run.id=") for each in overrides)
    )
    if own and here.name != config.run.id:
        raise _renamed(here, config)
    config = with_credentials(_with_own_credentials(config))
    saved = config.run_folder / SAVED
    if not saved.exists():
        return config, []
    before = with_credentials(_with_own_credentials(load(saved, environ={})))
    config = config.change(run={"from_environment": digest(config)})
    if before.run.id != config.run.id:
        raise _renamed(saved.parent, before)
    changes = [
        change
        for change in diff(before, config)
        if change.key not in list_chosen(config)
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
    return config.change(security={"credentials": str(config.run_folder.absolute() / credentials.FILE)})


def _with_own_credentials(config: Config) -> Config:
    """Return the configuration with the credentials in the run's folder if it was saved with them, wherever the folder was then."""
    saved, own = Path(config.security.credentials or ""), config.run_folder.absolute() / credentials.FILE
    is_own = (saved.parent.name, saved.name) == (config.run.id, own.name) and own.exists()
    return config.change(security={"credentials": str(own)}) if is_own else config


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
    saved = config.change(run={"from_environment": digest(config), "started_in": start})
    write_private(path, dump(saved).encode())
    return path


@contextlib.contextmanager
def lock(config: Config) -> Iterator[None]:
    """Hold the run's lock. If the folder contains nothing else at the end, it is removed. Raises `ServiceError` if another process holds
    the lock."""
    folder = config.run_folder
    remedy = "stop it first, or give another run.id"
    with held(folder / RUN_LOCK, f"run {config.run.id} is already up", remedy):
        try:
            yield
        finally:
            if folder.is_dir() and [path.name for path in folder.iterdir()] == [RUN_LOCK]:
                (folder / RUN_LOCK).unlink()
                folder.rmdir()


@contextlib.contextmanager
def held(path: Path, problem: str, remedy: str) -> Iterator[None]:
    """Hold the lock of a file, which names this process. If another process holds it, raise `ServiceError` with the problem, that process
    and the remedy."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise cannot_write(path.parent, error) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().strip() or "another process"
            raise ServiceError(f"{problem} (process {owner}); {remedy}") from None
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield


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
                    write_private(path, before)
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
