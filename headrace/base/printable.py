"""Makes text from outside safe for a terminal and for one line of a log."""

from __future__ import annotations

import logging
import unicodedata


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
