"""What a part reports: rows, each written as soon as it is known, so that what comes after can't take it back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

NOT_RUN = "not run"


@dataclasses.dataclass(frozen=True)
class Row:
    """`measured` is a figure in `unit`, or text. `expected` is what it should be, or the limit that the same run has. `passed` is None for
    what has no bound to pass."""

    what: str
    measured: float | str
    unit: str = ""
    expected: str = ""
    passed: bool | None = None


class Rows:
    """The rows of one part, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self, what: str, measured: float | str, unit: str = "", expected: str = "", passed: bool | None = None
    ) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(Row(what, measured, unit, expected, passed))) + "\n")

    def fail(self, what: str, error: BaseException) -> None:
        """Add what could not be measured, where others can."""
        self.add(what, f"failed: {line(error)}", passed=False)

    def read(self) -> list[Row]:
        """A line that a dying process left half written is not one."""
        if not self.path.exists():
            return []
        return [Row(**json.loads(line)) for line in self.path.read_text().splitlines(keepends=True) if line[-1] == "\n"]


def line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
