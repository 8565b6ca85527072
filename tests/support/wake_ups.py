"""Which channels of a run were woken, in the order of its calls."""

from __future__ import annotations

from headrace.replay import ReplayClient


class WakeUps:
    def __init__(self, client: ReplayClient) -> None:
        self._pubsub, self._pattern = client.redis.pubsub(), f"hr:{{{client.run_id}}}:wake:*"

    async def open(self) -> None:
        await self._pubsub.psubscribe(self._pattern)

    async def take(self) -> set[str]:
        """Those since the last call. What the server published before it got the ping comes before its answer."""
        await self._pubsub.ping()
        woken: set[str] = set()
        while (message := await self._pubsub.get_message(timeout=30.0)) is None or message["type"] != "pong":
            if message and message["type"] == "pmessage":
                woken.add(message["channel"].decode().rpartition(":")[2])
        return woken

    async def aclose(self) -> None:
        await self._pubsub.aclose()
