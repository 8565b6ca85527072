"""Replicas that pull, without engines: what they fetch, and their HTTP servers, all in this process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.config import Config
from headrace.net.http_access import HttpAccess
from headrace.net.service import bind, create_app, serve_http
from headrace.replay import Epoch
from headrace.run.object_store import RunStore
from headrace.run.weight_store import BLOCK_BYTES, PublishedWeights
from headrace_services.refit.manifest import Manifest
from headrace_services.refit.rendezvous import Offer
from headrace_services.rollout import peers
from headrace_services.rollout.pulling import Puller

MANIFEST = Manifest(("w",), ("float32",), ((256,),), 4096)
PROBE = np.array([1, 2], np.int32)
FAN_OUT = 2  # of `parents.lua`


class Buffer:
    """What the buffer says to those that pull: the newest offer, and who is above them in the tree."""

    def __init__(self) -> None:
        self.offer: Epoch | None = None
        self.infos: dict[str, dict[str, Any]] = {}  # in the order in which they came
        self.unreached_replicas: list[tuple[str, str]] = []

    async def offered(self, replica: str) -> Epoch | None:
        return self.offer

    async def parents(self, replica: str) -> list[tuple[str, Mapping[str, Any]]]:
        found, place = [], [*self.infos, replica].index(replica)
        while place >= FAN_OUT:
            place = place // FAN_OUT - 1
            found.append([*self.infos.items()][place])
        return found

    async def unreached(self, replica: str, reason: str) -> None:
        self.unreached_replicas.append((replica, reason))


class Trainer:
    """Puts weights into a store, and names them to the buffer."""

    def __init__(self, url: str, buffer: Buffer, *, block_bytes: int = BLOCK_BYTES) -> None:
        self.url, self.buffer, self._block_bytes = url, buffer, block_bytes
        self._published: dict[str, PublishedWeights] = {}

    def offer(self, version: int, weights: np.ndarray[Any, Any], timeline: str = "t1") -> None:
        """`weights` must stay as they are."""
        published = self._published.setdefault(
            timeline, PublishedWeights(RunStore(self.url), timeline, block_bytes=self._block_bytes)
        )
        digest = published.publish(version, MANIFEST.encode(), [0], [memoryview(weights).cast("B")])
        terms = Offer(digest, PROBE, 5.0).encode()
        self.buffer.offer = Epoch(
            id=hashlib.sha256(f"{timeline} {version}".encode()).hexdigest()[:8],
            version=version,
            timeline=timeline,
            state="transfer",
            members=(),
            acknowledged=(),
            verified=(),
            refused={},
            rendezvous=msgspec.msgpack.decode(msgspec.msgpack.encode(terms)),
        )


class Replica:
    """One that pulls: its HTTP server has only what others fetch."""

    def __init__(self, name: str, config: Config, buffer: Buffer, url: str, folder: Path) -> None:
        replay: Any = buffer
        folder.mkdir(parents=True)
        self.name, self._config = name, config
        self.puller = Puller(config, replay, url, folder)
        self.file = folder / "weights"
        self.held: tuple[str, int] | None = None
        self.url = ""
        self._server = contextlib.AsyncExitStack()

    async def start(self, access: HttpAccess | None = None) -> None:
        async def ready() -> None:
            return None

        sock: socket.socket = bind("127.0.0.1", 0, "rollout.port")
        app = create_app("a replica", ready)
        app.add_route(peers.PATH, self.puller.served, ["POST"])
        scheme = "http" if access is None or access.certificate is None else "https"
        self.url = f"{scheme}://127.0.0.1:{sock.getsockname()[1]}"
        self._server.callback(sock.close)
        await self._server.enter_async_context(serve_http(app, sock, access or HttpAccess(None, frozenset())))

    async def stop_serving(self) -> None:
        await self._server.aclose()

    async def begin(self) -> None:
        await self.puller.look(self.name, self.held)

    async def settle(self) -> Epoch | None:
        """What may be installed once nothing is being fetched."""
        await self.begin()
        while (task := self.puller._task) is not None and not task.done():
            await asyncio.wait([task])
        return await self.puller.look(self.name, self.held)

    async def install(self) -> None:
        """Take the newest version, once it is here."""
        epoch = await self.settle()
        assert epoch is not None, self.puller.problem
        self.held = (epoch.timeline, epoch.version)
        await self.puller.look(self.name, self.held)


@contextlib.asynccontextmanager
async def running(
    count: int, url: str, buffer: Buffer, folder: Path, config: Config, access: HttpAccess | None = None
) -> AsyncIterator[list[Replica]]:
    """Yield so many replicas that pull from the store at `url`, in the order in which they have come."""
    replicas = [Replica(f"r{place}", config, buffer, url, folder / f"r{place}") for place in range(count)]
    try:
        for replica in replicas:
            await replica.start(access)
            buffer.infos[replica.name] = {"url": replica.url, peers.SERVES: replica.url}
        yield replicas
    finally:
        for replica in replicas:
            await replica.puller.aclose()
        await asyncio.gather(*(replica.stop_serving() for replica in replicas))
