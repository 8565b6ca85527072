"""The buffer's state machine: files of Lua joined into one library of Redis functions, and loaded."""

from __future__ import annotations

from importlib import resources

from redis.asyncio import Redis

from headrace.errors import ReplayUnavailable
from headrace.replay.wire import Wire

NAME = "headrace"

# In this order: each may use what those before it define. Transitions follow, each in a scope of its own.
SHARED = (
    "_args",
    "_run",
    "_fields",
    "_meter",
    "_group",
    "_filter",
    "_payload",
    "_due",
    "_register",
    "_steps",
    "_validation",
    "_fleet",
    "_epoch",
)
TRANSITIONS = (
    "open_run",
    "state",
    "stats",
    "group",
    "groups",
    "step",
    "bias",
    "masked",
    "enqueue",
    "close",
    "lease",
    "push",
    "save",
    "release",
    "abandon",
    "take_scoring",
    "release_scoring",
    "score",
    "reserve",
    "commit",
    "evaluated",
    "drop_validation",
    "rewind",
    "restore",
    "refilled",
    "ended",
    "register",
    "deregister",
    "heartbeat",
    "replicas",
    "open_epoch",
    "acknowledge",
    "begin_epoch",
    "verify",
    "refuse",
    "end_epoch",
    "epoch",
)


def source() -> str:
    """The library's source, as `FUNCTION LOAD` takes it."""
    folder = resources.files("services.replay") / "functions"
    parts = [f"#!lua name={NAME}\n"]
    parts += [(folder / f"{name}.lua").read_text() for name in SHARED]
    parts += [f"do\n{(folder / f'{name}.lua').read_text()}\nend\n" for name in TRANSITIONS]
    return "\n".join(parts)


async def load(redis: Redis) -> None:
    """Load the library, in place of any earlier build of it. Raises `ReplayUnavailable`, `ReplayDenied`."""
    try:
        await Wire(redis, "none").command("FUNCTION", "LOAD", "REPLACE", source())
    except ReplayUnavailable as error:
        raise ReplayUnavailable(f"the function library can't be loaded into the server: {error}") from error
