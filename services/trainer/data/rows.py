"""Rows of data sets: those of a file (JSONL, a JSON list, or Parquet) or of the user's own code; and processors, which rewrite rows.

Rows that can't be used are gathered in `Faults`, each by its place in the file or data set.

A data set or processor of the user's own is a function or class, named by its file, `FILE.py:NAME`, or by its path, `package.module.NAME`.
It runs in the trainer, and wherever the prompts are read: `headrace config check`, `headrace data show`. Other processors know rows of a
given shape: data sets of the Hugging Face Hub without fields for question and answer, and NeMo RL's multiple-choice questions.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mimetypes
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.base.errors import ConfigError, UnusableFile
from headrace.env.environment import describe_error
from headrace.env.environment_file import run_file
from headrace.env.reward_function import TRL, VERL

from .faults import BadRow, Faults

# Where verl has the expected answer of a row.
VERL_TRUTH = "reward_model.ground_truth"
# Fields in which data sets have what is shown beside the text of a problem.
_MEDIA = [f"{kind}{plural}" for kind in ("image", "video", "audio") for plural in ("", "s")]
# How PNG, JPEG, GIF and RIFF (WebP, WAV, AVI) begin in Base64.
_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
# Characters. A longer line is not a line of prompts, and would fill the memory.
_LONGEST_LINE = 64 << 20


def file_rows(path: Path, key: str, faults: Faults) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the place, its number and the fields of each row of `path`, which `key` gave: lines count from 1, items of a list and rows of
    Parquet from 0. Rows that are none go to `faults`. Raises `ConfigError` for a file that can't be read."""
    try:
        for where, number, row in _read(path, key, faults):
            if isinstance(row, dict):
                yield where, number, row
            else:
                faults.add(where, BadRow(f"a JSON {type(row).__name__}, not an object"))
    except OSError as error:
        raise _unreadable(path, key, error) from error


def _unreadable(path: Path, key: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{key}.data_path {path}: can't be read ({error}); give a JSONL file in UTF-8, a JSON list, or a Parquet file",
        "data_path",
    )


class Columns(NamedTuple):
    """The columns of a data set: those of the problem and of the expected answer (None: no column), and whose form they have, `TRL`'s or
    `VERL`'s, of which the environment gets all others; None for any other form."""

    question: str
    answer: str | None
    whose: str | None = None


def find_columns(row: Mapping[str, Any], input_key: str, output_key: str | None) -> Columns:
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


def check_text(row: Mapping[str, Any], for_environment: Collection[str]) -> None:
    """Raise `BadRow` for a row that has images, videos or sound beside its text: the policy would never see them. The fields
    `for_environment` are not asked."""
    for name in _MEDIA:
        if name not in for_environment and _is_media(row.get(name)):
            kind = f"field {name!r} holds what the policy would never see: it reads text only"
            raise BadRow(
                f"{kind}. Choose a data set of text; or name the field in info_keys if it is for the environment alone, or leave it out "
                "in a processor",
                kind,
            )


def _is_media(value: Any) -> bool:
    match value:
        case None | bool() | int() | float():
            return False
        case str():  # a file, an address or its content; others name other things, such as the image of a container
            path = re.split(r"[?#]", value, maxsplit=1)[0] if "://" in value else value
            kind, _ = mimetypes.guess_type(path)
            return value.startswith(("data:", *_BASE64)) or (kind or "").partition("/")[0] in (
                "image",
                "video",
                "audio",
            )
        case Mapping():
            return any(_is_media(item) for item in value.values())
        case list() | tuple():
            return any(map(_is_media, value))
    return True  # bytes, and what a data set of the Hub decodes


def check_carried(fields: dict[str, Any]) -> None:
    """Raise `BadRow` for a field that JSON and msgpack can't carry to the buffer and to environments."""
    if any(not isinstance(name, str) for name in fields) or _refusal(fields) is not None:
        for name, value in fields.items():  # which of them it is
            if not isinstance(name, str):
                raise BadRow(f"the field name {name!r} is not text; rename the field", "a field name is not text")
            if error := _refusal({name: value}):
                kind = f"field {name!r} can't be stored as JSON and msgpack"
                remedy = "write it as text, or leave it out: info_keys names the fields that the environment needs"
                raise BadRow(f"{kind} ({error}); {remedy}", kind)


def _refusal(fields: dict[str, Any]) -> Exception | None:
    try:
        json.dumps(fields, allow_nan=False)
        msgspec.msgpack.encode(fields)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return error
    return None


def _read(path: Path, key: str, faults: Faults) -> Iterator[tuple[str, int, Any]]:
    if path.suffix == ".parquet":
        return _parquet(path, key)
    if path.suffix == ".json" and _is_list(path, key):
        return _json_list(path, key)
    return _jsonl(path, faults)


def _jsonl(path: Path, faults: Faults) -> Iterator[tuple[str, int, Any]]:
    # not `splitlines`, which also splits at characters that a JSON text may contain; utf-8-sig drops a byte order mark
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            where = f"{path}:{number}"
            try:
                if len(line) == _LONGEST_LINE:
                    while line and not line.endswith("\n"):
                        line = file.readline(_LONGEST_LINE)
                    raise BadRow(f"the line has {_LONGEST_LINE} characters or more")
                if not line.strip():
                    continue
                row = _parse(line)
            except BadRow as error:
                faults.add(where, error)
                continue
            yield where, number, row


def _json_list(path: Path, key: str) -> Iterator[tuple[str, int, Any]]:
    try:
        items = _parse(path.read_text(encoding="utf-8-sig"))
    except (BadRow, UnicodeDecodeError) as error:
        raise _unreadable(path, key, error) from error
    for number, row in enumerate(items):
        yield f"item {number} of {path}", number, row


def _is_list(path: Path, key: str) -> bool:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(4096).lstrip().startswith("[")
    except UnicodeDecodeError as error:
        raise _unreadable(path, key, error) from error


def _parse(text: str) -> Any:
    try:
        if not text.isascii():
            text.encode()
        return json.loads(text)  # NaN in a field that nobody asks for is no reason to refuse the row
    except UnicodeEncodeError as error:
        raise BadRow(f"it is not UTF-8 (byte {ord(text[error.start]) - 0xDC00:#x})", "it is not UTF-8") from error
    except RecursionError as error:
        raise BadRow("it is nested too deeply") from error
    except ValueError as error:
        raise BadRow(str(error), "it is not JSON") from error


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


def processor(name: str, key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the processor of this name, one of `PROCESSORS` or the user's own: a function of a row that returns a row. A call that fails
    raises `BadRow`.

    Raises `ConfigError` if there is no such function.
    """
    if name in PROCESSORS:
        return PROCESSORS[name]
    with _blaming(key):
        function = _load(name, key)
    shown = set[str]()  # the kinds of errors whose trace was made: of a million rows with one, the first shows it

    def process(row: dict[str, Any]) -> dict[str, Any]:
        try:
            made = function(row)
        except (Exception, SystemExit) as error:  # whatever the user's code raises is shown to them
            place = _place_in_code(error)
            kind = f"{name}: {place}raised {type(error).__name__}"
            detail = "" if kind in shown else f"\n{_trace(error)}"
            shown.add(kind)
            raise BadRow(f"{name}: {place}raised {describe_error(error)}{detail}", kind, "processor") from error
        if not isinstance(made, dict):
            wanted = "not a mapping of fields; return one for each row"
            raise BadRow(f"{name} returned {made!r:.80}, {wanted}", f"{name} returned {wanted}", "processor")
        return made

    return process


def own_rows(name: str, arguments: dict[str, Any], key: str, faults: Faults) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the fields of each row of a data set of the user's own. Rows that are none go to `faults`.

    The rows are what the function or class `name`, called with `arguments`, returns, or its attribute `dataset`.
    """
    with _blaming(key):
        made = _load(name, key)
        number = 0
        try:
            returned = made(**arguments)
            for row in getattr(returned, "dataset", returned):
                where = f"{key}: row {number} of {name}"
                if isinstance(row, dict):
                    yield where, row
                else:
                    faults.add(where, BadRow(f"it is {row!r:.80}, not a mapping of fields", "not a mapping of fields"))
                number += 1
        except (Exception, SystemExit) as error:  # whatever the user's code raises is shown to them
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
            raise UnusableFile(
                f"{key} {name}: the file {file} does not exist; give its path, relative to the file that names it or to this directory"
            )
        module = run_file(f"{key} {name}", Path(file))
    else:
        path, _, attribute = name.rpartition(".")
        try:
            module = importlib.import_module(path)
        except (Exception, SystemExit) as error:  # whatever the user's code raises is shown to them
            remedy = f"install it, put its folder into PYTHONPATH, or name the file: FILE.py:{attribute}"
            raise ConfigError(f"{key} {name}: {path} can't be imported; {remedy}\n{_trace(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{key} {name}: {module.__file__} has no function or class {attribute}; name one that it has")
    return found


def _error_in(what: str, error: BaseException) -> ConfigError:
    return ConfigError(f"{what}: {_place_in_code(error)}raised {describe_error(error)}\n{_trace(error)}")


def _place_in_code(error: BaseException) -> str:
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    # a call with the wrong arguments fails in this file, where it is made
    return "" if file == __file__ else f"{file}:{line} "


def _trace(error: BaseException) -> str:
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


def multiple_choice(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with the question and its options below it as prompt, in NeMo RL's words."""
    match row:
        case {"question": str(question), "options": {**options}, "answer": answer}:
            listed = "\n".join(f"{letter}) {option}" for letter, option in options.items() if option is not None)
            subject = {"subject": row["subject"]} if "subject" in row else {}
            return {"input": f"Question: {question}\nOptions:\n{listed}", "output": answer, **subject}
    raise _lacks(row, "question, options (a text for each letter) and answer")


# Built-in processors, by the name in `processor`.
PROCESSORS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"multichoice_qa_processor": multiple_choice}


def _lacks(row: Mapping[str, Any], what: str) -> BadRow:
    kind = f"it needs {what}, as text"
    return BadRow(f"{kind}, and has {', '.join(map(repr, row)) or 'nothing'}", kind)
