from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.properties import clock
from tests.properties.world import World
from tests.support.redis_servers import buffer_server

HERE = Path(__file__).parent
# The server that comes with the package, and the oldest that is supported.
SERVERS = {"valkey": None, "redis-7.0": shutil.which("redis-server")}


@pytest.hookimpl(tryfirst=True)  # before what is nightly is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By day test_model.py is on both servers, and calls every function with whatever the others call it with."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        second = parameters is not None and parameters.params.get("server_kind") not in (None, "valkey")
        if second and item.path.parent == HERE and item.path.name != "test_model.py":
            item.add_marker("nightly")


@pytest.fixture(scope="session", params=SERVERS)
def server_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def clocked_url(server_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server with the buffer's functions, whose clock the test sets. Its own: the clock is the whole server's."""
    folder, binary = tmp_path_factory.mktemp("replay"), SERVERS[server_kind]
    with buffer_server(folder, clock.load, appendfsync="no", binary=binary) as server:
        yield server.url


@pytest.fixture
async def world(clocked_url: str, run_id: str) -> AsyncIterator[World]:
    """A run that is not open yet. At the end the buffer is as the model is."""
    world = World(clocked_url, run_id)
    yield world
    await world.compare_all()
    await world.client.aclose()
