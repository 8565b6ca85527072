"""What is wrong with the rows of a data set: all of it at once, and bounded, however many rows are wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

# Of each kind of fault so many rows are named, and so many kinds; the others are counted.
MOST_ROWS, MOST_KINDS = 20, 20


class BadRow(ValueError):
    """Raised for a row that can't be used. `kind` says what all rows with this fault have in common; by default it is the message. `option`
    is the key of the data set at fault."""

    def __init__(self, message: str, kind: str | None = None, option: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.option = kind or message, option


@dataclasses.dataclass
class _Kind:
    """The rows with one fault: how many they are, and place and message of the first ones. `detail` is what the first message has below its
    first line, `option` the key at fault."""

    option: str
    detail: str
    count: int = 0
    rows: list[tuple[str, str]] = dataclasses.field(default_factory=list)


class Faults:
    """The rows of one data set that can't be used, by kind. `key` is the data set's, `option` the key at fault where the row says no other,
    and `remedy` what to do with such rows."""

    def __init__(self, key: str, option: str, remedy: str) -> None:
        self._key, self._option, self._remedy = key, option, remedy
        self._kinds: dict[str, _Kind] = {}
        self._others = 0  # rows of further kinds

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def add(self, where: str, error: BadRow) -> None:
        head, _, detail = str(error).partition("\n")
        if (kind := self._kinds.get(error.kind)) is None:
            if len(self._kinds) == MOST_KINDS:
                self._others += 1
                return
            kind = self._kinds[error.kind] = _Kind(error.option or self._option, detail)
        kind.count += 1
        if len(kind.rows) < MOST_ROWS:
            kind.rows.append((where, head))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the key at fault and what is wrong, for each kind. A kind of one row takes one line; one of several names the first of
        them below what they have in common and the remedy."""
        for name, kind in self._kinds.items():
            # the error of a processor says what is to be mended; of other faults, the rows do
            option, remedy = self._option, f"; {self._remedy}"
            if kind.option == "processor":
                option, remedy = kind.option, ""
            if kind.count == 1:
                ((where, message),) = kind.rows
                lines = [f"{where}: {message}{remedy} ({self._key}.{option})"]
            else:
                same = len({message for _, message in kind.rows}) == 1
                what = kind.rows[0][1] if same else name
                lines = [f"{self._key}.{option}: {kind.count} rows can't be used: {what}{remedy}"]
                lines += list_first(
                    [where if same else f"{where}: {message}" for where, message in kind.rows], kind.count
                )
            yield kind.option, "\n".join([*lines, *filter(None, [kind.detail])])
        if self._others:
            yield (
                self._option,
                f"{self._key}.{self._option}: {self._others} rows have further faults, shown once these are mended",
            )


def list_first(lines: Sequence[str], count: int) -> Iterator[str]:
    """Yield the first ones of the `count` lines of one kind, indented, and how many more there are."""
    yield from (f"  {line}" for line in lines[:MOST_ROWS])
    if count > MOST_ROWS:
        yield f"  and {count - MOST_ROWS} more of the kind"
