"""Records the calls of the buffer that `test_buffer.py` plays. Needed again only if clients call other functions, or with other arguments.

    python -m tests.golden.record NAME FOLDER

NAME is one of `RECORDED`; FOLDER, a new one, takes the run. `completions` and `episodes` are chaos runs (docs/chaos.md); `functions` is a
small run in which every function is called. What the server is asked is read by MONITOR; the answers are not kept, since another clock told
the time. `make golden RENEW=1` writes those of the functions here.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from redis.asyncio import Redis

from tests.chaos import driver
from tests.chaos.runs import NAMESPACES, ROOT
from tests.chaos.servers import ADDRESS, PORT
from tests.golden import product, recordings
from tests.golden.recordings import Call
from tests.support import recorded_run

# Of a chaos run: its seed, and its faults. None of the first strikes the server: while it changes, nobody reads along.
RECORDED: dict[str, tuple[int, int] | None] = {"completions": (111, 3), "episodes": (41, 6), "functions": None}
TOPOLOGY = "external"

_COMMAND = re.compile(rb"\+?(\d+)\.(\d+) \[\d+ (\S+?)\] (.*?)\r?\n?")
_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb"\\(x[0-9a-f]{2}|.)")
_LETTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b"}
# seconds of a record's timings, a double in msgpack: nobody asks for them, and noise does not compress
_SECONDS = re.compile(rb"(_s\xcb).{8}", re.DOTALL)


def main(name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    log = folder / "commands.log"
    if (plan := RECORDED[name]) is None:
        _run_every_function(folder, log)
    else:
        _run_chaos(*plan, name, folder, log)
    calls = list(calls_of(log))
    file = recordings.file_of(name)
    recordings.write(file, calls)
    sys.stdout.write(f"{file}: {len(calls)} calls, {file.stat().st_size} bytes\n")


def calls_of(log: Path) -> Iterator[Call]:
    """Of the functions, in a log of commands."""
    for line in log.read_bytes().splitlines(keepends=True):
        command = _COMMAND.fullmatch(line)
        if command is None or command[3] == b"lua":  # what a function itself calls
            continue
        words = [_plain(word) for word in _WORD.findall(command[4])]
        if words[0].startswith(b"FCALL"):
            match = recordings.NAME.match(words[1].decode())
            assert match, words[1]
            build, function, keys = match[1].encode(), match[2], int(words[2])
            arguments = [_SECONDS.sub(rb"\1" + bytes(8), word) for word in words[3 + keys :]]
            yield Call(
                int(command[1]) * 1000 + int(command[2]) // 1000,
                function,
                words[3 : 3 + keys],
                [argument.replace(build, recordings.BUILD) for argument in arguments],
            )


def _plain(word: bytes) -> bytes:
    def one(match: re.Match[bytes]) -> bytes:
        escaped = match[1]
        return bytes([int(escaped[1:], 16)]) if len(escaped) == 3 else _LETTERS.get(escaped, escaped)

    return _ESCAPED.sub(one, word)


def _run_chaos(seed: int, faults: int, kind: str, folder: Path, log: Path) -> None:
    product.make_model(folder / "model")
    (folder / "run").mkdir()
    inside = [sys.executable, "-m", "tests.golden.record", "inside", str(log)]
    plan = [str(seed), str(faults), TOPOLOGY, kind, str(folder / "model"), str(folder / "run")]
    subprocess.run([*NAMESPACES, *inside, *plan], cwd=ROOT, check=True)


def _inside(log: Path, *plan: str) -> int:
    """The driver of the run, in whose namespaces the server is."""
    threading.Thread(target=_watch, args=(ADDRESS, PORT, log), daemon=True).start()
    sys.argv = ["driver", *plan]
    return driver.main()


def _run_every_function(folder: Path, log: Path) -> None:
    with recordings.server(recordings.SERVERS["valkey"], folder / "server") as (port, redis):
        redis.function_load(product.functions())
        threading.Thread(target=_watch, args=("127.0.0.1", port, log), daemon=True).start()
        while not log.exists() or b"OK" not in log.read_bytes():
            time.sleep(0.01)

        async def run() -> None:
            async with Redis.from_url(f"redis://127.0.0.1:{port}") as client:
                await recorded_run.record(client, "golden")

        asyncio.run(run())
        redis.echo("the end")
        while b"the end" not in log.read_bytes():
            time.sleep(0.01)


def _watch(address: str, port: int, log: Path) -> None:
    """Write down what the server in charge is asked."""
    with log.open("ab") as file:
        while True:
            try:
                with socket.create_connection((address, port), timeout=5) as connection:
                    connection.sendall(b"MONITOR\r\n")
                    while data := connection.recv(1 << 20):
                        file.write(data)
                        file.flush()
            except OSError:
                time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1] == "inside":
        sys.exit(_inside(Path(sys.argv[2]), *sys.argv[3:]))
    main(sys.argv[1], Path(sys.argv[2]).absolute())
