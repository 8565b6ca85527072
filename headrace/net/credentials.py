"""Credentials: a file with a line `ROLE TOKEN` for each token.

    operator Rk9V…                 everything over HTTP
    reader 4gXq…                   reading over HTTP
    scorer Zn2c…                   RewardService.Score of the reward hub
    agents 8vTd…                   RewardService.RunEpisode of the reward hub, and calls of replicas; in a run with episodes
    rollout 5xLm…                  what a replica has pulled of the weights; in a run with `checkpointing.store`
    environment math 0PfQ…         the process that serves environment `math` (env.math.target)
    redis trainer Yt7b…            password of the buffer's user RUN-trainer; likewise replay, rollout, agents, operator, reader, up, admin

A file contains what its reader needs: for a service, the tokens that it accepts; for a caller, the token that it presents. Of several
tokens of one role all are accepted, and the first is presented. To replace a token, add the new line above the old one everywhere, then
delete the old line. The file is read again when it changes.
"""

from __future__ import annotations

import functools
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from headrace.base.errors import ConfigError, UnusableFile
from headrace.base.files import signature
from headrace.base.scratch import scratch_folder

if TYPE_CHECKING:
    from headrace.config import Config

FILE = "credentials"
REDIS_ROLES = ("replay", "trainer", "rollout", "agents", "operator", "reader", "up", "admin")

_log = logging.getLogger("headrace.security")


class Credentials:
    """The tokens in a file."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises `ConfigError` if it can't be used."""
        self.path = path
        self._signature = signature(path)
        self._lines = _read(path)
        self._presented: dict[str, str] = {}  # by role
        if path.stat().st_mode & 0o004:
            _log.warning("security.credentials %s can be read by everybody on this machine; chmod 600 it", path)

    def tokens(self, role: str) -> list[str]:
        return [token for name, token in self._current() if name == role]

    def token(self, role: str) -> str:
        """Return the token that a caller of this role presents. While the file has none (it is being replaced), it is the last that it had:
        who accepts tokens decides whether that still counts. Raises `ConfigError` if it never had one."""
        if found := self.tokens(role):
            self._presented[role] = found[0]
        if role not in self._presented:
            raise UnusableFile(
                f"security.credentials {self.path} has no line for {role!r}; add `{role} TOKEN` (`headrace credentials` makes tokens)"
            )
        return self._presented[role]

    def make_token_source(self, role: str) -> Callable[[], str] | None:
        """Return a function that gives a caller of this role its token for each call; None without a token for the role."""
        if not self.tokens(role):
            return None
        self.token(role)  # it may be gone when the first call needs it
        return functools.partial(self.token, role)

    def role(self, token: str) -> str | None:
        """Return the role of a presented token; None if it is unknown. Takes the same time for every wrong token."""
        presented = token.encode()
        matching = [name for name, known in self._current() if hmac.compare_digest(known.encode(), presented)]
        return matching[0] if matching else None

    @property
    def has_redis_users(self) -> bool:
        return any(name.startswith("redis ") for name, _ in self._current())

    def _current(self) -> list[tuple[str, str]]:
        """Return the present lines of the file: none while it can't be read, so that revoked tokens stay revoked."""
        if (found := signature(self.path)) != self._signature:
            self._signature = found
            try:
                self._lines = _read(self.path)
                _log.info("security.credentials %s was read again", self.path)
            except ConfigError as error:
                self._lines = []
                _log.error("%s; until then every token is refused", error)
        return self._lines


def load_credentials(config: Config) -> Credentials | None:
    """Return the credentials that the configuration names, if any. Raises `ConfigError` if they can't be used."""
    path = config.security.credentials
    return None if path is None else Credentials(Path(path))


def make_token_source(config: Config, role: str) -> Callable[[], str] | None:
    """Return what `Credentials.make_token_source` does; None without credentials. Raises as `load_credentials` does."""
    credentials = load_credentials(config)
    return None if credentials is None else credentials.make_token_source(role)


def list_roles(config: Config, *, redis: bool) -> list[str]:
    """Return the roles of a run; with `redis` those of the buffer's users too."""
    custom = [f"environment {name}" for name in config.custom]
    runners = ["agents"] if config.has_episodes else []
    pullers = ["rollout"] if config.run_store is not None else []
    return [
        "operator",
        "reader",
        "scorer",
        *runners,
        *pullers,
        *custom,
        *(f"redis {role}" for role in REDIS_ROLES if redis),
    ]


def complete(path: Path, names: Iterable[str]) -> None:
    """Add a random token for each role without one; only its owner may read a new file. Raises `ConfigError`."""
    known = _read(path) if path.exists() else []
    missing = [name for name in names if name not in dict(known)]
    if missing:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before and not before.endswith("\n"):
            before += "\n"
        write(path, before + "".join(f"{name} {secrets.token_urlsafe(32)}\n" for name in missing))


def write(path: Path, text: str) -> None:
    """Replace the whole file, readable only by its owner. Raises `ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with scratch_folder(f".{path.name}-", path.parent) as folder:
            fresh = folder / path.name
            fresh.touch(mode=0o600)
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be written ({error.strerror}); give a folder that you may write to"
        ) from error


def buffer_url(config: Config, role: str) -> str:
    """Return the URL of the buffer's server with the login of `role`, one of `REDIS_ROLES`.

    A URL that has a login keeps it. Without credentials for users of the server no login is added. Raises `ConfigError` if there are such
    credentials, but none for this role.
    """
    url = config.redis_url
    credentials = load_credentials(config)
    if credentials is None or "@" in urlsplit(url).netloc or not credentials.has_redis_users:
        return url
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{login(config, credentials, role)}@{rest}"


def login(config: Config, credentials: Credentials, role: str) -> str:
    """Return `USER:PASSWORD` of a role on the buffer's server, in the form for a URL."""
    user = "headrace-admin" if role == "admin" else f"{config.run.id}-{role}"
    return f"{user}:{quote(credentials.token(f'redis {role}'), safe='')}"


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(
            f"security.credentials {path} can't be read ({error}); `headrace credentials` makes such a file"
        ) from error
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2 or not words[-1].isascii():
            # without the line itself, which may be a token
            raise UnusableFile(f"security.credentials {path}: line {number} is not `ROLE TOKEN`; correct or delete it")
        lines.append((" ".join(words[:-1]), words[-1]))
    return lines
