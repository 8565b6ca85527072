"""A network that delivers every call to the buffer again: stands between the services and the server, passes everything on, and sends each
function call once more, seconds after it was answered, when others have come in between. Nobody hears the second answer.

    python -m tests.chaos.courier HOST PORT SERVER SEED
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator

_LATEST_S = 20.0


class Courier:
    def __init__(self, server: str, port: int, seed: str) -> None:
        self._server = server
        self._port = port
        self._rng = random.Random(f"courier {seed}")
        self._tasks: set[asyncio.Task[None]] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a service, until one of its ends closes it."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            answers, onward = await asyncio.open_connection(self._server, self._port)
            with contextlib.closing(onward):
                ways = [asyncio.create_task(self._there(reader, onward)), asyncio.create_task(_back(answers, writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _there(self, reader: asyncio.StreamReader, onward: asyncio.StreamWriter) -> None:
        async for command, words in _commands(reader):
            onward.write(command)
            await onward.drain()
            if words[0].upper() == b"FCALL":
                task = asyncio.create_task(self._again(command, self._rng.uniform(0.1, _LATEST_S)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _again(self, command: bytes, later_s: float) -> None:
        await asyncio.sleep(later_s)
        with contextlib.suppress(OSError):  # the server is away: this one is lost for good
            answers, onward = await asyncio.open_connection(self._server, self._port)
            with contextlib.closing(onward):
                onward.write(command)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(answers.read(1), 10.0)


async def _back(answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await answers.read(1 << 16):
        writer.write(chunk)
        await writer.drain()


async def _commands(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, list[bytes]]]:
    """Each command of a client, as it came and in words. Clients send arrays of bulk strings."""
    while head := await reader.readline():
        parts, words = [head], []
        for _ in range(int(head[1:])):
            size = await reader.readline()
            word = await reader.readexactly(int(size[1:]) + 2)
            parts += [size, word]
            words.append(word[:-2])
        yield b"".join(parts), words


async def main() -> None:
    host, port, server, seed = sys.argv[1:]
    courier = Courier(server, int(port), seed)
    async with await asyncio.start_server(courier.carry, host, int(port)) as listening:
        await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
