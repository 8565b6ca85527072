"""A lease outlives the replica that holds it, so that what a dead replica held is known."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from headrace.config import Config


def test_a_lease_that_ends_before_its_replica_counts_as_dead_is_refused() -> None:
    Config.model_validate({"replay": {"lease_s": 10}, "rollout": {"dead_after_s": 10}})
    with pytest.raises(ValidationError, match=r"replay\.lease_s 9 is less than rollout\.dead_after_s 10"):
        Config.model_validate({"replay": {"lease_s": 9}, "rollout": {"dead_after_s": 10}})
