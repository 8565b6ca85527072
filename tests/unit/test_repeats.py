"""What is told of things that happen again and again."""

from __future__ import annotations

from headrace.base.repeats import Repeats, alike


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_thing_is_told_once_and_then_as_a_count_every_so_often() -> None:
    clock = Clock()
    repeats = Repeats(every_s=60, clock=clock)
    assert [repeats.due("a", 3), repeats.due("a"), repeats.due("b"), repeats.due("a")] == [3, None, 1, None]
    clock.now = 60.0
    assert [repeats.due("a"), repeats.due("a")] == [6, None]
    clock.now = 119.0
    assert repeats.due("a") is None
    clock.now = 120.0
    assert repeats.due("a") == 9


def test_more_kinds_than_there_is_room_for_are_counted_as_one() -> None:
    clock = Clock()
    repeats = Repeats(every_s=60, most=2, clock=clock)
    assert [repeats.due(f"{number}") for number in range(5)] == [1, 1, 1, None, None]
    clock.now = 60.0
    assert [repeats.due("9"), repeats.due("0")] == [4, 2]


def test_messages_that_differ_in_numbers_alone_are_alike() -> None:
    assert alike("failed 3 times:\n line 12") == alike("failed 14 times:  line 7")
    assert alike("KeyError: 'answer'") != alike("KeyError: 'anwser'")
