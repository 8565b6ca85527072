"""What others wrote does nothing to a terminal, and makes no lines of its own in a log."""

from __future__ import annotations

import logging

from headrace.base.printable import LineFormatter, printable

HOSTILE = "a\x1b[2J\x1b]0;title\x07\r\nb\u202e\u2028\x9b1m\ud800é漢🙂"


def test_control_characters_are_written_out() -> None:
    assert printable(HOSTILE) == r"a\x1b[2J\x1b]0;title\x07\r\nb\u202e\u2028\x9b1m\ud800é漢🙂"
    assert printable("a\n\tb", keep="\n\t") == "a\n\tb"


def test_a_message_forges_no_record() -> None:
    record = logging.LogRecord(
        "x", logging.INFO, __file__, 1, "said %s", ("no\n2026-01-01 INFO all is well\x1b[1A",), None
    )
    lines = LineFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert lines == ["INFO said no", r"    2026-01-01 INFO all is well\x1b[1A"]
