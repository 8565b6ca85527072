"""The hosts of a run, which ssh reaches: how they are written, what they have, and what each gets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import ipaddress
import json
import re
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.addresses import is_loopback, is_one_host
from headrace.base.errors import ConfigError, Problems, ServiceError
from headrace.config import Config
from headrace.launch import host_check
from headrace.launch.guard import signal_group
from headrace.launch.remote import NO_CONNECTION

_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "15",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "8",
    "RequestTTY": "no",
    # what a person may have set for the host: one command instead of ours, ports that only one connection gets, and a connection that
    # others use, which would not end with its own command
    "RemoteCommand": "none",
    "ClearAllForwardings": "yes",
    "ControlMaster": "no",
}
_ANSWER_S = 60.0
# Clocks that differ more are wrong. Certificates are valid from an hour ago.
_CLOCKS_S = 300.0
# by what ssh says
_REMEDIES = {
    "Could not resolve": "correct the name, or add it to ~/.ssh/config",
    "Host key verification failed": "log in once by hand, `{}`, and accept its key if it is the right one",
    "Permission denied": "no password is asked for: have your key accepted there (ssh-copy-id), or start ssh-agent",
}


@dataclasses.dataclass(frozen=True)
class Host:
    """A host as it was given, NAME, USER@NAME or USER@NAME:PORT, and as ssh takes it."""

    name: str
    destination: str
    port: int | None

    def ssh(self, *command: str) -> list[str]:
        """Return the command that runs `command` there."""
        options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", *options, *self._port, self.destination, shlex.join(command)]

    def by_hand(self, *command: str) -> str:
        """Return what a person types."""
        return shlex.join(["ssh", *self._port, self.destination, *command])

    @property
    def _port(self) -> list[str]:
        return [] if self.port is None else ["-p", str(self.port)]


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of a list with commas. Raises `ConfigError`."""
    hosts = [_parse_host(name.strip()) for name in text.split(",")]
    for host in hosts:
        if sum(host.destination == other.destination and host.port == other.port for other in hosts) > 1:
            raise ConfigError(f"--hosts {text}: {host.name} is there twice; give each host once")
    return hosts


def _parse_host(name: str) -> Host:
    user, _, rest = name.rpartition("@")
    if _is_address(rest):
        host, port = rest, ""
    elif rest.startswith("["):
        host, _, port = rest[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = rest.partition(":")
    if not is_one_host(host) or name.startswith("-") or host.startswith("-") or re.search(r"[\s:@]", user):
        raise ConfigError(
            f"--hosts: {name!r} is no host; give NAME, USER@NAME or USER@NAME:PORT, and an IPv6 address with a port as [ADDRESS]:PORT"
        )
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--hosts: {name!r}: {port!r} is no port; give a number from 1 to 65535")
    return Host(name, f"{user}@{host}" if user else host, int(port) if port else None)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def spread(*, ranks: int, replicas: int, slice_size: int, gpus: Sequence[int]) -> list[list[range]] | None:
    """Return the replicas of each host, each as the numbers of its GPUs there, none without GPUs; None if there is no room. The first host
    has the trainer's `ranks` on its first GPUs, and gets replicas only if the others, among whom they are spread, are full."""
    if not any(gpus):
        ranks, slice_size, gpus = 0, 0, [0] * len(gpus)
    if ranks > gpus[0]:
        return None
    starts = [ranks, *[0] * (len(gpus) - 1)]
    room = [(own - start) // slice_size if slice_size else replicas for own, start in zip(gpus, starts, strict=True)]
    counts = [0] * len(gpus)
    for _ in range(replicas):
        left = [most - count for most, count in zip(room, counts, strict=True)]
        host = max(range(len(gpus)), key=lambda each: (left[each] > 0, each > 0, left[each]))
        if not left[host]:
            return None
        counts[host] += 1
    return [
        [range(start + number * slice_size, start + (number + 1) * slice_size) for number in range(count)]
        for start, count in zip(starts, counts, strict=True)
    ]


def place(config: Config, names: Sequence[str], gpus: Sequence[int]) -> list[list[range]]:
    """Return what `spread` does for a run, on hosts with these names and numbers of GPUs. Raises `ConfigError` if it has no place there, or
    a host would have nothing to do."""
    if config.rollout.device == "cpu":
        gpus = [0] * len(gpus)
    ranks, replicas = config.trainer.num_processes, config.rollout.replicas
    slice_size = config.policy.generation.vllm_cfg.tensor_parallel_size
    placed = spread(
        ranks=0 if config.trainer.device == "cpu" else ranks, replicas=replicas, slice_size=slice_size, gpus=gpus
    )
    if placed is None:
        there = ", ".join(f"{name} {count}" for name, count in zip(names, gpus, strict=True))
        raise ConfigError(
            f"the run (trainer.num_processes {ranks}, rollout.replicas {replicas}, policy.generation.vllm_cfg.tensor_parallel_size "
            f"{slice_size}) has no place on these hosts (GPUs: {there}): all ranks are on the first, and a replica has its GPUs on one "
            "host. Change these numbers, or run ranks on several hosts with `headrace deploy slurm` or `headrace deploy helm`"
        )
    if idle := [name for name, own in zip(names[1:], placed[1:], strict=True) if not own]:
        raise ConfigError(
            f"{', '.join(idle)} would have no replica with rollout.replicas {replicas}; raise it, or give fewer hosts"
        )
    return placed


@dataclasses.dataclass(frozen=True)
class Found:
    """What a host has: the address by which the others reach it, and its GPUs."""

    address: str
    gpus: Sequence[str]


def refuse_given(config: Config) -> None:
    """Raise `ConfigError` if the configuration has what is made here for the run."""
    given = {
        "replay.redis_url": config.replay.redis_url,
        "security.credentials": config.security.credentials,
        "security.tls_cert": config.security.tls_cert,
        "security.tls_key": config.security.tls_key,
        "security.tls_ca": config.security.tls_ca,
    }
    if keys := [key for key, value in given.items() if value is not None]:
        raise ConfigError(
            f"{', '.join(keys)}: the buffer's server, certificates and tokens are made for the run on its first host; leave it out"
        )


async def check(config: Config, hosts: Sequence[Host], python: str, folder: str) -> list[Found]:
    """Look at all hosts, before anything is started there. Raises `ConfigError` with everything that is wrong."""
    script, own = inspect.getsource(host_check), host_check.digest()
    problems, run_folder = Problems(), config.run_folder

    async def look(host: Host) -> tuple[Found, float] | None:
        with problems.gathered():
            port = config.replay.redis_port if host is hosts[0] else None
            asked = time.time()
            seen = json.loads(
                await ask(host, [python, "-P", "-", json.dumps([folder, str(run_folder), port])], script.encode())
            )
            off_s = seen["time"] - (asked + time.time()) / 2
            for problem in [*_compare(seen, own, python, len(hosts) > 1), *seen["problems"]]:
                problems.add(f"{host.name}: {problem}")
            return Found(seen["address"], seen["gpus"]), off_s
        return None

    seen = await asyncio.gather(*map(look, hosts))
    problems.tell()
    found = [each for each, _ in filter(None, seen)]
    times = [off_s for _, off_s in filter(None, seen)]
    for host, each, off_s in zip(hosts[1:], found[1:], times[1:], strict=True):
        if abs(off_s - times[0]) > _CLOCKS_S:
            problems.add(
                f"{host.name}: its clock and that of {hosts[0].name} are {abs(off_s - times[0]):.0f} s apart; set them (NTP)"
            )
        for other, its in zip(hosts, found, strict=True):
            if other is host:
                break
            if its.address == each.address:
                problems.add(f"{other.name} and {host.name} are the same machine ({each.address}); give each host once")
    problems.tell()
    return found


def _compare(seen: Mapping[str, Any], own: str | None, python: str, several: bool) -> list[str]:
    """Return what of a host doesn't fit to this machine, and to other hosts."""
    if seen["digest"] is None:
        return [f"{python} has no Headrace; install it there, or give the Python that has it with --python"]
    other = (
        []
        if seen["digest"] == own
        else [f"{python} has another build of Headrace than this machine; install the same there"]
    )
    if several and (not seen["address"] or is_loopback(seen["address"])):
        return [
            *other,
            f"it is reached at {seen['address'] or 'no address'}, and by that the others can't; give its name or address in their network",
        ]
    return other


async def ask(host: Host, command: Sequence[str], stdin: bytes = b"", *, closes: bool = True) -> str:
    """Return the last line that a command prints on a host. `closes`: its standard input ends with `stdin`, not with the command. Raises
    `ServiceError` with what it, or ssh, says if it fails."""
    try:
        process = await asyncio.create_subprocess_exec(
            *host.ssh(*command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise ServiceError("ssh is not installed here: apt-get install openssh-client") from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(_ANSWER_S):
            with contextlib.suppress(ConnectionError):  # it has ended, and says why
                process.stdin.write(stdin)
                await process.stdin.drain()
            if closes:
                process.stdin.close()
            out, told, _ = await asyncio.gather(process.stdout.read(), process.stderr.read(), process.wait())
    except TimeoutError:
        raise ServiceError(
            f"{host.name}: no answer within {_ANSWER_S:.0f} s; see that `{host.by_hand('true')}` works"
        ) from None
    finally:
        if process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)  # with a proxy of its own, which has its pipes too
            await process.wait()
    said = "\n".join(told.decode(errors="replace").strip().splitlines()[-5:])
    if process.returncode == NO_CONNECTION:
        remedy = next((each for text, each in _REMEDIES.items() if text in said), "see that `{}` works")
        raise ServiceError(f"{host.name}: {said or 'ssh has no connection'}; {remedy.format(host.by_hand())}")
    if process.returncode in (126, 127):
        raise ServiceError(
            f"{host.name}: {command[0]} can't be run there ({said}); install Headrace there, or give its Python with --python"
        )
    if process.returncode:
        raise ServiceError(f"{host.name}: {command[0]} ended with {process.returncode}: {said}")
    return out.decode().strip().rpartition("\n")[2]  # a shell's start-up files may print too
