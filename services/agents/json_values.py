"""Counts the values of a JSON text before anything decodes it.

A text of a few megabytes may hold millions of empty lists, which take hundreds of megabytes and stop every thread while they are built.
"""

from __future__ import annotations

import numpy as np

# Enough for 20,000 messages. They decode to about 10 MB at most, besides their text.
MOST_VALUES = 100_000
# Decoding and comparing more takes milliseconds, whatever the size of the text.
_MANY_VALUES = 5_000
_STRUCTURE = b"[{,:"
_IS_STRUCTURE = np.isin(np.arange(256), list(_STRUCTURE))


def may_have_many_values(text: bytes) -> bool:
    """Whether the text may hold so many values that the event loop should not decode it."""
    return _may_have_more(text, _MANY_VALUES)


def has_too_many_values(text: bytes) -> bool:
    """Whether the text may hold more than `MOST_VALUES` values: each takes a bracket, a comma or a colon outside of strings."""
    if not _may_have_more(text, MOST_VALUES):
        return False
    # strings may be full of commas. Without escaped quotes, each quote begins or ends a string
    bare = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    in_string = np.logical_xor.accumulate(bare == ord('"'))
    return int(np.count_nonzero(_IS_STRUCTURE[bare] & ~in_string)) > MOST_VALUES


def _may_have_more(text: bytes, most: int) -> bool:
    """Whether brackets, commas and colons, those in strings too, allow more than `most` values."""
    return len(text) > most and sum(text.count(each) for each in _STRUCTURE) > most
