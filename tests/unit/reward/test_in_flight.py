"""What may be sent to an environment at a time."""

from __future__ import annotations

from headrace_services.replay.in_flight import InFlightLimit


def stated(capacity: int, calls: int = 0, most: int = 64) -> InFlightLimit:
    room = InFlightLimit()
    room.state(capacity, calls, most, 60.0)
    return room


def test_until_the_hub_has_said_more_one_trajectory_goes_out() -> None:
    room = InFlightLimit()
    assert (room.free, room.batch) == (1, 1)
    room.send(1)
    assert room.free == 0


def test_the_capacity_is_used_in_several_calls_and_never_exceeded() -> None:
    room = stated(16)
    assert (room.free, room.batch) == (16, 4)
    for free in (12, 8, 4, 0):
        room.send(4)
        assert room.free == free
    room.release(4)
    assert room.free == 4


def test_an_environment_that_answers_at_once_gets_all_in_one_call() -> None:
    room = stated(16)
    room.hear(["SCORED"], longest_s=0.002)
    assert (room.free, room.batch) == (16, 16)
    room.hear(["SCORED", "SCORED"], longest_s=0.2)
    assert room.batch == 4
    room.hear(["SCORED"], longest_s=0.002)
    room.hear(["FAILED"])
    assert room.batch == 4
    two_calls = stated(128, calls=2)
    two_calls.hear(["SCORED"], longest_s=0.002)
    assert two_calls.batch == 64


def test_one_that_scores_whole_calls_gets_no_more_than_it_takes() -> None:
    room = stated(128, calls=2)
    assert (room.free, room.batch) == (128, 64)
    room.send(3)
    assert room.free == 64
    room.send(64)
    assert room.free == 0
    room.release(3)
    assert room.free == 64


def test_overload_halves_what_is_sent_and_success_raises_it() -> None:
    room = stated(64)
    room.hear(["SCORED", "NOT_STARTED"])
    assert room.free == 32
    room.hear(["TIMED_OUT"])
    assert room.free == 16
    room.hear(["SCORED", "FAILED"])
    assert room.free == 20
    for _ in range(100):
        room.hear(["SCORED"])
    assert room.free == 64
    for _ in range(100):
        room.hear(["NOT_STARTED"])
    assert room.free == 1


def test_another_capacity_is_taken_over() -> None:
    room = stated(64)
    for capacity in (8, 0, 16):  # 0: no process serves the environment
        room.state(capacity, 0, 64, 60.0)
        assert room.free == capacity


def test_a_changed_capacity_does_not_end_the_restraint() -> None:
    room = stated(8)
    room.hear(["NOT_STARTED"])
    for capacity, free in ((16, 8), (4, 2), (1, 1)):  # one may be sent at least, or no answer would ever raise it
        room.state(capacity, 0, 64, 60.0)
        assert room.free == free
