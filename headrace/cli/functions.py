"""`headrace functions`: the buffer's Redis functions, for the administrator of a server to load."""

from __future__ import annotations

import sys

from headrace.cli.common import load_entry_point


def functions() -> None:
    """Print the buffer's functions of this build: headrace functions | redis-cli -u URL -x FUNCTION LOAD REPLACE."""
    sys.stdout.write(load_entry_point("headrace.tools", "functions", extra="replay")())
