from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser import browser


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found
