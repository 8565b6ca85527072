from __future__ import annotations

import pytest

MESSAGES, NIGHTLY_MESSAGES = 100, 100_000


@pytest.fixture(scope="session")
def messages(pytestconfig: pytest.Config) -> int:
    """Malformed messages to send to each function, method and route."""
    chosen = pytestconfig.getoption("calls")
    return chosen or (NIGHTLY_MESSAGES if pytestconfig.getoption("nightly") else MESSAGES)
