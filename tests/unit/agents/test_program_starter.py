"""Programs are started through the run's hubs."""

from __future__ import annotations

import time

import pytest

from headrace.env.episode import Episode
from headrace.net import rpc
from headrace_services.agents import program_starter
from headrace_services.agents.program_starter import HubPrograms
from tests.support.ports import free_port


async def test_law_6_liveness_a_hub_that_is_away_charges_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it starts again, an episode may be tried more often than a group may fail."""
    monkeypatch.setattr(program_starter, "_CONNECT_S", 0.1)
    episode = Episode("http://127.0.0.1:1/s/k/v1", "k" * 32, deadline=time.monotonic() + 60)
    async with rpc.channel(f"127.0.0.1:{free_port()}") as channel:
        outcome = await HubPrograms([channel]).run(episode)
    assert outcome.score is not None
    assert outcome.score.status == "NOT_STARTED"
    assert "hub" in outcome.score.message
