"""Redis users, one per role. Each can reach only the keys and channels of one run, through the functions and commands of its role.

Redis checks the commands inside a function against the rights of its caller. So a user also needs the commands that its functions use, and
could send them directly, to keys of its run. The users isolate runs, prevent calls by the wrong role, and limit readers to reading. They do
not protect a run from its own malicious replica.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping

from headrace.net.credentials import REDIS_ROLES
from headrace.replay.client import CURRENT_RUN
from headrace.replay.connection import function_name

from . import library


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_EVERYONE = ("ping", "info", "get", "mget", "xrange", "xrevrange", "xread", "subscribe", "unsubscribe")
_SWEEP = ("smembers", "srem", "scan", "unlink")


@dataclasses.dataclass(frozen=True)
class Role:
    """The rights of a role: the `functions` it may call that change something (all roles may call the others), and the `commands` that it
    sends outside functions."""

    functions: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


# Functions that change something, by caller. A caller that is refused for lack of memory reports this with `make_room`.
_REPLAY = "make_room append_event open_run take_scoring renew_scoring release_scoring score"
_TRAINER = (
    "make_room rewind restore refilled enqueue close reserve reject commit drained masked publish_metrics evaluated drop_validation "
    "open_epoch begin_epoch end_epoch offer disagreements quarantine"
)
_OPERATOR = "retry"
_ROLLOUT = "make_room register register_puller unreached deregister heartbeat lease push save release abandon acknowledge verify refuse"
_AGENTS = "make_room register_runner deregister_runner runner_heartbeat lease_episodes append finish release"

# the roles that open the run
_OPENS = ("replay", "up")

ROLES = {
    "replay": Role(_names(_REPLAY), ("function|list", "bgrewriteaof", "set", *_SWEEP)),
    "trainer": Role(_names(_TRAINER), _SWEEP),
    "rollout": Role(_names(_ROLLOUT), ("set",)),
    "agents": Role(_names(_AGENTS), ("set",)),
    "operator": Role(_names(_OPERATOR)),
    "reader": Role(),
}


def users(run_id: str, passwords: Mapping[str, str], *, own_server: bool = False) -> list[str]:
    """Return the lines of an ACL file: `<run>-<role>` for each role, `<run>-up` with all roles (`headrace up`), and `headrace-admin` for
    the server's administrator. No other user can log in. `passwords` are by role, and stored as SHA-256. With `own_server` the replay
    service may load functions: a user that may load one can replace those of every run."""
    # Nobody can log in as this user, which is off. But a server reads its append-only file as this user, and Redis 7.0 skips every
    # transaction in it that the user may not make: with -@all a restart would lose the run.
    lines = ["user default off resetpass ~* &* +@all"]
    for role in REDIS_ROLES:
        digest = hashlib.sha256(passwords[role].encode()).hexdigest()
        name = "headrace-admin" if role == "admin" else f"{run_id}-{role}"
        rights = [*_rights(run_id, role), *(["+function|load"] if own_server and role in _OPENS else [])]
        lines.append(f"user {name} on #{digest} {' '.join(rights)}")
    return lines


def list_functions(role: str) -> list[str]:
    """Return the names of the functions that a user of `role` may call, without their prefix."""
    changing = {name for one in _parts(role) for name in one.functions}
    built_in = library.built_in()
    return [name for name in built_in.transitions if name in changing or built_in.reads(name)]


def _rights(run_id: str, role: str) -> Iterable[str]:
    if role == "admin":
        return ["~*", "&*", "+@all"]
    functions = list_functions(role)
    inside = map(library.built_in().commands, functions)
    commands = set(_EVERYONE).union(*inside, *(one.commands for one in _parts(role)))
    others = "%R~" if role == "reader" else "~"
    current = "~" if role in _OPENS else "%R~"
    return [
        f"~hr:{{{run_id}}}",  # Redis can't know that an FCALL only reads its key
        f"{others}hr:{{{run_id}}}:*",
        f"{current}{CURRENT_RUN}",
        "resetchannels",
        f"&hr:{{{run_id}}}:*",
        "-@all",
        *(f"+{command}" for command in sorted(commands)),
        *(f"+fcall|{function_name(name)}" for name in functions),
    ]


def _parts(role: str) -> list[Role]:
    return list(ROLES.values()) if role == "up" else [ROLES[role]]
