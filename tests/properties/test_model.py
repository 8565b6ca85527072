"""Law by law and call by call: the buffer does what its contract says, whatever everyone does to it, in whatever order."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.machine import Everyone

# Operations: about 70 calls an example.
EXAMPLES = int(os.environ.get("HEADRACE_PROPERTIES_EXAMPLES", "150"))
STEPS = 50


@pytest.mark.slow
def test_the_buffer_does_what_the_model_says(clocked_url: str) -> None:
    machine = type("EveryoneThere", (Everyone,), {"url": clocked_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )
