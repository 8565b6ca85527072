"""Runs a run on several hosts by ssh: the first has the buffer's server and `headrace up`, the others have replicas."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.base.addresses import with_port
from headrace.base.errors import ServiceError
from headrace.base.scratch import scratch_folder
from headrace.base.tasks import cancel
from headrace.config import Config
from headrace.config.yaml_text import dump
from headrace.launch import remote
from headrace.launch.hosts import Found, Host, ask
from headrace.launch.remote import FILES, NO_CONNECTION, Command
from headrace.launch.supervisor import (
    Child,
    Finished,
    GiveUp,
    Restart,
    RestartPolicy,
    ServiceFailed,
    Supervisor,
    child_environ,
)
from headrace.net.service import EXIT_USER_ERROR, SAVE_DEADLINE_S, stop_signals

_GRACE_S = 20.0
# Variables of this shell that services get, besides those that the configuration refers to; others come from their host.
_PASSED_ON = re.compile(r"NCCL_\w+|GLOO_\w+|FI_\w+|HF_TOKEN|WANDB_API_KEY")
# As in a job for Slurm: existing tokens and the authority are kept. The last line prints the files for the other hosts.
SECRETS = """set -eu
umask 077
python=$1 config=$2 secrets=$3
shift 3
mkdir -p "$secrets" "$secrets/../redis"
"$python" -P -m headrace.cli certs --dir "$secrets" "$@" >&2
"$python" -P -m headrace.cli credentials "$config" --dir "$secrets" >&2
"$python" -P -m headrace.cli acl "$config" --own-server --credentials "$secrets/credentials" > "$secrets/users.acl"
exec "$python" -P -c 'import json, pathlib, sys
names = ["ca.pem", "rollout.credentials", *(f"{each}.{kind}" for each in sys.argv[3:] for kind in ("pem", "key"))]
print(json.dumps({name: pathlib.Path(sys.argv[1], name).read_text() for name in names}))' "$secrets" "$@"
"""
_REACH = """import socket, sys, time
deadline = time.monotonic() + 30
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
        break
    except OSError as error:
        if time.monotonic() > deadline:
            sys.exit(str(error))
    time.sleep(0.3)
"""


class _Lasting(RestartPolicy):
    """A host may be away for long, and come back: what runs there is started again for as long as the run lasts, but after an error that
    only the user can fix."""

    def decide(self, exit_code: int, **known: Any) -> Restart | GiveUp | Finished:
        if exit_code == EXIT_USER_ERROR:
            return GiveUp(f"exit code {exit_code}")
        decided = super().decide(
            exit_code, **{**known, "fruitless": min(known["fruitless"], self.limit - 1), "was_ready": True}
        )
        lost = exit_code == NO_CONNECTION and isinstance(decided, Restart)
        return Restart(decided.delay_s, "no connection to it") if lost else decided  # type: ignore[union-attr]


class SshRun:
    """A run on several hosts. `run` returns the exit code of its `headrace up`; then nothing of it runs on any host."""

    def __init__(
        self,
        config: Config,
        hosts: Sequence[Host],
        found: Sequence[Found],
        placed: Sequence[Sequence[range]],
        *,
        python: str,
        folder: str,
        report: Callable[[str], None],
    ) -> None:
        assert config.run.id is not None
        self._config, self._hosts, self._found, self._placed = config, hosts, found, placed
        self._python, self._folder, self._report = python, folder, report
        self._run_folder = os.path.join(folder, config.run.dir, config.run.id)
        self._secrets = os.path.join(self._run_folder, "secrets")
        self._logs = Path(config.run.dir, config.run.id, "logs").absolute()
        self._supervisor = Supervisor(child_environ(os.environ), report, _Lasting())
        self._passed_on = {
            name: value for name, value in os.environ.items() if name in config.variables or _PASSED_ON.fullmatch(name)
        }

    async def run(self) -> int:
        """Run until `headrace up` on the first host ends. Raises `ServiceError` if a host doesn't reach the first, or that one is lost."""
        stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        for signum in stop_signals():
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum, stopped)
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[Any]] = []
        up, replicas, server = None, list[Child](), None
        with scratch_folder("headrace-hosts-") as scratch:
            try:
                kept = await self._make_secrets()
                server = self._child("redis", 0, self._server(), scratch)
                tasks += [asyncio.create_task(self._supervisor.supervise(server)), asyncio.create_task(self._reach())]
                await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in filter(asyncio.Task.done, tasks):
                    task.result()
                if stopped.done():
                    return 128 + stopped.result()
                up = self._child("headrace up", 0, self._up(), scratch, logged=False)
                first = asyncio.create_task(self._supervisor.run(up))
                number = len(self._placed[0])
                for place in range(1, len(self._hosts)):
                    for gpus in self._placed[place]:
                        number += 1
                        child = self._child(f"rollout-{number}", place, self._rollout(place, gpus, kept), scratch)
                        replicas.append(child)
                        tasks.append(asyncio.create_task(self._supervise_replica(child, replicas, failed)))
                ends: set[asyncio.Future[Any]] = {first, stopped, failed, tasks[0]}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for ended in filter(asyncio.Future.done, (failed, tasks[0])):
                    ended.result()
                if first.done() and first.result() == NO_CONNECTION:
                    raise ServiceError(
                        f"{up.name}: the connection was lost, and what ran there ends within {remote.SILENT_S:.0f} s, with a checkpoint if "
                        f"it can; run.id={self._config.run.id} then continues the run"
                    )
                return first.result() if first.done() else 128 + stopped.result()
            finally:
                await cancel(tasks)
                await self._stop(up, replicas, server)

    def _on_signal(self, signum: int, stopped: asyncio.Future[int]) -> None:
        if stopped.done():
            self._report("interrupted again: killing what is left")
            self._supervisor.kill()
        else:
            stopped.set_result(signum)
            self._report(f"{signal.Signals(signum).name}: stopping on all hosts (once more to kill at once)")

    async def _stop(self, up: Child | None, replicas: Sequence[Child], server: Child | None) -> None:
        """In the order in which `up` stops its own services: the buffer's server last."""
        await asyncio.gather(
            self._supervisor.stop([] if up is None else [up], SAVE_DEADLINE_S + 2 * _GRACE_S),
            self._supervisor.stop(replicas, 2 * _GRACE_S),
        )
        await self._supervisor.stop([] if server is None else [server], 2 * _GRACE_S)
        self._supervisor.close()

    async def _supervise_replica(self, child: Child, all_: Sequence[Child], failed: asyncio.Future[None]) -> None:
        """Supervise a replica. One that can't continue ends the run, by `failed`, only if it was the last."""
        try:
            await self._supervisor.supervise(child)
        except ServiceFailed as error:
            if not self._placed[0] and all(other.state == "failed" for other in all_):
                failed.set_exception(error)
            else:
                self._report(f"{error}\nThe run continues with the other replicas.")

    async def _make_secrets(self) -> dict[str, str]:
        """Make certificates, tokens and users on the first host, in the run's folder. Return the files for the others."""
        addresses = [each.address for each in self._found]
        argv = ["sh", "-c", SECRETS, "sh", self._python, f"{FILES}/run.yaml", self._secrets, *addresses]
        line = remote.encode(self._command(argv, {"run.yaml": dump(self._config)}))
        kept: dict[str, str] = json.loads(await ask(self._hosts[0], self._far, line, closes=False))
        return kept

    @property
    def _far(self) -> list[str]:
        return [self._python, "-P", "-m", "headrace.launch.remote", "far"]

    async def _reach(self) -> None:
        """Wait until the other hosts reach the buffer's server. Raises `ServiceError` naming the one that doesn't."""
        first, port = self._found[0].address, self._config.replay.redis_port

        async def reach(host: Host) -> None:
            try:
                await ask(host, [self._python, "-P", "-", first, str(port)], _REACH.encode())
            except ServiceError as error:
                raise ServiceError(
                    f"{error}\n{host.name} does not reach {self._hosts[0].name} at {with_port(first, port)}: open this port there, and all "
                    f"TCP between the hosts; {self._logs / 'redis.log'} has what the server says"
                ) from error

        await asyncio.gather(*map(reach, self._hosts[1:]))

    # -- what runs on a host

    def _child(self, name: str, place: int, command: Command, scratch: Path, *, logged: bool = True) -> Child:
        file = scratch / name
        file.touch(mode=0o600)
        file.write_bytes(remote.encode(command))
        argv = [
            sys.executable,
            "-P",
            "-m",
            "headrace.launch.remote",
            "near",
            str(file),
            *self._hosts[place].ssh(*self._far),
        ]
        return Child(f"{name} on {self._hosts[place].name}", argv, self._logs / f"{name}.log" if logged else None)

    def _command(
        self,
        argv: Sequence[str],
        files: Mapping[str, str],
        environ: Mapping[str, str] | None = None,
        grace_s: float = _GRACE_S,
    ) -> Command:
        return Command(argv, self._folder, grace_s, {**self._passed_on, **(environ or {})}, files)

    def _server(self) -> Command:
        own, secrets = os.path.join(self._secrets, self._found[0].address), self._secrets
        options = {
            "port": "0",
            "tls-port": str(self._config.replay.redis_port),
            "tls-auth-clients": "no",
            "tls-ca-cert-file": f"{secrets}/ca.pem",
            "tls-cert-file": f"{own}.pem",
            "tls-key-file": f"{own}.key",
            "aclfile": f"{secrets}/users.acl",
            "dir": os.path.join(self._run_folder, "redis"),
            "appendonly": "yes",
            "appendfsync": "everysec",
        }
        return self._command(
            ["redis-server", *(word for name, value in options.items() for word in (f"--{name}", value))], {}
        )

    def _url(self, authority: str) -> str:
        return (
            f"rediss://{with_port(self._found[0].address, self._config.replay.redis_port)}/0"
            f"?ssl_ca_certs={quote(authority, safe='/{}')}"
        )

    def _up(self) -> Command:
        """`headrace up` with what its run saves for later starts, and for other commands on that host."""
        own = os.path.join(self._secrets, self._found[0].address)
        given = self._config.change(
            replay={"redis_url": self._url(f"{self._secrets}/ca.pem")},
            security={
                "tls_ca": f"{self._secrets}/ca.pem",
                "tls_cert": f"{own}.pem",
                "tls_key": f"{own}.key",
                "credentials": f"{self._secrets}/credentials",
            },
        )
        elsewhere = sum(map(len, self._placed[1:]))
        argv = [self._python, "-P", "-m", "headrace.cli", "up", f"{FILES}/run.yaml", "--elsewhere", str(elsewhere)]
        return self._command(argv, {"run.yaml": dump(given)}, grace_s=SAVE_DEADLINE_S)

    def _rollout(self, place: int, gpus: range, kept: Mapping[str, str]) -> Command:
        found = self._found[place]
        environ = {
            "HEADRACE_REPLAY__REDIS_URL": self._url(f"{FILES}/ca.pem"),
            "HEADRACE_SECURITY__TLS_CA": f"{FILES}/ca.pem",
            "HEADRACE_SECURITY__TLS_CERT": f"{FILES}/host.pem",
            "HEADRACE_SECURITY__TLS_KEY": f"{FILES}/host.key",
            "HEADRACE_SECURITY__CREDENTIALS": f"{FILES}/credentials",
            "HEADRACE_ROLLOUT__HOST": "::" if ":" in found.address else "0.0.0.0",
            "HEADRACE_ROLLOUT__ADVERTISE_HOST": found.address,
        }
        if gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(found.gpus[gpu] for gpu in gpus)
        files = {
            "run.yaml": dump(self._config),
            "ca.pem": kept["ca.pem"],
            "credentials": kept["rollout.credentials"],
            "host.pem": kept[f"{found.address}.pem"],
            "host.key": kept[f"{found.address}.key"],
        }
        return self._command(
            [self._python, "-P", "-m", "headrace.cli", "rollout", "--config", f"{FILES}/run.yaml"], files, environ
        )
