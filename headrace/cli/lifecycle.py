"""What the supervisor does when a service ends: pure decisions, no clock and no process of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# `headrace <service>` leaves with this for a `HeadraceError`: something that a person must mend, so starting again won't help.
EXIT_MUST_BE_MENDED = 1
# For an unreachable buffer: it may come back.
EXIT_TRY_AGAIN = 75
# For an exception that nobody foresaw.
EXIT_FAULT = 70


@dataclasses.dataclass(frozen=True)
class Restart:
    delay_s: float
    reason: str


@dataclasses.dataclass(frozen=True)
class GiveUp:
    reason: str


@dataclasses.dataclass(frozen=True)
class Finished:
    """The service's work is done, and with it the run."""


Decision = Restart | GiveUp | Finished


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """At most `limit` restarts within `window_s`, each after twice the delay of the one before."""

    limit: int = 5
    window_s: float = 300.0
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0

    def decide(
        self, exit_code: int, *, ends_run: bool, was_ready: bool, restarts: Sequence[float], now: float
    ) -> Decision:
        """`exit_code` is negative for a signal; `restarts` are the times of the earlier restarts, on the clock of `now`.

        There is no way from `EXIT_MUST_BE_MENDED` to a restart, none from `EXIT_TRY_AGAIN` for a service that was never ready
        (a buffer that was never there won't come back), and none from a clean exit of a service whose end is the run's.
        """
        if exit_code == 0 and ends_run:
            return Finished()
        how = describe_exit(exit_code)
        if exit_code == EXIT_MUST_BE_MENDED or (exit_code == EXIT_TRY_AGAIN and not was_ready):
            return GiveUp(how)
        recent = [at for at in restarts if now - at < self.window_s]
        if len(recent) >= self.limit:
            return GiveUp(f"{how}, after {len(recent)} restarts within {self.window_s:.0f} s")
        return Restart(min(self.longest_delay_s, self.first_delay_s * 2.0 ** len(recent)), how)


def describe_exit(exit_code: int) -> str:
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
