"""For how long `up` lets an environment of its own be silent."""

from __future__ import annotations

import pytest

from headrace.config import Config
from headrace.launch.probe import LONGEST_PROBE_GAP_S, patience


@pytest.mark.parametrize(
    ("env", "is_broken", "expected"),
    [
        ({"timeout_s": 20}, False, (50, "run.hang_timeout_s")),
        ({"timeout_s": 100}, False, (100 + LONGEST_PROBE_GAP_S, "env.mine.timeout_s")),
        ({"timeout_s": 100}, True, (50, "run.hang_timeout_s")),
        (
            {"timeout_s": 20, "episodes": True},
            False,
            (7410 + LONGEST_PROBE_GAP_S, "agents.episode_s and replay.group_deadline_s"),
        ),
        ({"timeout_s": 20, "episodes": True}, True, (50, "run.hang_timeout_s")),
    ],
)
def test_a_silent_environment_with_no_call_to_await_is_restarted(
    env: dict[str, object], is_broken: bool, expected: tuple[float, str]
) -> None:
    config = Config.model_validate(
        {
            "env": {"mine": {"target": "mine.py:Mine", **env}},
            "run": {"hang_timeout_s": 50},
            "replay": {"group_deadline_s": 7200},
        }
    )
    assert patience(config, "mine", is_broken=is_broken) == expected
    assert patience(config) == (50, "run.hang_timeout_s")
