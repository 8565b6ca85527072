"""Three hosts with a server for ssh, each a network namespace with files of its own, and `headrace deploy ssh`, which runs beside them.

    unshare … python -m tests.support.ssh_hosts FOLDER EVENT COMMAND…

Runs inside namespaces of its own (`tests.chaos.runs.NAMESPACES`). In COMMAND {there} is a folder that each host has for itself. EVENT:
`lost`, by which host b is gone, with all that runs there, once a step is trained; `stopped`, by which the command gets SIGINT then;
`killed`, SIGKILL; or `nodes`, by which every host runs COMMAND, as a node of SkyPilot's. The exit code is the command's; 99 if it left
something behind on a host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from headrace.base.parent import die_with_parent
from headrace.base.scratch import TEMPORARY
from tests.support.network import Network
from tests.support.waiting import wait_until

HOSTS = {"a": 2, "b": 3, "c": 4}
LEFT = 99
SSHD = "/usr/sbin/sshd"
# As an ordinary user: in these namespaces root may not set groups, as a server does for a login.
_SERVER = """mount -t tmpfs none {there}
mount -t tmpfs none /dev/shm
exec unshare --user --map-user=1000 --map-group=1000 {sshd} -D -e -f {folder}/sshd_config
"""


def missing() -> str | None:
    """What a machine lacks to run this, besides what namespaces need, or None."""
    if Path(SSHD).exists():
        return None
    return f"{SSHD} is not installed: apt-get install openssh-server"


def exit_code(code: int) -> int:
    """Of a process, as a shell has it."""
    return code if code >= 0 else 128 - code


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def _set_up(folder: Path, network: Network) -> None:
    """Users, keys and settings, for both ends."""
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    _write(folder / "passwd", f"root:x:0:0::{home}:/bin/bash\nuser:x:1000:1000::{home}:/bin/bash\n")
    (folder / "passwd").chmod(0o644)
    subprocess.run(["mount", "--bind", str(folder / "passwd"), "/etc/passwd"], check=True)
    for key in (folder / "host_key", home / ".ssh" / "id_ed25519"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    _write(home / ".ssh" / "authorized_keys", (home / ".ssh" / "id_ed25519.pub").read_text())
    _write(
        folder / "sshd_config",
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {home}/.ssh/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPort 22022\n",
    )
    key = (folder / "host_key.pub").read_text()
    names = [f"[{name}]:22022,[{network.address(name)}]:22022" for name in HOSTS]
    _write(home / ".ssh" / "known_hosts", "".join(f"{name} {key}" for name in names))
    _write(home / ".ssh" / "config", "Host *\n  User user\n  Port 22022\n")


def _of_runs() -> dict[int, str]:
    """The processes that a run has, on any host."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if (
                process.pid != os.getpid()
                and ("headrace" in line or "redis-server" in line)
                and process.status() != "zombie"
            ):
                found[process.pid] = line
    return found


def main(folder: Path, event: str, command: list[str]) -> int:
    network = Network(folder / "names")
    for name, number in HOSTS.items():
        network.add(name, number)
    _set_up(folder, network)
    there = folder / "there"
    there.mkdir()
    before = {*_of_runs()}
    servers = [
        subprocess.Popen(
            [
                *network.enter(name),
                "unshare",
                "--mount",
                "sh",
                "-ec",
                _SERVER.format(there=there, folder=folder, sshd=SSHD),
            ],
            stdin=subprocess.DEVNULL,
            stderr=(folder / f"sshd-{name}.log").open("w"),
            preexec_fn=die_with_parent,
        )
        for name in HOSTS
    ]
    for name in HOSTS:
        wait_until(
            lambda name=name: (
                subprocess.run(["ssh", "-o", "BatchMode=yes", name, "true"], capture_output=True).returncode == 0
            )
        )
    temporary = {*Path("/tmp").glob(f"{TEMPORARY}host*")}
    here = folder / "here"
    here.mkdir(exist_ok=True)
    arguments = [each.format(there=there) for each in command]
    nodes = [network.enter(name) for name in HOSTS] if event == "nodes" else [[]]
    addresses = "\n".join(network.address(name) for name in HOSTS)
    with (folder / "told").open("w") as told:
        started = [
            subprocess.Popen(
                [*enter, *arguments],
                cwd=here,
                env={**os.environ, "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": addresses},
                stdout=told,
                stderr=told,
                preexec_fn=die_with_parent,
            )
            for rank, enter in enumerate(nodes)
        ]
    running = started[0]
    if event != "nodes":
        wait_until(lambda: "step 0: " in (folder / "told").read_text() or running.poll() is not None)
        if event == "lost":
            network.remove("b")
        else:
            running.send_signal(signal.SIGINT if event == "stopped" else signal.SIGKILL)
    code = max(map(exit_code, [process.wait() for process in started]))
    deadline = time.monotonic() + (300 if event == "killed" else 0)
    while left := {pid: line for pid, line in _of_runs().items() if pid not in before}:
        if time.monotonic() >= deadline:
            (folder / "left").write_text("\n".join(left.values()))
            return LEFT
        time.sleep(0.2)
    files = {*Path("/tmp").glob(f"{TEMPORARY}host*")} - temporary
    if files:
        (folder / "left").write_text("\n".join(map(str, files)))
        return LEFT
    for server in servers:
        server.kill()
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
