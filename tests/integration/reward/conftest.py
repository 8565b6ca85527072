from __future__ import annotations

import asyncio

import pytest

from tests.support import forked_workers

_execute = asyncio.create_subprocess_exec


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a hub in this one are forked, and so are some environments."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", forked_workers.create_subprocess_exec)


@pytest.fixture
def executed(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are children of this one, for a test that looks at them."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", _execute)
