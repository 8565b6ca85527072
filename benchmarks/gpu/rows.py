"""What a part reports: rows, each written as soon as it is known, so that what comes after can't take it back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

NEEDS_CUDA = "not run: needs CUDA"


@dataclasses.dataclass(frozen=True)
class Row:
    """`measured` is a figure with its unit, or `not run: …` or `failed: …`; `limit` the figure of the same run that bounds it."""

    what: str
    measured: str
    limit: str = ""


@dataclasses.dataclass(frozen=True)
class Expected:
    """A figure that nobody has measured, and where it comes from."""

    what: str
    figure: str
    source: str


class Rows:
    """The rows of one part, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def add(self, what: str, measured: str, limit: str = "") -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(Row(what, measured, limit))) + "\n")

    def read(self) -> list[Row]:
        """A line that a dying process left half written is not one."""
        if not self.path.exists():
            return []
        return [Row(**json.loads(line)) for line in self.path.read_text().splitlines(keepends=True) if line[-1] == "\n"]


def line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
