from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser import browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Ends with its file: while it is there, its event loop runs, and asyncio starts none beside it."""
    with browser() as found:
        yield found
