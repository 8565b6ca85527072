"""A call that the network delivers again, however late, changes nothing (law 4): every writing function, at every later moment of a run."""

from __future__ import annotations

from typing import Any

from headrace.replay import ReplayClient
from headrace.replay.connection import BufferConnection, function_name
from headrace_services.replay import library
from tests.support.recorded_run import DIGEST, run


class Repeater(BufferConnection):
    """After each call of a function, every call so far arrives once more. Nobody hears the second answers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[tuple[Any, ...]] = []

    async def command(self, *command: Any) -> Any:
        answer = await super().command(*command)
        await self._repeat([command])
        return answer

    async def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        answers = await super().pipeline(commands)
        await self._repeat(commands)
        return answers

    async def _repeat(self, commands: list[tuple[Any, ...]]) -> None:
        self.calls += [command for command in commands if command[0] == "FCALL"]
        everything = (DIGEST, 0, f"{self.key}*")
        pipe = self.redis.pipeline(transaction=False)
        pipe.eval(*everything)
        for call in self.calls:
            pipe.execute_command(*call)
        pipe.eval(*everything)
        before, *_, after = await pipe.execute(raise_on_error=False)
        if after != before:
            for call in self.calls:  # most that change something do so each time
                await self.redis.pipeline(transaction=False).execute_command(*call).execute(raise_on_error=False)
                assert await self.redis.eval(*everything) == after, f"{call[1]} again after {self.calls[-1][1]}"
            raise AssertionError(f"one of the calls so far changes something when it arrives after {self.calls[-1][1]}")


def writing_functions() -> set[str]:
    functions = library.built_in()
    return {function_name(name) for name in functions.transitions if "register_reader(" not in functions.text(name)}


async def test_law_4_a_call_that_arrives_again_however_late_changes_nothing(replay: ReplayClient) -> None:
    repeater = replay._connection = Repeater(replay.redis, replay.run_id)
    await run(replay)
    assert {call[1] for call in repeater.calls} >= writing_functions()
