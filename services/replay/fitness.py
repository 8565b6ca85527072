"""Whether a Redis server can carry the buffer: what rules it out, and what it may lose."""

from __future__ import annotations

import logging
from typing import Any

from redis.asyncio import Redis

from headrace.errors import ServiceError
from headrace.replay.connect import shown
from headrace.replay.wire import Wire

_log = logging.getLogger("headrace.replay")


async def check_server(redis: Redis, url: str, max_bytes: int) -> None:
    """Say in the log what the server may lose. Raises `ServiceError` for one that can't carry the buffer, `ReplayUnavailable` if it
    does not answer, `ReplayDenied` if it lets nobody in. `max_bytes` is the bound of the payloads."""
    info = await Wire(redis, "none").command("INFO", "everything")
    where = f"replay.redis_url {shown(url)}"
    problem = unfit(info)
    if problem is not None:
        raise ServiceError(f"{where}: {problem}")
    for risk in risks(info, max_bytes):
        _log.warning("%s: %s", where, risk)


def unfit(info: dict[str, Any]) -> str | None:
    """What rules a server with this INFO out, and the remedy."""
    version = str(info["redis_version"])
    if int(version.split(".")[0]) < 7:
        return f"Redis {version} has no functions; run Redis 7.0 or later, or Valkey"
    policy = info["maxmemory_policy"]
    if policy != "noeviction":
        return (
            f"maxmemory-policy {policy} would drop trajectories; set it with `CONFIG SET maxmemory-policy noeviction`"
        )
    if info.get("cluster_enabled"):
        return "it is a node of a Redis Cluster; the buffer of a run lives on one server: give one outside a cluster"
    if info["role"] != "master":
        return (
            f"it is a replica of {info['master_host']}:{info['master_port']}; give the primary, an address that follows it, or "
            "sentinel://host:port/SERVICE"
        )
    return None


def risks(info: dict[str, Any], max_bytes: int) -> list[str]:
    """What a server with this INFO may lose, or refuse, that another would not."""
    found = []
    # while it loads its file, a server says that it has none
    if not info["aof_enabled"] and not info["loading"]:
        found.append(
            "appendonly is off: a restart of the server loses the queue, the generations in flight and what was trained since the "
            "last checkpoint, and the trainer goes on from there; set it with `CONFIG SET appendonly yes`"
        )
    if 0 < int(info["maxmemory"]) < max_bytes:
        found.append(
            f"maxmemory {info['maxmemory']} is less than replay.max_bytes {max_bytes}: pushes will be refused before leases wait; "
            "raise the one or lower the other"
        )
    return found
