"""Starts programs, through the reward hub."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from headrace.base.errors import CodecError, ServiceError
from headrace.config import Config
from headrace.env.episode import Episode, EpisodeOutcome
from headrace.env.wire import episode_to_wire, outcome_from_wire
from headrace.net import rpc, tracing
from headrace.net.credentials import make_token_source
from headrace.records.score import Score
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc

# The hub always answers within this time after an episode's deadline.
_MARGIN_S = 10.0
# How long to wait for a hub that starts again, before the next one is tried.
_CONNECT_S = 2.0
# Only the run's operator can fix these.
_OURS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
_UNSENDABLE = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


class ProgramApi(Protocol):
    async def run(self, episode: Episode) -> EpisodeOutcome:
        """Run the episode's program until it ends. Cancellation ends the program. Raises `ServiceError` for an error that a retry can't
        fix."""


class HubPrograms:
    """Starts the programs of the run's environments through its hubs, in turn."""

    def __init__(self, channels: list[grpc.aio.Channel]) -> None:
        self._admitted = False  # a hub has run an episode
        self._hubs = itertools.cycle([(channel, pb_grpc.RewardServiceStub(channel)) for channel in channels])

    async def run(self, episode: Episode) -> EpisodeOutcome:
        try:
            request = pb.RunEpisodeRequest(episode=episode_to_wire(episode))
            request.episode.traceparent = tracing.current().traceparent
        except (CodecError, ValueError) as error:
            return EpisodeOutcome(Score("INVALID", message=f"can't be sent to its program: {error}"))
        channel, stub = next(self._hubs)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await channel.channel_ready()
        except TimeoutError:
            # INTERRUPTED would count against the group, as if its program had ended the hub
            return EpisodeOutcome(Score("NOT_STARTED", message="no connection to the reward hub; is it running?"))
        try:
            context = tuple(tracing.headers(groups=[episode.group_id]).items())
            response = await stub.RunEpisode(request, timeout=episode.remaining_s + _MARGIN_S, metadata=context)
        except grpc.aio.AioRpcError as error:
            message = f"the reward hub: {error.code().name}: {error.details()}"
            if self._admitted and error.code() is grpc.StatusCode.UNAUTHENTICATED:  # its credentials are being replaced
                return EpisodeOutcome(Score("NOT_STARTED", message=message))
            if error.code() in _OURS:
                raise ServiceError(
                    f"{message}; check that `headrace reward` has the same version and that security.credentials has the line `agents`"
                ) from error
            return EpisodeOutcome(Score("INVALID" if error.code() in _UNSENDABLE else "INTERRUPTED", message=message))
        self._admitted = True
        return outcome_from_wire(response.outcome)


@contextlib.asynccontextmanager
async def hub_programs(config: Config) -> AsyncIterator[HubPrograms]:
    """Connect to the run's hubs. Raises `ConfigError` for unusable credentials or certificates."""
    token = make_token_source(config, "agents")
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                rpc.channel(
                    address, config.reward.max_message_bytes, security=config.security, token=token, keep_alive=True
                )
            )
            for address in config.reward.addresses
        ]
        yield HubPrograms(channels)
