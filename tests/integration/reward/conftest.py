from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support import forked_workers
from tests.support.reward_hub import WAIT_S, credit_wait

_execute = asyncio.create_subprocess_exec


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a hub in this one are forked, and so are some environments."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", forked_workers.create_subprocess_exec)


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """A busy machine may keep an attached process for more than a second from granting what a call waits for."""
    with credit_wait(WAIT_S):
        yield


@pytest.fixture
def executed(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are children of this one, for a test that looks at them."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", _execute)
