"""`env`: what an environment is, who starts it, and where it listens."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config import Config
from headrace.config.environments import CustomConfig, read_environment


@pytest.mark.parametrize(
    ("given", "served", "started", "address"),
    [
        ({"type": "math"}, False, False, None),
        ({"target": "judge.internal:50400"}, True, False, "judge.internal:50400"),
        ({"target": "[::1]:50400"}, True, False, "[::1]:50400"),
        ({"target": "dns:///judge:50400"}, True, False, "dns:///judge:50400"),
        ({"target": "unix:/run/judge.sock"}, True, False, "unix:/run/judge.sock"),
        ({"target": "rewards/my_env.py:Exact", "port": 7}, True, True, "127.0.0.1:7"),
        ({"target": "rewards/my_env.py:Exact"}, True, True, None),
        ({"command": ["./judge"], "port": 8}, True, True, "127.0.0.1:8"),
        ({"attached": True}, True, False, None),
    ],
)
def test_an_environment_is_built_in_served_or_started(
    given: dict[str, Any], served: bool, started: bool, address: str | None
) -> None:
    env = read_environment(given)
    assert (isinstance(env, CustomConfig), env.is_started, env.address) == (served, started, address)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "math", "target": "127.0.0.1:5"}, "type 'math' and target '127.0.0.1:5'"),
        ({"target": "my_env.py:Exact", "command": ["x"]}, "target 'my_env.py:Exact' and command"),
        ({"type": "math", "command": ["x"]}, "type 'math' and command"),
        ({"target": "127.0.0.1:5", "attached": True}, "and attached true: give one of them, .*attached to false"),
        (
            {"attached": True, "port": 5},
            "5 is an option of an environment with target, .* not of an environment with attached",
        ),
        ({"target": "my_env.py"}, "target 'my_env.py' is neither FILE.py:CLASS or FILE.py:FUNCTION, nor the host:port"),
        ({"target": "my_env:Exact"}, "target 'my_env:Exact' is neither"),
        ({"target": "my_env.py:"}, "target 'my_env.py:' is neither"),
        ({"target": "judge.internal"}, "target 'judge.internal' is neither"),
        ({"command": []}, "at least 1 item"),
        ({"target": "127.0.0.1:5", "port": 5}, "port 5 is for an environment that `headrace up` starts"),
        ({}, r"env\.mine\n.* give `type` .*, `target` .*, `command`, or `attached: true`"),
        ({"attached": False}, "give `type`"),
        ({"type": "maths"}, r"env\.mine\.type\n.*'maths' is not a built-in environment; did you mean math\?"),
        ({"type": ["math"]}, r"env\.mine\.type\n.*\['?math'?\] is not a built-in environment"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Config.model_validate({"env": {"mine": given}})
