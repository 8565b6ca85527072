"""Processes of the tests, forked from one that has imported what they take longest for: torch and transformers, vLLM too, or scorers."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import pickle
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from headrace.base.parent import RESERVED, reservations
from tests.support.fork_server import FORK_HANDLERS, NUMBER, TESTS, folder_of_sockets

ROOT = Path(__file__).parents[2]
FORKED_AS = "as "  # the name of a process that is another one, before the id of that
FORKED_FOR = "TEST_FORKED_FOR"  # a variable: the id of the process that this one is forked for


class Forked:
    """A process, with the methods of `subprocess.Popen`. It is killed when nobody refers to this any more."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._reading = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        with self._reading:
            if self.returncode is None:
                status = self._connection.recv(NUMBER.size)
                # its parent is gone, and took it along
                self.returncode = os.waitstatus_to_exitcode(NUMBER.unpack(status)[0]) if status else -signal.SIGKILL
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(
    target: Callable[..., None],
    *arguments: Any,
    log: Path | None = None,
    talk: socket.socket | None = None,
    environ: Mapping[str, str] | None = None,
    kind: str = "trainer",
    streams: Sequence[int] | None = None,
) -> Forked:
    """A process that runs `target(*arguments)`, with `environ` beside the environment of this one. What it says goes to `log`; `talk` is
    its standard input and output; or `streams` are all three, and more descriptors. `kind` is one of `fork_server.IMPORTS`."""
    request = pickle.dumps((target, arguments, {**os.environ, **(environ or {})}))
    connection = connected(kind)
    with open(log or os.devnull, "ab") as file:
        said = file.fileno() if log else 2
        own = [talk.fileno(), talk.fileno(), said] if talk else [file.fileno(), said, said]
        socket.send_fds(connection, [NUMBER.pack(len(request))], streams or own)
        connection.sendall(request)
        (pid,) = NUMBER.unpack(connection.recv(NUMBER.size))
    return Forked(connection, pid)


async def keep_forked(
    deaths: list[int], target: Callable[..., None], *arguments: Any, log: Path | None = None
) -> NoReturn:
    """Run `target(*arguments)` in a process, and again each time that one has ended, until cancelled. Exit codes go to `deaths`."""
    import asyncio  # here, as in `fork_server`

    while True:
        process = fork(target, *arguments, log=log)
        try:
            deaths.append(await asyncio.to_thread(process.wait))
        except asyncio.CancelledError:
            process.kill()
            raise


def command(*arguments: str) -> None:
    """The `headrace` command, as the life of a process."""
    from headrace.cli import main

    sys.argv = ["headrace", *arguments]
    main()


def command_in(folder: str, name: str, *arguments: str) -> None:
    """`command` in `folder`, with the packages of its own `PYTHONPATH`; the processes of a hub are forked, too."""
    os.chdir(folder)
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    if name == "reward":
        import asyncio

        from tests.support import forked_workers

        asyncio.create_subprocess_exec = forked_workers.create_subprocess_exec
    command(name, *arguments)


def be_command(kind: str, name: str, *arguments: str) -> NoReturn:
    """This process, in which nothing is imported yet, is `headrace NAME` in one that is forked, which `processes.descendants` has in its
    place."""
    streams = [0, 1, 2, *reservations()]
    environ = {RESERVED: " ".join(map(str, range(3, len(streams)))), FORKED_FOR: str(os.getpid())}
    process = fork(command_in, os.getcwd(), name, *arguments, environ=environ, kind=kind, streams=streams)
    Path("/proc/self/comm").write_text(f"{FORKED_AS}{process.pid}")
    code = _obeying(process)
    if code < 0:  # it ends as that one did
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _obeying(process: Forked) -> int:
    """Wait for it, and send it the signals of this process meanwhile."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: process.send_signal(number))
    return process.wait()


def interpreter() -> str:
    """A command with the arguments of Python that runs `-c SOURCE` with the imports of trainers already made."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.forks import _be_interpreter; _be_interpreter()"
    return shlex.join([sys.executable, "-c", start])


def _be_interpreter() -> None:
    sys.exit(_obeying(fork(_interpret, sys.argv[-1], streams=(0, 1, 2))))


def _interpret(source: str) -> None:
    sys.argv = ["-c"]
    try:
        exec(source, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()


def connected(kind: str) -> socket.socket:
    """To the server of this kind, which the first who asks for it starts."""
    path = folder_of_sockets() / kind
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = None if path.exists() else _start(kind, path)
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if server is None or server.poll() is not None:
                    raise AssertionError(path.with_suffix(".log").read_text()) from None
                time.sleep(0.05)
            else:
                return connection


def _start(kind: str, path: Path) -> subprocess.Popen[bytes]:
    with path.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", kind, str(path), os.environ[TESTS]],
            # it imports what is installed, not what the process that asks for it has in its place
            env={**os.environ, "PYTHONPATH": str(ROOT), FORK_HANDLERS: "0"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the tests
        )


@contextmanager
def fork_ranks(count: int, target: Callable[..., None], *arguments: Any, log: Path) -> Iterator[list[Forked]]:
    """So many processes with the environment that torchrun gives its ranks. Those that still run at the end are killed."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),  # a test before may have left another one
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks: list[Forked] = []
    try:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(fork(target, *arguments, log=log, environ={**environ, **own}))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
