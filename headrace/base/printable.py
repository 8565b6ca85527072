"""Makes text from outside safe for a terminal and for one line of a log, and keeps keys out of it."""

from __future__ import annotations

import logging
import re
import unicodedata

# The key of an episode, as runners make it: the name of the runner's gateway, and 128 random bits.
EPISODE_KEY = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{32}\b")


def printable(text: str, keep: str = "") -> str:
    """Return `text` with its control characters (terminal escapes, line breaks, text direction) written as `\\x1b`, except those in
    `keep`."""
    return "".join(
        c if c in keep or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else _escape(c) for c in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


class LineFormatter(logging.Formatter):
    """Formats log records without control characters. Further lines of a message are indented, so that none looks like a record."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t").replace("\n", "\n    ")


def without_keys(record: logging.LogRecord) -> bool:
    """Hide the keys of episodes in a log record: in its message (addresses too) and its traceback. Use it as a filter of a handler."""
    message = record.getMessage()
    if EPISODE_KEY.search(message):
        record.msg, record.args = EPISODE_KEY.sub(r"\1-KEY", message), ()
    if record.exc_info:
        traceback = record.exc_text or logging.Formatter().formatException(record.exc_info)
        if EPISODE_KEY.search(traceback):  # formatters take this text before the exception
            record.exc_text = EPISODE_KEY.sub(r"\1-KEY", traceback)
    if record.stack_info:
        record.stack_info = EPISODE_KEY.sub(r"\1-KEY", record.stack_info)
    return True
