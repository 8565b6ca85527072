"""Rules that the tests themselves keep. They are read as text, since to parse them all takes seconds."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FILES = {path: path.read_text() for path in sorted(TESTS.rglob("*.py"))}
LONGEST_NAME = 65


def test_no_name_of_a_test_is_too_long() -> None:
    names = [(path.name, name) for path, text in FILES.items() for name in re.findall(r"\bdef (test\w*)", text)]
    assert names
    assert [(file, name) for file, name in names if len(name) > LONGEST_NAME] == []


def test_no_test_module_imports_another() -> None:
    """What several need is in `tests/support`."""
    pattern = re.compile(
        r"^ *(?:from|import) (tests\.(?:\w+\.)*test_\w+|tests[\w.]* import .*\btest_\w+)", re.MULTILINE
    )
    assert [(path.name, named) for path, text in FILES.items() for named in pattern.findall(text)] == []
