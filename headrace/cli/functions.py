"""`headrace functions`: print the buffer's Redis functions, for a server's administrator to load."""

from __future__ import annotations

import sys

from headrace.launch.entry_points import load_entry_point


def functions() -> None:
    """Print this build's Redis functions of the buffer; load them with: headrace functions | redis-cli -u URL -x FUNCTION LOAD REPLACE."""
    sys.stdout.write(load_entry_point("headrace.tools", "functions", extra="replay")())
