"""Law by law and call by call: the buffer does what its contract says, whatever everyone does to it, in whatever order."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.machine import Everyone

STEPS = 100
# Calls of the buffer that an example makes on average, those that hand in and train what is left at its end included.
CALLS_AN_EXAMPLE = 350
# `make properties` asks for more.
CALLS = int(os.environ.get("HEADRACE_PROPERTIES_CALLS", "10000"))
# Of these, what each server gets.
SHARES = {"valkey": 0.8, "redis-7.0": 0.2}


@pytest.mark.slow
@pytest.mark.timeout(300 + CALLS // 10)
def test_the_buffer_does_what_the_model_says(server_kind: str, clocked_url: str) -> None:
    made: list[int] = []

    class EveryoneThere(Everyone):
        url = clocked_url

        def teardown(self) -> None:
            super().teardown()
            made.append(self.calls)

    calls = CALLS * SHARES[server_kind]
    while (left := calls - sum(made)) > 0:  # some examples make fewer
        run_state_machine_as_test(
            EveryoneThere,
            settings=settings(
                max_examples=1 + int(left / CALLS_AN_EXAMPLE),
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                print_blob=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate, Phase.shrink],
            ),
        )
