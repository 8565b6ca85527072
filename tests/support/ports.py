"""Ports for servers of tests, below those that the kernel gives to outgoing connections and for port 0.

Each is given once, whichever process of this machine's tests asks: nothing takes it between the choice and the server's bind.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

PORTS = range(10_000, 32_768)  # Linux's ephemeral ports begin at 32768


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ports that nothing listens on: the next ones after those given last, around the range."""
    given: list[int] = []
    with (Path(tempfile.gettempdir()) / f"headrace-test-ports-{os.getuid()}").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        last = int(file.read() or PORTS[0])
        for _ in PORTS:
            if len(given) == count:
                break
            last = PORTS[(last + 1 - PORTS[0]) % len(PORTS)]
            if _is_free(last):
                given.append(last)
        file.truncate(0)
        file.write(str(last))
    assert len(given) == count, f"no {count} free ports in {PORTS}"
    return given


def listens(port: int) -> bool:
    """Whether something takes connections on this port of the loopback interface."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
