"""How the replica's own sequences share the engine's slots."""

from __future__ import annotations

import asyncio

import pytest

from headrace_services.rollout.sequence_slots import SequenceSlots


class Sequences:
    """Tasks that hold slots until they are told to end."""

    def __init__(self, count: int) -> None:
        self.slots = SequenceSlots(count)
        self.running: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, wanted: int = 1, priority: int = 0) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, wanted, priority))
        await settled()

    async def _run(self, name: str, wanted: int, priority: int) -> None:
        async with self.slots.take(wanted, priority):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await settled()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_more_run_than_there_are_slots_and_others_follow_in_order() -> None:
    them = Sequences(2)
    for name in "abcd":
        await them.ask(name)
    assert (them.running, them.slots.waiting) == (["a", "b"], 2)
    await them.end("b")
    assert (them.running, them.slots.waiting) == (["a", "c"], 1)
    await them.end("a")
    assert (them.running, them.slots.waiting) == (["c", "d"], 0)


async def test_the_runs_own_come_before_those_from_outside() -> None:
    them = Sequences(1)
    await them.ask("running", priority=5)
    await them.ask("outside", priority=1)
    await them.ask("own", priority=0)
    await them.end("running")
    assert them.running == ["own"]
    await them.end("own")
    assert them.running == ["outside"]


async def test_a_request_of_several_sequences_is_not_overtaken() -> None:
    them = Sequences(3)
    await them.ask("a")
    await them.ask("b")
    await them.ask("three", wanted=3)
    await them.ask("c")
    assert (them.running, them.slots.waiting) == (["a", "b"], 4)
    await them.end("a")
    await them.end("b")
    assert them.running == ["three"]
    await them.end("three")
    assert them.running == ["c"]
    with pytest.raises(ValueError, match=r"n: 4 .*most 3"):
        await them.slots.take(4).__aenter__()


async def test_a_sequence_that_is_cancelled_gives_its_slot_or_its_place_up() -> None:
    them = Sequences(2)
    await them.ask("a")
    await them.ask("two", wanted=2)
    await them.ask("b")
    await them.cancel("two")
    assert (them.running, them.slots.waiting) == (["a", "b"], 0)
    await them.cancel("a")
    await them.ask("c")
    assert them.running == ["b", "c"]


async def test_a_slot_given_to_a_cancelled_sequence_is_not_lost() -> None:
    them = Sequences(1)
    async with them.slots.take():
        await them.ask("b")
        await them.ask("c")
    await them.cancel("b")  # it has the slot, and has not run since
    assert them.running == ["c"]
