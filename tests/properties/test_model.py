"""Law by law and call by call: the buffer does what its contract says, whatever everyone does to it, in whatever order."""

from __future__ import annotations

import sys

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.machine import Everyone

STEPS = 100
# Calls of the buffer that an example makes on average, those that hand in and train what is left at its end included.
CALLS_AN_EXAMPLE = 1_500
# Of these, what each server gets.
SHARES = {"valkey": 0.8, "redis-7.0": 0.2}


@pytest.mark.slow
@pytest.mark.timeout(0)  # as long as so many calls take
def test_the_buffer_does_what_the_model_says(
    server_kind: str,
    clocked_url: str,
    calls: int,
    session_seed: int,
    pytestconfig: pytest.Config,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made: list[int] = []
    failures: list[str] = []

    def show_the_first(failure: str) -> None:
        failures.append(failure)
        if len(failures) == 1:
            with capfd.disabled():
                sys.stderr.write(f"\nthe first failure on {server_kind}, not shrunk:\n{failure}")

    class EveryoneThere(Everyone):
        url = clocked_url
        found = staticmethod(show_the_first)

        def teardown(self) -> None:
            super().teardown()
            made.append(self.calls)

    share = calls * SHARES[server_kind]
    while (left := share - sum(made)) > 0:  # some examples make fewer
        run_state_machine_as_test(
            # the same examples again would show nothing new
            seed(session_seed + len(made))(EveryoneThere),
            settings=settings(
                max_examples=1 + int(left / CALLS_AN_EXAMPLE),
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                print_blob=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate] if pytestconfig.getoption("no_shrink") else [Phase.generate, Phase.shrink],
            ),
        )
