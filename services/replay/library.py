"""The buffer's library of Redis functions. This module checks the server, and joins and loads the Lua files.

`functions/` contains one file per transition, and shared files (`_name.lua`). The header of a file lists the shared files from which it
takes names: `-- uses: _args, _group`. That determines the order in which the shared files are joined. Transitions come after them.

The library and its functions are named after their *build*, a digest of the joined code, so that several builds can share a server.
Comments and blank lines are not part of it, so a better comment makes no client incompatible.
Clients have no Lua files: they find the name in `headrace/replay/build.py`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from redis.asyncio import Redis

from headrace.base.errors import ReplayDenied, ReplayUnavailable
from headrace.replay.build import BUILD
from headrace.replay.connection import BufferConnection, hide_password

# the least that a server's `maxmemory` must be, in units of `replay.max_bytes`
_MEMORY_SHARE = 1.25

_log = logging.getLogger("headrace.replay")
_USES = re.compile(r"^-- uses: (.*)$", re.MULTILINE)
_DEFINED = re.compile(r"^local (?:function (\w+)|(\w+(?:, \w+)*))", re.MULTILINE)
_COMMENT_OR_STRING = re.compile(r"--[^\n]*|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"")
_COMMAND = re.compile(r"redis\.call\('([A-Z]+)'")
_READER = re.compile(r"^register_reader\(", re.MULTILINE)
# the line above each file in the joined source
_BEGINS = re.compile(r"(?:do|\(function\(\))  -- (\w+)\.lua")
# ends a line of names, however many they are
_LONG = "  -- luacheck: ignore 631"
# commands that change nothing
_READS = frozenset(
    """
    exists get getbit hexists hget hgetall hmget lindex llen lrange scard sismember smembers srandmember sscan time zcard zcount zrange
    zrangebyscore zrevrange zscore
    """.split()  # noqa: SIM905
)
# a name that is neither a field nor the key of a table or an assignment
_NAMED = re.compile(r"(?<![\w.:])[A-Za-z_]\w*(?!\w)(?!\s*=[^=])")


class LibraryError(Exception):
    """Raised for an inconsistency between Lua files. The message names the file and the line."""


class _File:
    """One Lua file: the shared files in its `uses` line, the names that it defines for others, and the names that it takes."""

    def __init__(self, file: Traversable) -> None:
        self.name = file.name.removesuffix(".lua")
        self.text = file.read_text()
        header = _USES.search(self.text)
        self.uses = header[1].split(", ") if header else []
        self._header_line = self._line(header.start()) if header else 1
        code = _COMMENT_OR_STRING.sub(lambda match: " " * len(match[0]), self.text)
        # names, and the lines that define them
        self.defines = {
            name: self._line(match.start())
            for match in _DEFINED.finditer(code)
            for name in (match[1] or match[2]).split(", ")
        }
        self.taken = [
            (match[0], self._line(match.start())) for match in _NAMED.finditer(code) if match[0] not in self.defines
        ]

    @property
    def shared(self) -> bool:
        return self.name.startswith("_")

    def check(self, shared: dict[str, _File]) -> None:
        """Raise `LibraryError` unless `uses` names exactly the shared files from which this file takes names, and no other shared file
        defines the same names. A local variable of a name that another file defines would count as taken: luacheck refuses those."""
        for file in shared.values():
            for name in sorted(self.defines.keys() & file.defines.keys()):
                if self.shared and file is not self:
                    raise LibraryError(f"{self.place(self.defines[name])}: {name!r} is defined in {file.name} too")
        for used in self.uses:
            if used not in shared:
                raise LibraryError(f"{self.place()}: uses {used}, but there is no {used}.lua")
        taken = set()
        for name, line in self.taken:
            for file in shared.values():
                if name in file.defines:
                    if file.name not in self.uses:
                        raise LibraryError(
                            f"{self.place(line)}: takes {name!r} from {file.name}, which its `uses` line does not name"
                        )
                    taken.add(file.name)
        for used in self.uses:
            if used not in taken:
                raise LibraryError(f"{self.place()}: uses {used}, but takes no name from it")

    def defining(self, names: set[str]) -> str:
        """Return the text in a form that assigns values to `names`, which are declared before it."""

        def define(match: re.Match[str]) -> str:
            defined = {*(match[1] or match[2]).split(", ")}
            own = ", ".join(sorted(defined - names))
            declared = f"local {own} " if own else ""
            return declared + match[0].removeprefix("local ") if defined & names else match[0]

        return _DEFINED.sub(define, self.text)

    def place(self, line: int | None = None) -> str:
        return f"{self.name}.lua:{self._header_line if line is None else line}"

    def _line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1


def _strip_comments(text: str) -> str:
    """Return Lua source without comments, blank lines and white space at the ends of lines."""
    code = _COMMENT_OR_STRING.sub(lambda match: "" if match[0].startswith("--") else match[0], text)
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())


class Library:
    """The Lua files of a folder, checked and ordered. Raises `LibraryError`."""

    def __init__(self, folder: Traversable) -> None:
        paths = sorted((path for path in folder.iterdir() if path.name.endswith(".lua")), key=lambda path: path.name)
        files = {file.name: file for file in map(_File, paths)}
        self._shared = {name: file for name, file in files.items() if file.shared}
        self._transitions = {name: file for name, file in files.items() if not file.shared}
        for file in files.values():
            file.check(self._shared)
        used = {name for file in files.values() for name in file.uses}
        for file in self._shared.values():
            if file.name not in used:
                raise LibraryError(f"{file.place(1)}: no file uses {file.name}")
        self._order: list[str] = []
        for name in self._shared:
            self._add(name, [])
        self._joined = self._join()
        self.build = hashlib.sha256(_strip_comments(self._joined).encode()).hexdigest()[:8]
        self.name = f"headrace_{self.build}"

    @property
    def transitions(self) -> list[str]:
        """The names of the functions, without their prefix."""
        return list(self._transitions)

    def shared_texts(self) -> list[str]:
        return [self._shared[name].text for name in self._order]

    def text(self, transition: str) -> str:
        return self._transitions[transition].text

    def reads(self, transition: str) -> bool:
        """Return whether a function changes nothing."""
        return bool(_READER.search(self.text(transition)))

    def commands(self, transition: str) -> set[str]:
        """Return the names of the commands that a function may use. Its caller needs the right to each."""
        texts = [*self.shared_texts(), self.text(transition)]
        found = {word.lower() for text in texts for word in _COMMAND.findall(text)}
        return found & _READS if self.reads(transition) else found

    def source(self) -> str:
        """Return the joined source for `FUNCTION LOAD`."""
        return f"#!lua name={self.name}\nlocal BUILD = '{self.build}'\n{self._joined}"

    def place(self, line: int) -> str:
        """Return the file, and the line in it, from which a line of `source` comes."""
        for above, text in enumerate(reversed(self.source().splitlines()[:line])):
            begins = _BEGINS.fullmatch(text)
            if begins:
                return f"{begins[1]}.lua:{above}"
        return f"{self.name}:{line}"

    def _join(self) -> str:
        """Join the files. Each has its own scope, because Lua allows only 200 local variables at a time in a function. The names that a
        shared file defines for others are declared before its scope; a transition is a function of its own, so that its names don't count
        beside them. COMMANDS has the commands of each function."""
        commands = [f"{name} = '{' '.join(sorted(self.commands(name)))}'" for name in self._transitions]
        parts = [f"local COMMANDS = {{{', '.join(commands)}}}{_LONG}"]
        for name in self._order:
            taken = self._taken_from(name)
            parts.append(f"local {', '.join(sorted(taken))}{_LONG}")
            parts.append(f"do  -- {name}.lua\n{self._shared[name].defining(taken)}\nend\n")
        parts += [f"(function()  -- {name}.lua\n{file.text}\nend)();\n" for name, file in self._transitions.items()]
        return "\n".join(parts)

    def _taken_from(self, name: str) -> set[str]:
        """Return the names that other files take from a shared file."""
        defined = self._shared[name].defines
        others = (file for file in [*self._shared.values(), *self._transitions.values()] if file.name != name)
        return {taken for file in others if name in file.uses for taken, _ in file.taken if taken in defined}

    def _add(self, name: str, users: list[str]) -> None:
        """Append a shared file after those that it uses. `users` is the chain of files that led to this one."""
        if name in users:
            circle = " -> ".join([*users[users.index(name) :], name])
            raise LibraryError(f"{self._shared[users[-1]].place()}: a circle of shared files: {circle}")
        if name not in self._order:
            for other in self._shared[name].uses:
                self._add(other, [*users, name])
            self._order.append(name)


@cache
def built_in() -> Library:
    """Return the buffer's own library."""
    return Library(resources.files("headrace_services.replay") / "functions")


def source() -> str:
    """Return the source of the buffer's own library for `FUNCTION LOAD`. Raises `LibraryError` if clients would call another build."""
    if built_in().build != BUILD:
        raise LibraryError(
            f"headrace/replay/build.py names build {BUILD}, but the files in services/replay/functions are build {built_in().build}; "
            "run `make build`"
        )
    return built_in().source()


async def load(redis: Redis) -> None:
    """Load the library unless the server has it. Libraries of other builds stay. Raises `ReplayUnavailable`, `ReplayDenied`."""
    code, name = source(), built_in().name
    if await BufferConnection(redis, "none").command("FUNCTION", "LIST", "LIBRARYNAME", name):
        return
    try:
        # On a connection that had no answer yet: without this right, an administrator has to act, and nothing is waited for.
        # REPLACE: another service may load the same one at the same moment.
        await BufferConnection(redis, "none").command("FUNCTION", "LOAD", "REPLACE", code)
    except ReplayDenied as error:
        raise ReplayDenied(
            f"the Redis server has no functions of this build ({name}), and this service may not load them; have an administrator do that: "
            f"`headrace functions | redis-cli -u URL -x FUNCTION LOAD REPLACE` ({error})"
        ) from error
    except ReplayUnavailable as error:
        raise ReplayUnavailable(f"can't load the function library into the server: {error}") from error


async def check_server(redis: Redis, url: str, max_bytes: int) -> None:
    """Check that the server can hold the buffer, and log what the server may lose. `max_bytes` is the limit on payloads. Raises
    `ReplayDenied` if the server can't hold the buffer, or refuses the login, and `ReplayUnavailable` if it does not answer."""
    info = await BufferConnection(redis, "none").command("INFO", "everything")
    where = f"replay.redis_url {hide_password(url)}"
    problem = incompatibility(info, max_bytes)
    if problem is not None:
        raise ReplayDenied(f"{where}: {problem}")
    for risk in risks(info):
        _log.warning("%s: %s", where, risk)


def incompatibility(info: dict[str, Any], max_bytes: int) -> str | None:
    """Return why a server with this INFO can't hold `max_bytes` of payloads, with the remedy; or None if it can."""
    version = str(info["redis_version"])
    if int(version.split(".")[0]) < 7:
        return f"Redis {version} has no functions; run Redis 7.0 or later, or Valkey"
    policy = info["maxmemory_policy"]
    if policy != "noeviction":
        return (
            f"maxmemory-policy {policy} would drop trajectories; set it with `CONFIG SET maxmemory-policy noeviction`"
        )
    if info.get("cluster_enabled"):
        return "it is a node of a Redis Cluster, but a run's buffer needs a single server; give one outside a cluster"
    if info["role"] != "master":
        return (
            f"it is a replica of {info['master_host']}:{info['master_port']}; give the primary, an address that follows it, or "
            "sentinel://host:port/SERVICE"
        )
    # besides payloads there are scores, records, the functions' own keys, and the allocator's overhead
    needed = math.ceil(_MEMORY_SHARE * max_bytes)
    if 0 < int(info["maxmemory"]) < needed:
        return (
            f"maxmemory {info['maxmemory']} is less than {_MEMORY_SHARE} x replay.max_bytes {max_bytes}, so the server would refuse leased "
            f"trajectories; set it with `CONFIG SET maxmemory {needed}`, or set replay.max_bytes to "
            f"{int(int(info['maxmemory']) / _MEMORY_SHARE)}"
        )
    return None


def risks(info: dict[str, Any]) -> list[str]:
    """Return what a server with this INFO may lose because of its configuration."""
    found = []
    # while a server loads its file, it reports that it has none
    if not info["aof_enabled"] and not info["loading"]:
        found.append(
            "appendonly is off: a restart of the server loses the queue, the generations in flight and everything trained since the last "
            "checkpoint, from which the trainer then continues; set it with `CONFIG SET appendonly yes`"
        )
    return found
