"""The rows of a file: JSONL, a JSON list, or Parquet. Whatever a row holds, it is refused by its place in the file or can be carried on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from headrace.errors import ConfigError

# Characters: what is longer is no line of prompts, and would fill the memory.
_LONGEST_LINE = 64 << 20


def rows(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of `path`, which `key` gave, after its place. Raises `ConfigError` naming file and line."""
    try:
        for where, row in _read(path, key):
            if not isinstance(row, dict):
                raise bad_row(where, f"a JSON {type(row).__name__}, not an object", key)
            yield where, row
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{key}.data_path {path}: can't be read ({error}); give a JSONL file in UTF-8, a JSON list, or a Parquet file",
            "data_path",
        ) from error


class MissingField(ValueError):
    """A row lacks the field that the key `option` names."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


def bad_row(where: str, error: object, key: str) -> ConfigError:
    option = error.option if isinstance(error, MissingField) else "data_path"
    return ConfigError(f"{where}: {error}; correct or remove the line ({key}.data_path)", option)


def check_carried(fields: dict[str, Any]) -> None:
    """Raise `ValueError` naming the field of a row that can't be carried to the buffer and to environments, as JSON and as msgpack."""
    for name, value in fields.items():
        if not isinstance(name, str):
            raise ValueError(f"field {name!r} has no text for a name; give it one")
        try:
            json.dumps({name: value}, allow_nan=False)
            msgspec.msgpack.encode({name: value})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"field {name!r} holds what can't be carried ({error}); write it as text, or leave it out"
            ) from error


def _read(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        return _parquet(path, key)
    if path.suffix == ".json" and _is_list(path):
        return _json_list(path, key)
    return _jsonl(path, key)


def _jsonl(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    # not `splitlines`: what else may end a line may stand in a JSON text; a byte order mark is none of the first line
    with path.open(encoding="utf-8-sig") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            where = f"{path}:{number}"
            if len(line) == _LONGEST_LINE:
                raise bad_row(where, f"the line has {_LONGEST_LINE} characters or more", key)
            if line.strip():
                yield where, _parsed(line, where, key)


def _json_list(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(_parsed(path.read_text(encoding="utf-8-sig"), str(path), key)):
        yield f"item {number} of {path}", row


def _is_list(path: Path) -> bool:
    with path.open(encoding="utf-8-sig") as file:
        return file.read(4096).lstrip().startswith("[")


def _parsed(text: str, where: str, key: str) -> Any:
    try:
        return _read_json(text)
    except RecursionError as error:
        raise bad_row(where, "it is nested too deep", key) from error
    except ValueError as error:
        raise bad_row(where, error, key) from error


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


_read_json = json.JSONDecoder(parse_constant=_no_number).decode


def _parquet(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{key}.data_path {path}: Parquet needs the package pyarrow; pip install 'headrace[trainer]', or give a JSONL file",
            "data_path",
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for at in range(batch.num_rows):
                    yield f"row {number} of {path}", batch.slice(at, 1).to_pylist()[0]
                    number += 1
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{key}.data_path {path}: row {number} can't be read ({' '.join(str(error).split()):.300}); write the file again",
            "data_path",
        ) from error
