"""Hosts and addresses: how they are written, and which of them stay on this machine."""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

# Services for this machine alone listen here.
LOOPBACK = "127.0.0.1"


def reached(host: str) -> str:
    """Return the address at which this machine reaches a service that listens on `host`, which may be all interfaces."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def with_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine alone. Of names, only `localhost` is: the address of another can change."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def target_is_local(target: str) -> bool:
    """Whether a gRPC target (host:port, or unix:path) is on this machine alone."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    address = re.sub(r"^(dns:(//[^/]*/)?|ipv4:|ipv6:)", "", target)
    return is_loopback(address.rpartition(":")[0] or address)


def hosts_of(url: str) -> list[str]:
    """Return the hosts that the URL of a buffer names: several for sentinel://, none for unix://."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return []
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return [host if host.endswith("]") else host.rpartition(":")[0] or host for host in hosts]


def own_address(host: str, port: int = 9) -> str:
    """Return the address of the interface that leads to `host`; peers on that network can reach it. Raises `OSError` if the name can't be
    resolved."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.connect(address)  # a datagram socket: chooses the interface, sends nothing
        own: str = sock.getsockname()[0]
    return own
