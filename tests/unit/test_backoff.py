"""The pauses between tries."""

from __future__ import annotations

from headrace.base.backoff import pause_after


def test_pauses_double_from_the_first_to_the_last_however_often() -> None:
    assert [pause_after(tries, 0.5, 3.0) for tries in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert pause_after(100_000, 0.5, 3.0) == 3.0
