"""Malformed calls of the buffer's functions: the answer is typed, and a refused call changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from random import Random
from typing import Any, get_args

import msgspec
import pytest
import redis as blocking
from redis.asyncio import Redis
from redis.client import Pipeline
from redis.exceptions import ResponseError

from headrace.base.errors import HeadraceError
from headrace.records.group_event import GroupState
from headrace.replay import ReplayClient
from headrace.replay.connection import function_name, open_redis
from headrace_services.replay import library
from tests.support.mutation import Mutator, pack
from tests.support.recorded_run import DIGEST, Call, Contents, record
from tests.support.redis_servers import buffer_server

RUN = "fuzzed"
FUNCTIONS = library.built_in().transitions
# Between two restores of what was held: an accepted call changes what those after it find.
TOGETHER = 100
NAME = re.compile(r"[A-Za-z0-9._:@/+=,~-]{1,256}")


def whole(value: Any) -> bool:
    return (
        type(value) in (int, float)
        and 0 <= value < 1e14
        and value == math.floor(value)
        and math.copysign(1, value) == 1
    )


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# What the parsers of _args.lua take, said once more.
TAKEN: dict[str, Callable[[Any], bool]] = {
    "natural": whole,
    "natural_or_none": lambda value: value in (-1, 2**64 - 1) or whole(value),  # to Lua's msgpack the same number
    "positive": lambda value: whole(value) and value > 0,
    "finite": lambda value: type(value) in (int, float) and math.isfinite(value),
    "number": lambda value: type(value) in (int, float),
    "name": lambda value: isinstance(value, str) and NAME.fullmatch(value) is not None,
    "text": lambda value: isinstance(value, str) and is_utf8(value.encode(errors="surrogateescape")),
    "flag": lambda value: isinstance(value, bool),
    "map": lambda value: isinstance(value, dict | list),
}
_ARGUMENT = re.compile(r"(\w+) = (\w+)(?:\((\w+), ([\d* ]*BATCH)\)|\(\{([^}]*)\}\))?")


def parsers_of(function: str) -> dict[str, Callable[[Any], bool]]:
    """The named arguments that a function declares, with what each takes; one that has a parser of its own takes anything."""
    source = library.built_in().text(function)
    spec = re.search(rf"register\w*\('{function}', (\{{.*?\}}|\w+), function", source, re.DOTALL)
    text = spec[1] if spec else "nil"
    if text in ("PAYLOADS", "nil") and (text == "PAYLOADS" or "SPEC" in source):
        where = "".join([*library.built_in().shared_texts(), source])
        made = re.search(rf"local {'PAYLOADS' if text == 'PAYLOADS' else 'SPEC'} = \{{(.*?)\n\}}", where, re.DOTALL)
        assert made is not None
        text = made[1]
    return {found[1]: _parser(found) for found in _ARGUMENT.finditer(text) if found[2] != "nil"}


def _parser(found: re.Match[str]) -> Callable[[Any], bool]:
    _, kind, of_each, most, words = found.groups()
    if kind == "one_of":
        allowed = re.findall(r"'(\w+)'", words)
        return lambda value: isinstance(value, str) and value in allowed
    if kind == "list_of":
        limit, each = 256 * int(most.removesuffix("BATCH").strip(" *") or 1), TAKEN[of_each]
        return lambda value: (entries := _as_list(value)) is not None and _fits(entries, limit, each)
    return TAKEN.get(kind, lambda value: True)


def _as_list(value: Any) -> list[Any] | None:
    """What Lua finds of it from 1 on, if it is a list to Lua: a map is one if its keys say so."""
    if isinstance(value, dict):
        present = {key: entry for key, entry in value.items() if entry is not None}
        return [present[key] for key in sorted(present)] if present.keys() == set(range(1, len(present) + 1)) else None
    return value if isinstance(value, list) else None


def _fits(entries: list[Any], limit: int, each: Callable[[Any], bool]) -> bool:
    while entries and entries[-1] is None:  # to Lua the list ends before
        entries = entries[:-1]
    return len(entries) <= limit and all(map(each, entries))


@dataclasses.dataclass(frozen=True)
class Message:
    command: tuple[Any, ...]
    malformed: bool  # for certain: some may have become another good call


def messages_of(function: str, call: Call, random: Random) -> Iterator[Message]:
    """Endless variations of a good call."""
    mutator, parsers = Mutator(random), parsers_of(function)
    key, *arguments = call.command[3:]
    good = msgspec.msgpack.decode(arguments[0]) if parsers else None
    payloads = arguments[1:] if parsers else arguments
    while True:
        packed, keys, malformed = arguments[:1] if parsers else [], [key], False
        sent = list(payloads)
        match random.choice(
            ["named", "named", "named", "named", "packed", "bytes", "keys"] if parsers else ["bytes", "keys"]
        ):
            case "named":
                changed = mutator.structure(good)
                malformed = not _is_taken(changed, parsers)
                packed = [pack(changed)]
            case "packed":
                packed = [mutator.bytes(packed[0])]
            case "bytes":
                sent = _changed_bytes(sent, mutator)
            case _:
                wrong = [mutator.bytes(key.encode()), b"hr:{nobody}", b"hr:{*}", f"{key}:events".encode()]
                keys = random.choice([[], [key, key], [random.choice(wrong)]])
                malformed = len(keys) != 1
        yield Message(("FCALL", function_name(function), len(keys), *keys, *packed, *sent), malformed)


def _is_taken(arguments: Any, parsers: dict[str, Callable[[Any], bool]]) -> bool:
    if not isinstance(arguments, dict):
        return False
    given = {name: value for name, value in arguments.items() if value is not None}  # to Lua, nil is nothing
    return given.keys() == parsers.keys() and all(parsers[name](value) for name, value in given.items())


def _changed_bytes(sent: list[bytes], mutator: Mutator) -> list[bytes]:
    random = mutator.random
    match random.choice(["change", "more", "fewer"]):
        case "change" if sent:
            place = random.randrange(len(sent))
            return [*sent[:place], mutator.bytes(sent[place]), *sent[place + 1 :]]
        case "fewer" if sent:
            return sent[1:]
        case _:
            return [*sent, *[mutator.bytes(b"more")] * random.choice([1, 2, 300])]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its own: what it holds is put back before each few calls."""
    with buffer_server(tmp_path_factory.mktemp("replay"), appendfsync="no") as server:
        yield server.url


@pytest.fixture(scope="module")
def calls(server: str) -> dict[str, list[Call]]:
    async def run() -> dict[str, list[Call]]:
        async with open_redis(server) as redis:
            await redis.flushdb()
            return await record(redis, RUN)

    return asyncio.run(run())


@pytest.fixture
async def redis(server: str) -> AsyncIterator[Redis]:
    async with open_redis(server, retries=0) as redis:
        yield redis


@pytest.fixture
def pipe(server: str) -> Iterator[Pipeline]:
    """Of a client that blocks, which packs commands in C: most of the test's time would go there."""
    with blocking.Redis.from_url(server) as client, client.pipeline(transaction=False) as pipe:
        yield pipe


def put_back(pipe: Pipeline, contents: Contents) -> None:
    pipe.flushdb()
    for key, value in contents:
        pipe.restore(key, 0, value)
    pipe.execute()


def sent(pipe: Pipeline, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
    for command in commands:
        pipe.execute_command(*command)
    return pipe.execute(raise_on_error=False)


async def look(redis: Redis) -> None:
    """Whatever was taken can be read, or is refused with a type."""
    replay = ReplayClient(redis, RUN)
    for read in (replay.state, replay.stats, replay.replicas, replay.epoch, replay.bias, replay.read_ended):
        with contextlib.suppress(HeadraceError):
            await read()
    with contextlib.suppress(HeadraceError):
        async for group, _ in replay.groups(get_args(GroupState)):
            with contextlib.suppress(HeadraceError):
                await replay.read_held(group)


def test_every_function_is_called_in_the_run(calls: dict[str, list[Call]]) -> None:
    assert set(calls) == set(FUNCTIONS)


def test_what_a_function_declares_is_found(calls: dict[str, list[Call]]) -> None:
    for function in FUNCTIONS:
        parsers = parsers_of(function)
        for call in calls[function]:
            given = msgspec.msgpack.decode(call.command[4]) if len(call.command) > 4 else {}
            assert not parsers or _is_taken(given, parsers), (function, given)


@pytest.mark.timeout(0)  # as long as so many calls take
@pytest.mark.parametrize("function", FUNCTIONS)
async def test_malformed_calls(
    redis: Redis, pipe: Pipeline, calls: dict[str, list[Call]], messages: int, session_seed: int, function: str
) -> None:
    random = Random(f"{session_seed} {function}")
    digest = ("EVALSHA", await redis.script_load(DIGEST), 0, f"hr:{{{RUN}}}*")
    typed: set[str] = set()
    for _ in range(0, messages, TOGETHER):
        call = random.choice(calls[function])
        put_back(pipe, call.before)
        tried = messages_of(function, call, random)
        batch = [next(tried) for _ in range(min(TOGETHER, messages))]
        replies = sent(pipe, [message.command for message in batch])
        put_back(pipe, call.before)
        # a digest costs more than a call: of refused calls in a row, one is enough
        (before,) = sent(pipe, [digest])
        for _, row in itertools.groupby(zip(batch, replies, strict=True), key=lambda pair: bool(_refusals(pair[1]))):
            same = [message for message, _ in row]
            *replies, after = sent(pipe, [*(message.command for message in same), digest])
            for message, reply in zip(same, replies, strict=True):
                refusals = _refusals(reply)
                typed.update(text.split()[0] for text in refusals)
                said = f"{message.command!r:.3000}\nanswered {reply!r:.500}"
                assert not isinstance(reply, Exception) or refusals, f"an error without a type: {said}"
                assert not message.malformed or _is_invalid(reply), f"malformed, and not refused for that: {said}"
            commands = "\n".join(f"{message.command!r:.3000}" for message in same)
            assert before == after or not all(map(_refusals, replies)), f"refused, and changed something:\n{commands}"
            before = after
        await look(redis)
        put_back(pipe, call.before)
        (reply,) = sent(pipe, [call.command])
        assert not _refusals(reply), "the good call"
    assert "HR_INVALID" in typed


def _is_invalid(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith("HR_INVALID ")


def _refusals(reply: Any) -> list[str]:
    """The texts of a call that was refused with a type, or of one whose entries were all; else nothing."""
    if isinstance(reply, ResponseError):
        texts = [str(reply)]
    elif isinstance(reply, list) and reply and all(isinstance(text, bytes) for text in reply):
        texts = [text.decode(errors="replace") for text in reply]
    else:
        return []
    return texts if all(re.match(r"HR_[A-Z_]+ .", text) for text in texts) else []
