"""The default of `env.NAME.timeout_s`."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import Config


@pytest.mark.parametrize(
    ("name", "env", "expected"),
    [
        ("math", {}, 10),
        ("right", {"type": "math"}, 10),
        ("math", {"timeout_s": 30}, 30),
        ("math", {"type": "regex", "pattern": "x"}, 60),
        ("math", {"target": "127.0.0.1:1"}, 60),
        ("math", {"attached": True}, 60),
        ("code", {}, 60),
    ],
)
def test_a_hostile_formula_hurries_no_other_environment(name: str, env: dict[str, Any], expected: float) -> None:
    config = Config.model_validate({"env": {name: env}})
    assert config.env[name].timeout_s == expected
    assert Config.model_validate(config.model_dump(mode="json")).env[name].timeout_s == expected
