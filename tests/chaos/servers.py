"""The buffer's server of a chaos run: the embedded one, a child of the replay service, or a primary and its replica of our own,
behind one address that follows the primary."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.exceptions import RedisError

from headrace.replay.connection import keeping_cancellation
from tests.chaos.processes import Process, Victim, child_named
from tests.support.network import SUBNET, Network
from tests.support.waiting import eventually

PORT = 6379
ADDRESS = f"{SUBNET}.10"
# The machines of an external server and its replica, and those that watch over them.
PAIR = ("redis-a", "redis-b")
_SENTINELS = {"sentinel-1": 15, "sentinel-2": 16, "sentinel-3": 17}
_SENTINEL_PORT = 26379
_SERVICE = "buffer"
# What a Sentinel is told: the primary is down once two of them have not heard of it for five seconds.
_WATCHED = f"""
sentinel monitor {_SERVICE} {{primary}} {PORT} 2
sentinel down-after-milliseconds {_SERVICE} 5000
sentinel failover-timeout {_SERVICE} 10000
"""


class Servers(Protocol):
    @property
    def address(self) -> str: ...

    @property
    def front(self) -> str:
        """Where the services reach it now."""

    @property
    def setting(self) -> str:
        """What the configuration says of it."""

    @property
    def port(self) -> int: ...

    @property
    def machine(self) -> str:
        """Where the server runs that is in charge."""

    @property
    def disk(self) -> Path:
        """What the server in charge writes its files to."""

    def up(self) -> bool: ...

    def kill(self, *, replaced: bool = True) -> None:
        """SIGKILL; it stays away until `restart`. Not `replaced`: nobody takes its place meanwhile."""

    def restart(self) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def lose_copies(self) -> None:
        """Nothing that was sent before arrives from now on."""

    async def came_back(self) -> None:
        """Return once the server that was restarted has a file that no other crash can spoil."""

    async def disk_was_full(self) -> None:
        """Return once that is so after there is room again."""

    async def follow(self) -> None:
        """See, for ever, which server others make the one in charge."""

    async def in_step(self) -> None:
        """Return once the replica, if there is one, follows the server in charge."""


class Embedded:
    """The replay service starts it again by itself: frozen with it, neither comes back before `restart`."""

    def __init__(self, replay: Victim, machine: str, disk: Path) -> None:
        self.address = self.front = machine
        self.setting = f"redis_host: {machine}"
        self.port = PORT
        self.machine = machine
        self.disk = disk
        self._replay = replay

    def _pid(self) -> int | None:
        return child_named(self._replay.pid, "valkey") if self._replay.pid is not None else None

    def up(self) -> bool:
        return self._pid() is not None

    def kill(self, *, replaced: bool = True) -> None:
        self._replay.freeze(whole=False)
        self._signal(signal.SIGKILL)

    def restart(self) -> None:
        self._replay.thaw(whole=False)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def lose_copies(self) -> None:
        pass  # there are none

    async def came_back(self) -> None:
        pass  # it reads no half of a transaction

    async def disk_was_full(self) -> None:
        pass  # the replay service cuts its file off at a gap

    async def follow(self) -> None:
        await asyncio.Event().wait()

    async def in_step(self) -> None:
        pass

    def _signal(self, signum: int) -> None:
        if (pid := self._pid()) is not None:
            os.kill(pid, signum)


class External:
    """`redis-server` on two machines, each with a disk of its own, a folder under `folder` that is there. Either may be the primary; the
    other copies it, and comes back as its replica. `duplicates`: a courier stands before them. `sentinels`: three of Redis's Sentinels
    decide which is the primary, and services ask them; `ADDRESS` is the driver's own way there. `environ`: of a process, by its machine."""

    def __init__(
        self,
        network: Network,
        environ: Callable[[str], Mapping[str, str]],
        folder: Path,
        seed: int,
        *,
        duplicates: bool,
        sentinels: bool,
    ) -> None:
        self.address = ADDRESS
        self.port = PORT
        self._folder = folder
        self._network = network
        self._hosts = iter(range(100, 200))  # of machines to come
        self._lost, self._behind = "", ""  # the primary that was killed, and a replica that misses writes
        for host, name in enumerate(PAIR, 2):
            network.add(name, host)
        self.processes = {name: Process(name, [], environ(name), folder.parent / f"{name}.log") for name in PAIR}
        self._primary, self._replica = PAIR
        network.give_address(ADDRESS, self._primary)
        self.sentinels: list[Process] = []
        self.setting = f"redis_url: redis://{ADDRESS}:{PORT}/0"
        if sentinels:
            self.sentinels = [self._sentinel(name, host, environ(name)) for name, host in _SENTINELS.items()]
            watchers = ",".join(f"{network.address(name)}:{_SENTINEL_PORT}" for name in _SENTINELS)
            self.setting = f"redis_url: sentinel://{watchers}/{_SERVICE}"
        self.processes |= {sentinel.name: sentinel for sentinel in self.sentinels}
        for name in PAIR:
            self._set_role(name)
        if duplicates:
            courier = network.add("courier", 11)
            self.setting = f"redis_url: redis://{courier}:{PORT}/0"
            argv = ["-m", "tests.chaos.courier", courier, str(PORT), ADDRESS, str(seed)]
            log = folder.parent / "courier.log"
            self.processes["courier"] = Process(
                "courier", [*network.enter("courier"), sys.executable, *argv], environ("courier"), log
            )

    def _sentinel(self, name: str, host: int, environ: Mapping[str, str]) -> Process:
        address = self._network.add(name, host)
        settings = self._folder.parent / f"{name}.conf"  # which it writes, too
        own = f"port {_SENTINEL_PORT}\nbind {address}\nprotected-mode no\ndir {self._folder.parent}\n"
        settings.write_text(own + _WATCHED.format(primary=self._network.address(self._primary)))
        argv = [*self._network.enter(name), "redis-server", str(settings), "--sentinel"]
        return Process(name, argv, environ, settings.with_suffix(".log"))

    def _set_role(self, name: str) -> None:
        settings = {
            "port": str(PORT), "bind": "0.0.0.0", "protected-mode": "no", "dir": str(self._folder / name), "appendonly": "yes",
            "save": '""', "maxmemory-policy": "noeviction", "repl-diskless-sync-delay": "0",
        }  # fmt: skip
        if name != self._primary:
            of = self._network.address(self._primary) if self.sentinels else ADDRESS
            settings["replicaof"] = f"{of} {PORT}"
        file = self._folder.parent / f"{name}.conf"  # Sentinels have it rewritten
        file.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        self.processes[name].argv = [*self._network.enter(name), "redis-server", str(file)]

    @property
    def front(self) -> str:
        if self.sentinels:
            return self._network.address(self._primary)
        return "courier" if "courier" in self.processes else ADDRESS

    @property
    def machine(self) -> str:
        return self._primary

    @property
    def disk(self) -> Path:
        return self._folder / self._primary

    def up(self) -> bool:
        return self.processes[self._primary].pid is not None

    def kill(self, *, replaced: bool = True) -> None:
        self._lost = self._primary
        for process in (self.processes[self._primary], *([] if replaced else self.sentinels)):
            process.may_start.clear()
            process.kill()

    def restart(self) -> None:
        for process in self.processes.values():
            process.may_start.set()

    def freeze(self) -> None:
        self.processes[self._primary].freeze()

    def thaw(self) -> None:
        for name in PAIR:  # another may be the primary by now
            self.processes[name].thaw()

    def lose_copies(self) -> None:
        if "courier" in self.processes:
            self.processes["courier"].kill()

    async def came_back(self) -> None:
        async with Redis(host=self._primary, port=PORT, socket_timeout=10.0) as redis:
            await _until(redis, lambda info: info["aof_rewrites"] and not info["aof_rewrite_in_progress"])

    async def disk_was_full(self) -> None:
        async with Redis(host=self._primary, port=PORT, socket_timeout=10.0) as redis:
            before = (await redis.info("persistence"))["aof_rewrites"]
            await _until(redis, lambda info: info["aof_rewrites"] > before and not info["aof_rewrite_in_progress"])

    def leave_replica_behind(self) -> None:
        """From now on the replica misses what is written."""
        self._behind = self._replica
        self._network.cut(self._behind)

    async def fail_over(self) -> None:
        """The primary was killed: the replica takes its place with what it had; the other will come back as its replica."""
        if self._behind:
            self._network.heal(self._behind)
            self._behind = ""
        if self.sentinels:
            await eventually(lambda: self._primary != self._lost)
            return
        async with Redis(host=self._replica, port=PORT, socket_timeout=10.0) as redis:
            await redis.execute_command("REPLICAOF", "NO", "ONE")
        self._swap()
        for name in PAIR:
            self._set_role(name)

    def _swap(self) -> None:
        self._primary, self._replica = self._replica, self._primary
        self._network.give_address(ADDRESS, self._primary)

    async def follow(self) -> None:
        while True:
            named = Counter([await self._named_by(name) for name in _SENTINELS] if self.sentinels else [])
            if named[self._network.address(self._replica)] > len(_SENTINELS) / 2:
                self._swap()
            await asyncio.sleep(0.2)

    async def _named_by(self, sentinel: str) -> str | None:
        """The address of the primary, as this Sentinel says."""
        asking = Redis(host=sentinel, port=_SENTINEL_PORT, socket_timeout=0.5, socket_connect_timeout=0.5)
        with contextlib.suppress(RedisError, OSError), keeping_cancellation():
            async with asking as redis:
                found = await redis.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", _SERVICE)
                return found[0].decode() if found else None
        return None

    async def in_step(self) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError), keeping_cancellation():  # it starts, or copies its data
                async with Redis(host=self._replica, port=PORT, socket_timeout=2.0) as redis:
                    if (await redis.info("replication")).get("master_link_status") == "up":
                        return
            await asyncio.sleep(0.1)

    def lose_machine(self) -> None:
        """The machine of the primary is gone."""
        self._network.remove(self._primary)
        self.kill()

    async def replace_machine(self) -> None:
        """The replica has taken its place; another machine, with an empty disk, copies it."""
        self._network.add(self._lost, next(self._hosts))
        await self.fail_over()
        self._set_role(self._lost)


def limit_memory(servers: Servers, *, full: bool) -> int:
    """Give the server no more memory than it has; or, not `full`, as much as it wants, which is its default. Returns the limit."""
    with SyncRedis(host=servers.address, port=servers.port, socket_timeout=5.0) as redis:
        limit = int(redis.info("memory")["used_memory"]) if full else 0  # type: ignore[index]
        redis.config_set("maxmemory", limit)
    return limit


async def _until(redis: Redis, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Return once it holds of what the server says about its files, which the replay service has rewritten (docs/replay.md)."""
    while True:
        with contextlib.suppress(RedisError, OSError), keeping_cancellation():  # it starts
            if holds(await redis.info("persistence")):
                return
        await asyncio.sleep(0.1)


def tear_tail(disk: Path, most: int) -> int:
    """Cut up to `most` bytes off the end of the newest append-only file under `disk`; returns how many."""
    newest = max(disk.rglob("*.incr.aof"), key=lambda path: path.stat().st_mtime_ns)
    size = newest.stat().st_size
    os.truncate(newest, max(0, size - most))
    return min(size, most)


def written(name: str, value: str) -> bytes:
    """A name and its value as a command in an append-only file."""
    return f"${len(name)}\r\n{name}\r\n${len(value)}\r\n{value}\r\n".encode()


def tear_behind(disk: Path, words: bytes) -> int:
    """Cut the newest append-only file under `disk` off where the transaction begins that last wrote these; returns how many bytes."""
    newest = max(disk.rglob("*.incr.aof"), key=lambda path: path.stat().st_mtime_ns)
    content = newest.read_bytes()
    keep = content.rindex(b"*1\r\n$5\r\nMULTI\r\n", 0, content.rindex(words))
    os.truncate(newest, keep)
    return len(content) - keep
