"""Hosts and addresses: which are this machine alone, and how they are written."""

from __future__ import annotations

import ipaddress
import re

# Where what is for this machine alone listens.
LOOPBACK = "127.0.0.1"


def reached(host: str) -> str:
    """The address at which this machine reaches a service that listens on `host`, which may be all interfaces."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def with_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine alone. A name other than `localhost` is not: what it means can change."""
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
