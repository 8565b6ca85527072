"""What `headrace config show` says of the age policy."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.config import age_bound
from headrace.config import Config


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"enabled": False}, ["strictly on-policy", "weights t alone", "at most 8 groups"]),
        ({}, ["ordered", "no token older than weights t - 2", "at most 24 groups", "none dropped"]),
        (
            {"staleness_policy": "drop", "ahead_steps": 5},
            ["drop", "no token older than weights t - 2", "at most 48 groups", "over age by then is generated again"],
        ),
        ({"staleness_policy": "drop"}, ["at most 24 groups"]),
        (
            {"staleness_policy": "mask", "ahead_steps": 5},
            ["mask: tokens older than weights t - 2 leave the policy loss", "at most 48 groups", "without a younger token"],
        ),
    ],
)  # fmt: skip
def test_the_policy_s_bound_and_promise_are_said(settings: dict[str, Any], says: list[str]) -> None:
    ages = {"enabled": True, "max_trajectory_age_steps": 2, **settings}
    said = age_bound(Config.model_validate({"grpo": {"num_prompts_per_step": 8, "async_grpo": ages}}))
    assert all(words in said for words in says), said
