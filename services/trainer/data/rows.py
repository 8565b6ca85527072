"""Rows of data sets: those of a file (JSONL, a JSON list, or Parquet) or of the user's own code; and processors, which rewrite rows.

An error names a row by its place in the file or data set.

A data set or processor of the user's own is a function or class, named by its file, `FILE.py:NAME`, or by its path, `package.module.NAME`.
It runs in the trainer, and wherever the prompts are read: `headrace config check`, `headrace data show`. Other processors know rows of a
given shape: data sets of the Hugging Face Hub without fields for question and answer, and NeMo RL's multiple-choice questions.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.base import strict_json
from headrace.base.errors import ConfigError
from headrace.env.environment_file import run_file
from headrace.env.reward_function import TRL, VERL

# Where verl has the expected answer of a row.
VERL_TRUTH = "reward_model.ground_truth"
# Characters. A longer line is not a line of prompts, and would fill the memory.
_LONGEST_LINE = 64 << 20


def file_rows(path: Path, key: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the place, its number and the fields of each row of `path`, which `key` gave: lines count from 1, items of a list and rows of
    Parquet from 0. Raises `ConfigError` naming file and line."""
    try:
        for where, number, row in _read(path, key):
            if not isinstance(row, dict):
                raise bad_row(where, f"a JSON {type(row).__name__}, not an object", key)
            yield where, number, row
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{key}.data_path {path}: can't be read ({error}); give a JSONL file in UTF-8, a JSON list, or a Parquet file",
            "data_path",
        ) from error


class Columns(NamedTuple):
    """The columns of a data set: those of the problem and of the expected answer (None: no column), and whose form they have, `TRL`'s or
    `VERL`'s, of which the environment gets all others; None for any other form."""

    question: str
    answer: str | None
    whose: str | None = None


def columns_of(row: Mapping[str, Any], input_key: str, output_key: str | None) -> Columns:
    """Return the columns of a data set from its first row. It is in the form of TRL or verl if it has `prompt` where `input_key` and
    `output_key`, at their defaults, are not in the row."""
    no_answer = output_key == "output" and "output" not in row
    no_question = input_key == "input" and "input" not in row
    if "prompt" not in row or not (no_question or (input_key == "prompt" and no_answer)):
        return Columns(input_key, output_key)
    model = row.get("reward_model")
    whose = VERL if isinstance(model, Mapping) and "ground_truth" in model else TRL
    if no_answer:
        output_key = VERL_TRUTH if whose == VERL else None
    return Columns("prompt", output_key, whose)


class MissingField(ValueError):
    """Raised when a row lacks the field that the key `option` names."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


def bad_row(where: str, error: object, key: str) -> ConfigError:
    option = error.option if isinstance(error, MissingField) else "data_path"
    return ConfigError(f"{where}: {error}; correct or remove the line ({key}.data_path)", option)


def check_carried(fields: dict[str, Any]) -> None:
    """Raise `ValueError` for a field that JSON and msgpack can't carry to the buffer and to environments."""
    for name, value in fields.items():
        if not isinstance(name, str):
            raise ValueError(f"the field name {name!r} is not text; rename the field")
        try:
            json.dumps({name: value}, allow_nan=False)
            msgspec.msgpack.encode({name: value})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"field {name!r} can't be stored as JSON and msgpack ({error}); write it as text, or leave it out"
            ) from error


def _read(path: Path, key: str) -> Iterator[tuple[str, int, Any]]:
    if path.suffix == ".parquet":
        return _parquet(path, key)
    if path.suffix == ".json" and _is_list(path):
        return _json_list(path, key)
    return _jsonl(path, key)


def _jsonl(path: Path, key: str) -> Iterator[tuple[str, int, Any]]:
    # not `splitlines`, which also splits at characters that a JSON text may contain; utf-8-sig drops a byte order mark
    with path.open(encoding="utf-8-sig") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            where = f"{path}:{number}"
            if len(line) == _LONGEST_LINE:
                raise bad_row(where, f"the line has {_LONGEST_LINE} characters or more", key)
            if line.strip():
                yield where, number, _parse(line, where, key)


def _json_list(path: Path, key: str) -> Iterator[tuple[str, int, Any]]:
    for number, row in enumerate(_parse(path.read_text(encoding="utf-8-sig"), str(path), key)):
        yield f"item {number} of {path}", number, row


def _is_list(path: Path) -> bool:
    with path.open(encoding="utf-8-sig") as file:
        return file.read(4096).lstrip().startswith("[")


def _parse(text: str, where: str, key: str) -> Any:
    try:
        return strict_json.decode(text)
    except RecursionError as error:
        raise bad_row(where, "it is nested too deeply", key) from error
    except ValueError as error:
        raise bad_row(where, error, key) from error


def _parquet(path: Path, key: str) -> Iterator[tuple[str, int, Any]]:
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
                    yield f"row {number} of {path}", number, batch.slice(at, 1).to_pylist()[0]
                    number += 1
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{key}.data_path {path}: row {number} can't be read ({' '.join(str(error).split()):.300}); write the file again",
            "data_path",
        ) from error


# -- data sets and processors of the user's own -------------------------------------------------------------------------


def processor(name: str, key: str) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """Return the processor of this name, one of `PROCESSORS` or the user's own: a function of a row and its place that returns a row.

    Raises `ConfigError` if there is no such function. A call that fails raises it too.
    """
    if name in PROCESSORS:
        return PROCESSORS[name]
    with _blaming(key):
        function = _load(name, key)

    @_blaming(key)
    def process(row: dict[str, Any], where: str) -> dict[str, Any]:
        try:
            made = function(row)
        except Exception as error:  # whatever the user's code raises is shown to them
            raise _error_in(f"{where}: {key} {name}", error) from error
        if not isinstance(made, dict):
            raise ConfigError(
                f"{where}: {key} {name} returned {made!r:.80}, not a mapping of fields; return one for each row"
            )
        return made

    return process


def own_rows(name: str, arguments: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the fields of each row of a data set of the user's own.

    The rows are what the function or class `name`, called with `arguments`, returns, or its attribute `dataset`.
    """
    with _blaming(key):
        made = _load(name, key)
        number = 0
        try:
            returned = made(**arguments)
            for row in getattr(returned, "dataset", returned):
                if not isinstance(row, dict):
                    raise ConfigError(
                        f"{key} {name}, row {number}: it is {row!r:.80}, not a mapping of fields; yield one for each problem"
                    )
                yield f"{key}: row {number} of {name}", row
                number += 1
        except ConfigError:
            raise
        except Exception as error:  # whatever the user's code raises is shown to them
            raise _error_in(f"{key} {name}, row {number}", error) from error


@contextlib.contextmanager
def _blaming(key: str) -> Iterator[None]:
    """Set `key` as the key of `ConfigError`s raised inside the context."""
    try:
        yield
    except ConfigError as error:
        error.key = key.rpartition(".")[2]
        raise


def _load(name: str, key: str) -> Callable[..., Any]:
    if ".py:" in name:
        file, _, attribute = name.rpartition(":")
        if not Path(file).is_file():
            raise ConfigError(
                f"{key} {name}: the file {file} does not exist; give its path, relative to the file that names it or to this directory"
            )
        module = run_file(f"{key} {name}", Path(file))
    else:
        path, _, attribute = name.rpartition(".")
        try:
            module = importlib.import_module(path)
        except Exception as error:  # whatever the user's code raises is shown to them
            remedy = f"install it, put its folder into PYTHONPATH, or name the file: FILE.py:{attribute}"
            raise ConfigError(f"{key} {name}: {path} can't be imported; {remedy}\n{_trace(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{key} {name}: {module.__file__} has no function or class {attribute}; name one that it has")
    return found


def _error_in(what: str, error: Exception) -> ConfigError:
    at = traceback.extract_tb(error.__traceback__)[-1]
    # a call with the wrong arguments fails in this file, where it is made
    where = "" if at.filename == __file__ else f"{at.filename}:{at.lineno} "
    return ConfigError(f"{what}: {where}raised {type(error).__name__}: {error}\n{_trace(error)}")


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


# -- rows of known shapes ------------------------------------------------------------------------------------------------


def squad(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with the context as system prompt, as in NeMo RL, and the first answer as the expected one."""
    match row:
        case {"context": str(context), "question": str(question), "answers": {"text": [str(answer), *_]}}:
            messages = [{"role": "system", "content": context}, {"role": "user", "content": question}]
            return {"input": messages, "output": answer}
    raise _lacks(row, "context, question and answers.text")


def helpsteer3(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with the context as prompt and the preferred response as the expected answer; the first of two equally good ones.

    (NeMo RL's processor puts the response into the prompt.)
    """
    match row:
        case {
            "context": context,
            "response1": str(first),
            "response2": str(second),
            "overall_preference": int(preference),
        }:
            return {"input": context, "output": second if preference > 0 else first}
    raise _lacks(row, "context, response1, response2 and overall_preference")


def multiple_choice(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the row with the question and its options below it as prompt, in NeMo RL's words."""
    match row:
        case {"question": str(question), "options": {**options}, "answer": answer}:
            listed = "\n".join(f"{letter}) {option}" for letter, option in options.items() if option is not None)
            subject = {"subject": row["subject"]} if "subject" in row else {}
            return {"input": f"Question: {question}\nOptions:\n{listed}", "output": answer, **subject}
    raise _lacks(row, "question, options (a text for each letter) and answer")


# Built-in processors, by the name in `processor`.
PROCESSORS: Mapping[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "multichoice_qa_processor": multiple_choice
}


def _lacks(row: Mapping[str, Any], what: str) -> ValueError:
    return ValueError(f"it needs {what}, as text, and has {', '.join(map(repr, row)) or 'nothing'}")
