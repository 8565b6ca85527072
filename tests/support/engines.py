"""Replicas with vLLM engines as processes (`tests.support.refit_replica`), which take part in one run after the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.support import refit_replica
from tests.support.forks import Forked, fork

PATIENCE_S = 400.0  # for an engine to start on a busy machine
TIMELINE = "timeline-1"
# what float32 on two implementations differs by is about 3e-6; a refit that went wrong differs by 1e-2 and more
TOLERANCE = 1e-4
FAULTY = {"worker_extension_cls": "tests.support.faulty_load.FaultyLoadExtension"}


class Replica:
    """A process with an engine, which takes part in one run after the other."""

    def __init__(self, process: Forked, said: asyncio.StreamReader, asked: asyncio.StreamWriter) -> None:
        self.process, self._said, self._asked = process, said, asked

    async def expect(self, event: str) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                line = await self._said.readline()
                assert line, f"the replica ended with {self.process.wait()}"
                if line.startswith(b"{") and (said := json.loads(line))["event"] == event:
                    return said

    async def _ask(self, **what: Any) -> None:
        self._asked.write(json.dumps(what).encode() + b"\n")
        await self._asked.drain()

    async def join(self, run_id: str, name: str) -> None:
        await self._ask(join={"run_id": run_id, "replica": name})
        await self.expect("joined")

    async def inject(self, fault: str | None) -> None:
        """Into every load from now on (`tests.support.faulty_load`)."""
        await self._ask(inject=fault)
        await self.expect("injected")

    async def asynchronous(self) -> bool:
        """Whether its engine schedules asynchronously."""
        await self._ask(look=True)
        return bool((await self.expect("looked"))["asynchronous"])

    async def ask(self, ids: list[int], max_tokens: int) -> None:
        await self._ask(generate={"ids": ids, "max_tokens": max_tokens})

    async def generate(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        await self.ask(ids, max_tokens)
        return await self.expect("generated")

    def signal(self, signum: signal.Signals) -> None:
        """To the replica and the processes of its engine, as a machine that is lost or frozen."""
        pids = [self.process.pid]
        for pid in pids:
            pids += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for pid in pids:
            os.kill(pid, signum)

    async def stop(self) -> None:
        self._asked.close()
        try:
            await asyncio.to_thread(self.process.wait, 20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def settings(model: Path, *, recompute: bool = True, precision: str = "float32", workers: int = 1) -> dict[str, Any]:
    return {
        "policy": {
            "model_name": str(model),
            "precision": precision,
            "max_total_sequence_length": 1024,
            "generation": {
                "max_new_tokens": 900,
                "vllm_cfg": {"kv_cache_memory_bytes": 64 * 2**20, "tensor_parallel_size": workers},
            },
        },
        "grpo": {
            "async_grpo": {
                "enabled": True,
                "in_flight_weight_updates": True,
                "recompute_kv_cache_after_weight_updates": recompute,
            }
        },
        "weight_channel": {
            "timeout_s": 20.0,
            "bucket_bytes": 128 * 1024,
            "verify_tolerance": TOLERANCE if precision == "float32" else None,
        },
    }


class Engines:
    """Replicas by name; each is started when a test first asks for it. `faulty` and `bfloat16` compute in bfloat16, the
    others in float32; `parallel` has two workers; `adapter` has a policy of its own; `async` schedules asynchronously, as on a GPU."""

    def __init__(self, redis_url: str, tied: Path, untied: Path) -> None:
        self._redis_url = redis_url
        self.models = {"tied": tied, "untied": untied}
        self._started: dict[str, Replica] = {}

    async def get(self, name: str, policy: dict[str, Any] | None = None) -> Replica:
        if name not in self._started:
            untied = name == "untied"
            config = settings(
                self.models["untied" if untied else "tied"],
                recompute=not untied,
                precision="bfloat16" if name in ("faulty", "bfloat16") else "float32",
                workers=2 if name == "parallel" else 1,
            )
            config["policy"] |= policy or {}
            arguments = FAULTY if name in ("faulty", "parallel", "adapter") else {}
            if name == "async":
                arguments = {"worker_extension_cls": "tests.support.async_engine.AsyncExtension"}
                config["policy"]["generation"]["vllm_cfg"]["async_scheduling"] = True
            spec = {
                "config": config,
                "redis_url": self._redis_url,
                "arguments": arguments,
                "asynchronous": name == "async",
            }
            ours, theirs = socket.socketpair()
            with theirs:
                process = fork(refit_replica.main, spec, talk=theirs, kind="engine")
            self._started[name] = Replica(process, *await asyncio.open_connection(sock=ours, limit=2**24))
        return self._started[name]

    async def stop(self) -> None:
        await asyncio.gather(*(replica.stop() for replica in self._started.values()))
