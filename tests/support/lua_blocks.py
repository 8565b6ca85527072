"""Which blocks of the buffer's Lua no test enters: `pytest -p tests.support.lua_blocks tests/integration/replay tests/properties`.

Redis has no hooks for the code of functions. So each block notes that it was entered, at its beginning, where Lua takes any statement. The
embedded servers are asked before they stop. One that is killed, or whose functions are loaded again, has forgotten.
"""

from __future__ import annotations

import contextlib
import re

import pytest
from redis.exceptions import RedisError

from headrace.replay.connection import open_redis
from headrace_services.replay import library
from headrace_services.replay.embedded import EmbeddedServer
from headrace_services.replay.library import _COMMENT_OR_STRING

# what a statement may follow
_BEGINS = re.compile(r"(?<![\w.])(?:then|else|do|repeat|function\b\s*\w*\s*\([^)]*\))(?!\w)")
_entered: set[int] = set()


def noting(source: str) -> tuple[str, list[int]]:
    """Return the source in a form in which each block notes that it was entered, and the lines on which the blocks begin. Its function
    `entered` answers with the blocks, as places in that list."""
    blank = _COMMENT_OR_STRING.sub(lambda match: " " * len(match[0]), source)
    ends = [match.end() for match in _BEGINS.finditer(blank)]
    first, *parts = [source[start:end] for start, end in zip([0, *ends], [*ends, len(source)], strict=True)]
    head, first = first.split("\n", 1)
    code = first + "".join(f" ENTERED[{block}] = 1 {part}" for block, part in enumerate(parts))
    answer = "local blocks = {} for block in pairs(ENTERED) do blocks[#blocks + 1] = block end return blocks"
    register = f"redis.register_function{{function_name = 'entered', callback = function() {answer} end, flags = {{'no-writes'}}}}"
    return f"{head}\nlocal ENTERED = {{}}\n{code}\n{register}\n", [source.count("\n", 0, end) + 1 for end in ends]


def pytest_configure() -> None:
    built = library.built_in()
    source, _ = noting(built.source())
    stop = EmbeddedServer.stop

    async def ask_and_stop(server: EmbeddedServer) -> None:
        with contextlib.suppress(RedisError):  # it is down already, or has no functions
            async with open_redis(server.url, retries=0) as redis:
                _entered.update(await redis.execute_command("FCALL", "entered", 0))
        await stop(server)

    vars(built)["source"] = lambda: source
    EmbeddedServer.stop = ask_and_stop  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    built = library.built_in()
    del vars(built)["source"]
    source = built.source()
    _, lines = noting(source)
    missed = [line for block, line in enumerate(lines) if block not in _entered]
    terminalreporter.section(f"{len(missed)} of {len(lines)} blocks of the buffer's Lua were not entered")
    for line in missed:
        terminalreporter.write_line(f"{built.place(line)}: {source.splitlines()[line - 1].strip()}")
