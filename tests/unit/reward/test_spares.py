"""What a burst made: used again while there is work, and ended in the quiet after it."""

from __future__ import annotations

from headrace_services.reward.spares import _QUIET_S, Spares


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.ended: list[str] = []
        self.spares = Spares(self.ended.append, clock=lambda: self.now)

    def at(self, now: float) -> Spares[str]:
        self.now = now
        return self.spares


def test_what_is_not_used_for_a_quiet_time_ends_and_the_floor_stays() -> None:
    clock = Clock()
    for at, name in enumerate("abc"):
        clock.at(at).put(name)
    assert clock.at(10).end_unused() == _QUIET_S - 10
    assert clock.at(_QUIET_S).end_unused() == 1
    assert clock.ended == ["a"]
    assert clock.at(100 * _QUIET_S).end_unused() is None
    assert (clock.ended, clock.spares.take(), clock.spares.take()) == (["a", "b"], "c", None)


def test_what_is_used_again_is_not_ended_and_the_others_stay_unused() -> None:
    clock = Clock()
    for name in "abc":
        clock.at(0).put(name)
    for at in range(1, round(2 * _QUIET_S)):
        used = clock.at(at).take()
        assert used == "c"
        clock.spares.put(used)
        clock.spares.end_unused()
    assert clock.ended == ["a", "b"]


def test_nothing_of_the_floor_is_ever_due() -> None:
    clock = Clock()
    assert clock.spares.end_unused() is None
    clock.spares.put("a")
    assert clock.at(10 * _QUIET_S).end_unused() is None
    assert not clock.ended
