"""The fixture of `headrace.testing`, which pytest finds automatically."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.env.environment import Environment
    from headrace.testing import Served


@pytest.fixture
def serve_environment() -> Iterator[Callable[[Environment], Served]]:
    """Serve environments until the test ends: `serve_environment(Exact()).score(sample(…))`."""
    from headrace.testing import served  # pytest loads this module for tests of all kinds

    with contextlib.ExitStack() as stack:
        yield lambda environment: stack.enter_context(served(environment))
