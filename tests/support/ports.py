"""Free ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ports: all are held until the last is known."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def listens(port: int) -> bool:
    """Whether something takes connections on this port of the loopback interface."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
