"""What a run recorded, row by row: an iterable that also becomes a table of Arrow or pandas."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Generic, TypeVar

import msgspec

from headrace.base.errors import MissingPackage

T = TypeVar("T")

# Rows that are converted at a time: those of a long run need not be in memory as objects.
_ROWS = 5000


class Rows(Generic[T]):
    """Records of a run. Each iteration reads the run's files anew, a part at a time."""

    def __init__(self, read: Callable[[], Iterator[T]], kind: type[T], as_json: Sequence[str] = ()) -> None:
        """`as_json` are the free-form fields; in a table each is JSON text."""
        self._read, self._kind, self._as_json = read, kind, frozenset(as_json)

    def __iter__(self) -> Iterator[T]:
        return self._read()

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table` with a column for each field. Raises `MissingPackage` without pyarrow."""
        pyarrow = import_package("pyarrow", "page")
        names = [field.name for field in _fields(self._kind)]
        rows = iter(self)
        tables = [pyarrow.table({name: [] for name in names})]
        while chunk := list(itertools.islice(rows, _ROWS)):
            tables.append(pyarrow.table({name: [self._cell(row, name) for row in chunk] for name in names}))
        return pyarrow.concat_tables(tables, promote_options="permissive")

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a column for each field. Raises `MissingPackage` without pyarrow and pandas."""
        import_package("pandas", "notebook")
        return self.to_arrow().to_pandas()

    def _cell(self, row: T, name: str) -> Any:
        value = getattr(row, name)
        # a named tuple, whose fields differ in type
        value = msgspec.to_builtins(value._asdict() if hasattr(value, "_asdict") else value)
        return json.dumps(value, ensure_ascii=False) if name in self._as_json else value


def _fields(kind: type) -> Iterable[Any]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)


def import_package(name: str, extra: str) -> Any:
    """Return the package. Raises `MissingPackage` if it isn't installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackage(f"the package {name!r} is not installed: pip install 'headrace[{extra}]'") from error
