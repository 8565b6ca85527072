"""Hosts and addresses: how they are written, and which of them stay on this machine."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

from headrace.base.errors import ConfigError

# Services for this machine alone listen here.
LOOPBACK = "127.0.0.1"


def replace_wildcard(host: str) -> str:
    """Return the address at which this machine reaches a service that listens on `host`, which may be all interfaces."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def is_one_host(text: str) -> bool:
    """Whether `text` is the name or the address of one machine, without a port or a scheme; an address of all interfaces is none."""
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return re.fullmatch(r"[\w.-]+", text, re.ASCII) is not None


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


def has_host(url: str) -> bool:
    """Whether the URL has a host, and a port that can be one if it names any."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port >= 0)
    except ValueError:
        return False


# the variables that name a proxy, the first that is set wins: for gRPC, and for requests of these schemes
GRPC_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
HTTP_PROXIES = {scheme: (f"{scheme}_proxy", "all_proxy") for scheme in ("http", "https")}


def through_proxy(target: str, variables: Sequence[str]) -> str:
    """Return the end of an error about `target` (host:port) that names the variable whose proxy leads there; empty if none does."""
    name = _proxy_variable(target, variables)
    if name is None:
        return ""
    proxy = re.sub(r"//[^/@]*@", "//***@", os.environ[name])
    return f"; through the proxy {proxy} ({name}; NO_PROXY={_split_host(target)} goes without)"


def url_through_proxy(url: str) -> str:
    """Return what `through_proxy` does, for a request to `url`; empty if its scheme is not HTTP's."""
    target, variables = _split_url(url)
    return through_proxy(target, variables) if variables else ""


def find_proxy(url: str) -> str | None:
    """Return the URL of the proxy for a request to `url`, if the environment names one; nothing on this machine has one. Raises
    `ConfigError` for one that is no URL, or does not speak HTTP."""
    name = _proxy_variable(*_split_url(url))
    if name is None:
        return None
    proxy = os.environ[name] if "://" in os.environ[name] else f"http://{os.environ[name]}"
    host = urlsplit(url).hostname
    if not has_host(proxy):  # its text, which may have a password, is not shown
        raise ConfigError(
            f"{name} names no proxy with a host and a port; give http://HOST:PORT, or add {host} to NO_PROXY"
        )
    scheme = urlsplit(proxy).scheme
    if scheme not in HTTP_PROXIES:
        raise ConfigError(f"{name} names a proxy of {scheme}://; give one of http://, or add {host} to NO_PROXY")
    return proxy


def _split_url(url: str) -> tuple[str, Sequence[str]]:
    """Return host:port of a URL, and the variables that may name its proxy: none if its scheme is not HTTP's."""
    parts = urlsplit(url)
    port = {"http": 80, "https": 443}.get(parts.scheme)
    if port is None or parts.hostname is None:
        return "", ()
    return with_port(parts.hostname, parts.port or port), HTTP_PROXIES[parts.scheme]


def _proxy_variable(target: str, variables: Sequence[str]) -> str | None:
    if target_is_local(target) or proxy_bypass(_split_host(target)):
        return None
    environ = {name.lower(): name for name in os.environ if os.environ[name]}
    return next((environ[variable] for variable in variables if variable in environ), None)


def _split_host(target: str) -> str:
    return target.rpartition(":")[0].strip("[]")


def without_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which programs reach this machine without a proxy, whatever `environ` names; empty if it names none."""
    named = {name.lower() for name, value in environ.items() if value}
    if not named & {"grpc_proxy", "http_proxy", "https_proxy", "all_proxy"}:
        return {}
    before = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = before if before == "*" else ",".join(filter(None, [before, LOOPBACK, "localhost", "::1"]))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


def parse_hosts(url: str) -> list[str]:
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
