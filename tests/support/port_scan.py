"""What strangers are told by the ports that processes listen on."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterable

import grpc
import httpx
import psutil
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from headrace.replay.connection import function_name
from headrace.v1 import reward_pb2, reward_pb2_grpc

# Pages of all services, and one that none has.
PATHS = (
    *(
        "/",
        "/readyz",
        "/metrics",
        "/metrics/",
        "/openapi.json",
        "/docs",
        "/v1/run",
        "/v1/stats",
        "/v1/bias",
        "/v1/metrics",
    ),
    *("/v1/events", "/v1/groups", "/v1/groups/x", "/v1/trajectories/x/0", "/v1/groups/x/lineage", "/v1/export"),
    *("/v1/environments", "/weights", "/v1/models", "/v1/completions", "/v1/chat/completions", "/nothing"),
    *("/sample", "/render"),
    *("/s/x/v1/chat/completions", "/s/x/v1/models", "/s/x/v1/models/policy", "/s/x"),
)
_WAIT_S = 10.0


def listening(processes: Iterable[int]) -> set[tuple[str, int]]:
    """Addresses that the processes listen on. A service that hides itself can't be looked up without privileges (`looked_up_reward`)."""
    found = set()
    for pid in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {
                tuple(connection.laddr[:2])
                for connection in psutil.Process(pid).net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    return found


async def told_by(host: str, ports: Iterable[int]) -> dict[int, dict[str, str]]:
    """`told` of each port."""
    asked = list(ports)
    return dict(zip(asked, await asyncio.gather(*(told(host, port) for port in asked)), strict=True))


async def told(host: str, port: int) -> dict[str, str]:
    """What a stranger is told, by protocol: `http`, `grpc`, `redis`. A protocol that the port doesn't speak is left out."""
    http, rpc, redis = await asyncio.gather(_http(host, port), _grpc(host, port), _redis(host, port))
    return {name: said for name, said in (("http", http), ("grpc", rpc), ("redis", redis)) if said is not None}


async def _http(host: str, port: int) -> str | None:
    """The statuses of all routes, then that of `/healthz`."""
    statuses = set()
    async with httpx.AsyncClient(
        base_url=f"http://{host}:{port}", timeout=_WAIT_S, trust_env=False, verify=False
    ) as client:
        try:
            for path in PATHS:
                for method in ("GET", "POST", "DELETE", "OPTIONS"):
                    statuses.add((await client.request(method, path, json={})).status_code)
            healthy = (await client.get("/healthz")).status_code
        except httpx.HTTPError:
            return None
    return f"{' '.join(map(str, sorted(statuses)))}, /healthz {healthy}"


async def _grpc(host: str, port: int) -> str | None:
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        said = set()
        for call, request in (
            (stub.Score, reward_pb2.ScoreRequest()),
            (stub.ListEnvironments, reward_pb2.ListEnvironmentsRequest()),
        ):
            try:
                await call(request, timeout=_WAIT_S)
                said.add("OK")
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    return None
                said.add(error.code().name)
    return " ".join(sorted(said))


async def _redis(host: str, port: int) -> str | None:
    said = set()
    for command in (("PING",), ("INFO",), ("KEYS", "*"), ("FUNCTION", "LIST"), ("FCALL", function_name("state"), "0")):
        with contextlib.suppress(ssl.SSLError):
            async with Redis(
                # a port that speaks another protocol may wait for more of it
                host=host,
                port=port,
                socket_timeout=_WAIT_S,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                driver_info=None,
            ) as client:
                try:
                    await client.execute_command(*command)
                    said.add("OK")
                except RedisError as error:
                    if "Authentication required" not in str(error) and "NOAUTH" not in str(error):
                        return None
                    said.add("NOAUTH")
    return " ".join(sorted(said))
