"""A network of namespaces: each service has a machine's worth of addresses of its own, and its cable can be pulled.

Everything here runs inside namespaces of its own (`unshare -Urnmpf`), where an ordinary user is root. A bridge joins the
services; a cut takes a service's port out of the bridge, so that packets both ways vanish without a word, as they do when a
switch dies. Half open, packets to one peer go to a hardware address that nobody has, while those from it arrive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

SUBNET = "10.77.0"
_BRIDGE = "hr0"
_NOBODY = "02:00:00:00:00:99"


class Network:
    def __init__(self, names: Path | None = None) -> None:
        """`names`: a file to make, which takes the place of /etc/hosts: machines have names here."""
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._addresses: dict[str, str] = {}
        self._names = names
        if names is not None:
            names.touch()
            _run(["mount", "--bind", str(names), "/etc/hosts"])
        _ip("link", "set", "lo", "up")
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{SUBNET}.1/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")

    def add(self, name: str, host: int) -> str:
        """A machine `name`; returns its address."""
        # `cat` ends when this process does: its standard input closes
        self._holders[name] = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a signal to our group is not for them
        )
        self._await_namespace(name)
        _ip("link", "add", _port(name), "type", "veth", "peer", "name", "eth0", "netns", str(self._holders[name].pid))
        _ip("link", "set", _port(name), "master", _BRIDGE, "up")
        address = f"{SUBNET}.{host}"
        for command in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", f"{SUBNET}.1"),
        ):
            self._inside(name, *command)
        self._addresses[name] = address
        if self._names is not None:
            lines = [f"{of:15} {name}\n" for name, of in {"localhost": "127.0.0.1", **self._addresses}.items()]
            with self._names.open("r+") as file:  # in place: it is the file itself that is mounted, and others read it
                file.write("".join(lines))
        return address

    def address(self, name: str) -> str:
        return self._addresses[name]

    def remove(self, name: str) -> None:
        """The machine is gone, with all that ran there, and nobody is told. Another may get its name."""
        _ip("link", "del", _port(name))
        holder = self._holders.pop(name)
        space = _space(holder.pid)
        for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]:
            # what has ended meanwhile: one that hides from its user is denied then
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if _space(pid) == space:
                    os.kill(pid, signal.SIGKILL)
        holder.wait()

    def enter(self, name: str) -> list[str]:
        """What to put before a command so that it runs on machine `name`, as the same process."""
        return ["nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net", "--"]

    def cut(self, name: str) -> None:
        _ip("link", "set", _port(name), "nomaster")

    def heal(self, name: str) -> None:
        _ip("link", "set", _port(name), "master", _BRIDGE)

    def half_open(self, name: str, peer: str) -> None:
        """What `name` sends to `peer`, a name or an address, is lost; what comes from there arrives."""
        self._inside(
            name, "neigh", "replace", socket.gethostbyname(peer), "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent"
        )

    def close_half(self, name: str, peer: str) -> None:
        self._inside(name, "neigh", "del", socket.gethostbyname(peer), "dev", "eth0")

    def give_address(self, address: str, name: str) -> None:
        """`address` is `name`'s from now on, and everybody is told."""
        for holder in self._holders:
            if f" {address}/" in self._inside(holder, "-o", "addr", "show", "dev", "eth0"):
                self._inside(holder, "addr", "del", f"{address}/24", "dev", "eth0")
        self._inside(name, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("neigh", "flush", "to", address)
        for holder in self._holders:
            self._inside(holder, "neigh", "flush", "to", address)

    def _inside(self, name: str, *arguments: str) -> str:
        return _run([*self.enter(name), "ip", *arguments])

    def _await_namespace(self, name: str) -> None:
        """`unshare` has made its namespace once the process is `cat`."""
        holder = self._holders[name]
        assert holder.stdin is not None
        while _command_name(holder.pid) != "cat":
            if holder.poll() is not None:
                raise RuntimeError("unshare can't make a network namespace here")


def _space(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _port(name: str) -> str:
    return f"v-{name}"[:15]


def _command_name(pid: int) -> str:
    with open(f"/proc/{pid}/comm") as file:
        return file.read().strip()


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
