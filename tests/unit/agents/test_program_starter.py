"""Programs are started through the run's hubs."""

from __future__ import annotations

import itertools
import time

import grpc
import pytest

from headrace.base.errors import ServiceError
from headrace.env.episode import Episode
from headrace.net import rpc
from headrace.v1 import reward_pb2
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


class Hub:
    """Answers as `code` says."""

    code: grpc.StatusCode | None = None

    async def channel_ready(self) -> None:
        pass

    async def RunEpisode(self, request: reward_pb2.RunEpisodeRequest, **given: object) -> reward_pb2.RunEpisodeResponse:
        if self.code is not None:
            raise grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), grpc.aio.Metadata(), "give the token of agents")
        return reward_pb2.RunEpisodeResponse()


async def test_law_6_a_hub_whose_tokens_are_replaced_charges_no_episode() -> None:
    """One that never accepted this runner, or is of another version, ends it."""
    episode = Episode("http://127.0.0.1:1/s/k/v1", "k" * 32, deadline=time.monotonic() + 60)
    hub, programs = Hub(), HubPrograms([])
    programs._hubs = itertools.repeat((hub, hub))  # type: ignore[assignment]
    hub.code = grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(ServiceError, match="token of agents"):
        await programs.run(episode)
    hub.code = None
    assert (await programs.run(episode)).score is None
    hub.code = grpc.StatusCode.UNAUTHENTICATED
    outcome = await programs.run(episode)
    assert outcome.score is not None
    assert outcome.score.status == "NOT_STARTED"
    hub.code = grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(ServiceError, match="UNIMPLEMENTED"):
        await programs.run(episode)
