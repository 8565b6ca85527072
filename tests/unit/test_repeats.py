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


def test_what_differs_in_numbers_or_long_quotations_is_alike() -> None:
    assert alike("failed 3 times:\n line 12") == alike("failed 14 times:  line 7")
    assert alike("KeyError: 'answer'") != alike("KeyError: 'anwser'")
    assert alike(f"answered {'a' * 50!r}, no") == alike(f"answered {'it said it' * 10 + chr(39)!r}, no")
    assert alike(f"answered {'a' * 50!r}") == alike(f"answered {'b' * 5000!r}"), "one that is cut off"
    assert alike("can't be read, and the file on that disk isn't there") != alike(
        "can't be read, and the file on this disk isn't there"
    )
