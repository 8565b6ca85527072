from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from services.replay import library
from services.replay.embedded import EmbeddedServer

# before torch is imported: a second thread on a busy core makes both slower
os.environ.setdefault("OMP_NUM_THREADS", "1")

# how long an example takes says how busy the machine is
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey of this test session, with the buffer's functions loaded. Tests keep apart by their run ids."""
    server = EmbeddedServer(tmp_path_factory.mktemp("replay"), "127.0.0.1", free_port())

    async def start() -> None:
        await server.start()
        async with open_redis(server.url) as redis:
            await library.load(redis)

    asyncio.run(start())
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture
def run_id() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def limits() -> Limits:
    """A small run: 2 prompts a step, 2 trajectories a group, age 1. Override for another."""
    return Limits(
        prompts_per_step=2,
        generations_per_prompt=2,
        max_age=1,
        staleness_policy="ordered",
        max_attempts=3,
        max_scoring_attempts=3,
        lease_s=30.0,
        group_deadline_s=60.0,
        scoring_deadline_s=30.0,
        replica_dead_s=30.0,
        max_bytes=2**30,
    )


@pytest.fixture
async def replay(redis_url: str, run_id: str, limits: Limits) -> AsyncIterator[ReplayClient]:
    """A client of a fresh run."""
    client = ReplayClient(open_redis(redis_url), run_id)
    await client.open_run(limits)
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-type model of 0.5 M random weights with a character tokenizer and a chat template."""
    return _made_once(tmp_path_factory, "tiny", warmup=False)


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as `headrace model tiny` makes it: right some of the time."""
    return _made_once(tmp_path_factory, "warm", warmup=True)


def _made_once(tmp_path_factory: pytest.TempPathFactory, name: str, *, warmup: bool) -> Path:
    """The model of a whole test run: of the processes that share its tests, one makes it and the others wait."""
    from services.trainer.models import tiny

    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with FileLock(base / f"{name}.lock"):
        directory = base / name
        if not directory.exists():
            tiny.make(directory, warmup=warmup)
    return directory
