"""The kinds of data set: `arithmetic`, any task of reasoning-gym, sets of the Hugging Face hub, and JSONL files."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.config.data import DataSource
from headrace.errors import CodecError, ConfigError
from headrace.tagged_json import to_json
from headrace.trajectory import Message
from services.trainer.data import arithmetic, hub

_HUB_PATH = re.compile(r"^\w[\w.-]*/\w[\w.-]*(?<!\.jsonl)(?<!\.json)$")


@dataclasses.dataclass(frozen=True)
class Draft:
    """A problem as its source gives it, before system prompt and place."""

    messages: tuple[Message, ...]
    extra_env_info: dict[str, Any]
    task_name: str


def read(source: DataSource, key: str, *, held_out: bool) -> Iterator[Draft]:
    """The problems of `source`, repeats included. Raises `ConfigError` naming `key`, the value and the remedy."""
    if source.dataset_name in hub.SETS or _on_the_hub(source.data_path):
        return _hub(source, key)
    if source.data_path is not None:
        return _jsonl(source, key)
    if source.dataset_name == "arithmetic":
        return _arithmetic(source, key, held_out)
    if source.dataset_name == "reasoning_gym":
        return _reasoning_gym(source, key)
    raise ConfigError(
        f"{key}: give dataset_name (arithmetic, reasoning_gym, {', '.join(hub.SETS)}) or data_path (a JSONL file, or owner/name "
        "of a set on the hub)"
    )


def _on_the_hub(path: str | None) -> bool:
    """A path of the form owner/name is one on the hub unless there is such a file."""
    return path is not None and _HUB_PATH.match(path) is not None and not Path(path).is_file()


def _ask(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _arithmetic(source: DataSource, key: str, held_out: bool) -> Iterator[Draft]:
    """`size` sums of numbers of at most `digits` digits; as validation, at most the 400 pairs that no training ever sees."""
    digits = source.task_config.get("digits", 2)
    if type(digits) is not int or not 1 <= digits <= 9 or source.task_config.keys() - {"digits"}:
        raise ConfigError(
            f"{key}.task_config {source.task_config}: arithmetic takes digits alone, a number from 1 to 9"
        )
    rng = random.Random(source.seed)
    pairs = arithmetic.validation_pairs(digits, rng) if held_out else arithmetic.training_pairs(digits, rng)
    for pair in islice(pairs, source.size):
        yield Draft(_ask(arithmetic.text(pair)), {"answer": arithmetic.answer(pair)}, "arithmetic")


def _reasoning_gym(source: DataSource, key: str) -> Iterator[Draft]:
    """`size` entries of a task. The environment finds the entry whole in `extra_env_info`, tagged where JSON has no such type."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task = source.task or ""
    if task not in DATASETS:
        raise ConfigError(f"{key}.task {task!r} is not a task of reasoning_gym; it has {', '.join(sorted(DATASETS))}")
    try:
        dataset = reasoning_gym.create_dataset(task, size=source.size, seed=source.seed, **source.task_config)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{key}.task_config {source.task_config}: reasoning_gym's {task} refuses it ({error})"
        ) from error
    for entry in dataset:
        try:
            info = {"task": task, "task_config": source.task_config, "entry": to_json(entry, "entry")}
        except CodecError as error:
            raise ConfigError(f"{key}.task {task}: {error}; choose another task") from error
        yield Draft(_ask(entry["question"]), info, task)


def _jsonl(source: DataSource, key: str) -> Iterator[Draft]:
    """One problem a line: `input_key` is text or messages, `output_key` the answer; the other fields go to the environment."""
    path = Path(source.data_path or "")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}.data_path {path}: can't be read ({error}); give a JSONL file in UTF-8") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            yield _draft_of_line(fields, source, path.stem)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}; mend or remove the line ({key}.data_path)") from error


def _hub(source: DataSource, key: str) -> Iterator[Draft]:
    name = source.dataset_name or (source.data_path or "").rpartition("/")[2]
    for question, answer in hub.rows(source, key):
        try:
            messages = _ask(question) if isinstance(question, str) else _messages(question, source.input_key)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}; bring the set as a JSONL file") from error
        yield Draft(messages, {"answer": answer}, name)


def _draft_of_line(fields: Any, source: DataSource, task_name: str) -> Draft:
    """Raises `ValueError` saying what is wrong with the line."""
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}, not an object")
    for name, option in ((source.input_key, "input_key"), (source.output_key, "output_key")):
        if name not in fields:
            raise ValueError(f"no field {name!r} ({option}); it has {', '.join(map(repr, fields)) or 'none'}")
    question, answer = fields[source.input_key], fields[source.output_key]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"field {source.output_key!r} is {answer!r:.80}, not text or a number")
    messages = _ask(question) if isinstance(question, str) else _messages(question, source.input_key)
    others = {name: value for name, value in fields.items() if name not in (source.input_key, source.output_key)}
    return Draft(messages, {**others, "answer": str(answer)}, task_name)


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    wanted = f"field {name!r} is {value!r:.80}, not text or a list of messages with role and content as text"
    if not isinstance(value, list) or not value:
        raise ValueError(wanted)
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(wanted)
    if value[-1]["role"] == "assistant":
        raise ValueError(f"field {name!r} ends with a message of the assistant; the policy writes that one")
    return tuple(value)
