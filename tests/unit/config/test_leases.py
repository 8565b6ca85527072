"""A lease outlives the replica that holds it, so that what a dead one held is known; a replica outlives the longest pause of the buffer."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from headrace.config import Config
from headrace.config.root import LONGEST_GAP_S
from headrace_services.replay import library


def test_a_lease_shorter_than_a_replicas_death_is_refused() -> None:
    Config.model_validate({"replay": {"lease_s": 10}, "rollout": {"dead_after_s": 10}})
    with pytest.raises(ValidationError, match=r"replay\.lease_s 9 .*rollout\.dead_after_s 10"):
        Config.model_validate({"replay": {"lease_s": 9}, "rollout": {"dead_after_s": 10}})


def test_a_replica_that_dies_of_a_servers_absence_is_refused() -> None:
    for dead_after_s, heartbeat_s in ((9.0, 2.0), (6.0, 0.5), (20.0, 5.0)):
        Config.model_validate(
            {"replay": {"lease_s": 60}, "rollout": {"dead_after_s": dead_after_s, "heartbeat_s": heartbeat_s}}
        )
        with pytest.raises(ValidationError, match=r"rollout\.dead_after_s .*rollout\.heartbeat_s"):
            Config.model_validate(
                {"replay": {"lease_s": 60}, "rollout": {"dead_after_s": dead_after_s - 0.1, "heartbeat_s": heartbeat_s}}
            )


def test_the_longest_pause_is_that_of_the_buffers_functions() -> None:
    assert f"local LONGEST_GAP_MS = {LONGEST_GAP_S * 1000:.0f}\n" in library.source()
