"""How it is found out which blocks of the buffer's Lua no test enters."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from headrace.replay import ReplayClient
from headrace.replay.build import BUILD
from headrace_services.replay import library
from tests.support.lua_blocks import noting


async def test_the_blocks_that_a_call_enters_are_noted(replay: ReplayClient) -> None:
    plain, own = library.source(), "0b10c45e"  # under a name of its own
    source, lines = noting(plain.replace(BUILD, own))
    await replay.redis.function_load(source)
    with pytest.raises(ResponseError, match="HR_UNAVAILABLE"):
        await replay.redis.fcall(f"hr_{own}_state", 1, "hr:{absent}")
    blocks = await replay.redis.fcall("entered", 0)
    await replay.redis.function_delete(f"headrace_{own}")
    entered = {plain.splitlines()[lines[block] - 1].strip() for block in blocks}
    assert {"function load_run(keys)", "if not values[1] then"} <= entered
    assert not {line for line in entered if "HR_BUILD" in line or line.startswith("register('push'")}
