"""A run on three machines: the buffer's server, a trainer, and a replica, each in a network namespace of its own.

    unshare … python -m tests.support.several_hosts FOLDER MODEL URL TRAINER

Runs inside namespaces of its own (`tests.chaos.runs.NAMESPACES`), joined by a bridge, on which the driver scores. Every machine is as
Debian installs it: /etc/hosts gives its name the address 127.0.1.1. `URL` is where the trainer, on machine `TRAINER`, finds the server.
The trainer is the real one with its defaults, the replica receives and proves as a real one does (`SmallReplica`). The exit code is the
trainer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import yaml

from headrace.base.parent import die_with_parent
from headrace.replay import BufferRetry, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.replay import library
from tests.support.buffer import LIMITS
from tests.support.network import Network
from tests.support.small_replica import SmallReplica, running, score_all

PORT, RUN, NAME = 6379, "hosts", "node"
PATIENCE_S = 480.0
HOSTS = {"buffer": 2, "trainer": 3, "replica": 4}
SOURCE = {"dataset_name": "arithmetic", "task_config": {"digits": 1}, "env_name": "sums"}


def settings(folder: Path, model: Path, url: str) -> dict[str, object]:
    """`weight_channel.host` is not among them."""
    return {
        "run": {"id": RUN, "dir": str(folder)},
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            "max_num_steps": 2,
            "val_period": 0,
            "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
        },
        "loss_fn": {"reference_policy_kl_penalty": 0},
        "policy": {
            "model_name": str(model),
            "max_total_sequence_length": 32,
            "precision": "float32",
            "generation": {"max_new_tokens": 4},
        },
        "data": {"train": {**SOURCE, "size": 60}},
        "env": {"sums": {"type": "math"}},
        "replay": {"redis_url": url},
        "trainer": {"device": "cpu", "num_threads": 1, "fleet_deadline_s": 60},
        "weight_channel": {"timeout_s": 30},
        "security": {"insecure": True},
        "checkpointing": {"enabled": False},
    }


async def main(folder: Path, model: Path, url: str, machine: str) -> int:
    network = Network()
    addresses = {name: network.add(name, host) for name, host in HOSTS.items()}
    server_url = f"redis://{addresses['buffer']}:{PORT}/0"
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings(folder, model, url.format(**addresses))))
    server = ["redis-server", "--port", str(PORT), "--save", "", "--protected-mode", "no", "--dir", str(folder)]
    replica = [sys.executable, "-m", "tests.support.several_hosts", "replica", server_url, str(model)]
    trainer = [sys.executable, "-m", "headrace.cli", "trainer", "--config", str(config)]
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str, where: str, command: list[str]) -> asyncio.subprocess.Process:
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            process = await asyncio.create_subprocess_exec(
                *network.enter(where), *command, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
            stack.callback(_end, process)
            return process

        await start("server", "buffer", server)
        replay = ReplayClient(open_redis(server_url), RUN)
        await stack.enter_async_context(contextlib.aclosing(replay))
        await BufferRetry(PATIENCE_S)(lambda: _open(server_url, replay))
        await start("replica", "replica", replica)
        done = await start("trainer", machine, trainer)
        async with running(score_all(replay)):
            return await asyncio.wait_for(done.wait(), PATIENCE_S)


def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


def _name_machines(hosts: Path) -> None:
    """`hosts` in the place of /etc/hosts, for what is in these namespaces."""
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename} {NAME}\n")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)


async def _open(url: str, replay: ReplayClient) -> None:
    """Load the buffer's functions and open the run. Raises `ReplayUnavailable` while the server starts."""
    async with open_redis(url, retries=0) as redis:
        await library.load(redis)
    await replay.open_run(LIMITS)


async def _replica(url: str, model: Path) -> None:
    replay = await ReplayClient.connect(url, RUN, PATIENCE_S)
    await SmallReplica(replay, model).run()


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        asyncio.run(_replica(sys.argv[2], Path(sys.argv[3])))
    else:
        _name_machines(Path(sys.argv[1]) / "etc_hosts")
        sys.exit(asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])))
