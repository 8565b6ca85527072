from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headrace.replay import ReplayClient
from tests.support.redis_servers import buffer_server
from tests.support.wake_ups import WakeUps

# The oldest server that is supported, and the one that comes with the package.
HERE = Path(__file__).parent
SERVERS = {"valkey": None, "redis-7.0": shutil.which("redis-server")}


# Of what a server writes and reads again when it ends, in which servers differ. That the functions answer alike on both is proved by day
# in tests/properties/test_model.py and tests/golden/test_buffer.py.
BOTH_BY_DAY = ("test_damaged_file.py", "test_lost_writes.py", "test_server.py")


@pytest.hookimpl(tryfirst=True)  # before what is nightly is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The laws of `BOTH_BY_DAY` are proved on both servers whenever the tests run; all else of this folder has the second one at night."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        second = parameters is not None and parameters.params.get("redis_binary") not in (None, "valkey")
        both = item.path.name in BOTH_BY_DAY and "test_law_" in item.nodeid
        if second and item.path.parent == HERE and not both:
            item.add_marker("nightly")


@pytest.fixture(scope="session", params=SERVERS)
def redis_binary(request: pytest.FixtureRequest) -> str | None:
    return SERVERS[request.param]


@pytest.fixture(scope="session")
def redis_url(redis_binary: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with buffer_server(tmp_path_factory.mktemp("replay"), binary=redis_binary) as server:
        yield server.url


@pytest.fixture
async def woken(replay: ReplayClient) -> AsyncIterator[WakeUps]:
    """Who was woken, from here on."""
    wake_ups = WakeUps(replay)
    await wake_ups.open()
    await wake_ups.take()
    yield wake_ups
    await wake_ups.aclose()
