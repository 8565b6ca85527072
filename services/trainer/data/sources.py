"""The kinds of data set: `arithmetic`, tasks of reasoning-gym and of verifiers environments, data sets of the Hugging Face Hub, files, and
the user's own.

The package `datasets` reads a data set of the Hub: a known one by `dataset_name`, any other by `data_path: owner/name`. It comes from the
Hub, from its cache (`HF_HOME`; `HF_HUB_OFFLINE=1` uses only the cache), or from a local folder of that name. A folder given by its path is
read in the same way: one with data files, or one that `save_to_disk` wrote. `rows.py` reads files and calls the user's own code.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.base.addresses import url_through_proxy
from headrace.base.errors import CodecError, ConfigError
from headrace.base.tagged_json import to_json
from headrace.config.data import DataSourceConfig
from headrace.config.environments import EnvConfig, VerifiersConfig
from headrace.env.verifiers import program
from headrace.records.trajectory import Message

from . import arithmetic, rows
from .faults import BadRow, Faults

_HUB_PATH = re.compile(r"^\w[\w.-]*/\w[\w.-]*(?<!\.jsonl)(?<!\.json)(?<!\.parquet)$")
_AS_JSONL = "or give the data set as a JSONL file, by data_path, input_key and output_key"


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem of a run.

    `index` is its position among all problems of its kind (training or validation), `source` the position of its data set in `data.train`
    or `data.validation`. `extra_env_info` is the data that the environment scores with. `key` distinguishes problems with the same
    messages, if the messages don't identify a problem. `row` is its file and the number of its row there, if it comes from one
    (`rows.file_rows`).
    """

    index: int
    messages: tuple[Message, ...]
    extra_env_info: dict[str, Any]
    env_name: str
    task_name: str
    source: int = 0
    key: str = ""
    row: tuple[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class HubDataset:
    """A data set of the Hugging Face Hub and the fields of its rows.

    `question` and `answer` are field names; dots lead into nested fields. Without `answer`, the answer is the last message of the
    conversation. With `after`, it is the text that follows `after` in its field. `subsets` are read one after the other. With `shape`,
    question and answer are fields of the row that it returns.
    """

    path: str
    question: str
    answer: str | None
    split: str = "train"
    subsets: tuple[str | None, ...] = (None,)
    after: str | None = None
    repeat: int = 1
    shape: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None


_GSM8K = HubDataset("openai/gsm8k", "question", "answer", subsets=("main",), after="####")

HUB_DATASETS: Mapping[str, HubDataset] = {
    "OpenMathInstruct-2": HubDataset("nvidia/OpenMathInstruct-2", "problem", "expected_answer", split="train_1M"),
    "DeepScaler": HubDataset("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer"),
    "DAPOMath17K": HubDataset("BytedTsinghua-SIA/DAPO-Math-17k", "prompt.0.content", "reward_model.ground_truth"),
    "DAPOMathAIME2024": HubDataset("BytedTsinghua-SIA/AIME-2024", "prompt.0.content", "reward_model.ground_truth"),
    "AIME2024": HubDataset("HuggingFaceH4/aime_2024", "problem", "answer", repeat=16),
    "AIME2025": HubDataset(
        "opencompass/AIME2025", "question", "answer", split="test", subsets=("AIME2025-I", "AIME2025-II"), repeat=16
    ),
    "AIME2026": HubDataset("MathArena/aime_2026", "problem", "answer", repeat=16),
    "gsm8k": _GSM8K,
    "GSM8K": _GSM8K,
    "OpenR1-Math-220k": HubDataset("open-r1/OpenR1-Math-220k", "problem", "answer", subsets=("default",)),
    "NuminaMath-1.5": HubDataset("AI-MO/NuminaMath-1.5", "problem", "answer"),
    "HelpSteer3": HubDataset("nvidia/HelpSteer3", "input", "output", subsets=("preference",), shape=rows.helpsteer3),
    "squad": HubDataset("rajpurkar/squad", "input", "output", shape=rows.squad),
    "tulu3_sft_mixture": HubDataset("allenai/tulu-3-sft-mixture", "messages", None),
}


def read(
    source: DataSourceConfig, key: str, env: Mapping[str, EnvConfig], faults: Faults, *, held_out: bool
) -> Iterator[tuple[str, Problem]]:
    """Yield the problems of `source` in its own order, duplicates included, each with its place for errors. `index` and templates are set
    later. Rows that can't be used go to `faults`.

    `env` are the run's environments. Raises `ConfigError` naming `key`, the value and the remedy for a source that can't be read.
    """
    if on_the_hub(source) or (source.data_path is not None and Path(source.data_path).is_dir()):
        return _read_hub(source, key, faults)
    if source.data_path is not None:
        return _read_file(source, key, faults)
    if source.dataset_name == "arithmetic":
        return _number(_arithmetic(source, key, held_out), key)
    if source.dataset_name == "reasoning_gym":
        return _number(_reasoning_gym(source, key), key)
    if source.dataset_name == "verifiers":
        return _number(_verifiers(source, env), key)
    if source.dataset_name is not None:
        return _read_own(source, key, faults)
    raise ConfigError(
        f"{key}: give dataset_name (arithmetic, reasoning_gym, verifiers, {', '.join(HUB_DATASETS)}, FILE.py:NAME) or data_path (a JSONL "
        "or Parquet file, a folder, or owner/name of a data set on the Hugging Face Hub)"
    )


def make_faults(source: DataSourceConfig, key: str) -> Faults:
    """Return where the rows of `source` go that can't be used."""
    if source.data_path is not None and Path(source.data_path).is_file():
        return Faults(key, "data_path", "correct or remove the line")
    if source.dataset_name is not None and not on_the_hub(source):
        return Faults(key, "dataset_name", "correct the code that makes it")
    return Faults(key, "dataset_name" if source.dataset_name else "data_path", f"choose another, {_AS_JSONL}")


def _number(problems: Iterable[Problem], key: str) -> Iterator[tuple[str, Problem]]:
    for number, problem in enumerate(problems):
        yield f"{key}: problem {number} of {problem.task_name}", problem


def count_repeats(source: DataSourceConfig) -> int:
    """Return how many times each problem of `source` occurs."""
    return source.repeat or _hub_dataset(source).repeat


def _make_problem(
    source: DataSourceConfig, question: Any, info: dict[str, Any], task: str, field: str | None = None
) -> Problem:
    """Make the problem with `question`, text or a list of messages, which is in `field` (null: `input_key`). Raises `BadRow`."""
    field = field or source.input_key
    if isinstance(question, str):
        question = [{"role": "user", "content": question}]
    elif not isinstance(question, list) or not question or not all(map(_is_message, question)):
        wanted = "not text or a list of messages with role and content as text"
        raise BadRow(f"field {field!r} is {question!r:.80}, {wanted}", f"field {field!r} is {wanted}")
    if question[-1]["role"] == "assistant":
        raise BadRow(f"field {field!r} ends with a message of the assistant, which the policy should write")
    # a table has every field in every message: null where the message has none
    messages = ({name: value for name, value in message.items() if value is not None} for message in question)
    return Problem(0, tuple(messages), info, source.env_name or "", task)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _arithmetic(source: DataSourceConfig, key: str, held_out: bool) -> Iterator[Problem]:
    """Yield `size` sums of numbers with at most `digits` digits; for validation, at most the 400 pairs that are never trained on."""
    digits = source.task_config.get("digits", 2)
    if type(digits) is not int or not 1 <= digits <= 9 or source.task_config.keys() - {"digits"}:
        raise ConfigError(
            f"{key}.task_config {source.task_config}: arithmetic takes only digits, a number from 1 to 9",
            "task_config",
        )
    rng = random.Random(source.seed)
    pairs = arithmetic.validation_pairs(digits, rng) if held_out else arithmetic.training_pairs(digits, rng)
    for pair in islice(pairs, source.size):
        yield _make_problem(source, arithmetic.text(pair), {"answer": arithmetic.answer(pair)}, "arithmetic")


def _reasoning_gym(source: DataSourceConfig, key: str) -> Iterator[Problem]:
    """Yield `size` entries of a task. `extra_env_info` holds the whole entry, with tags for types that JSON lacks."""
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
        yield _make_problem(source, entry["question"], info, task)


def _verifiers(source: DataSourceConfig, env: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    """Yield the environment's tasks. `extra_env_info` only identifies a task; its content stays with the environment."""
    name = str(source.env_name)
    played = env[name]
    assert isinstance(played, VerifiersConfig)
    for row in program.tasks(name, played, source.task_config, source.size):
        problem = _make_problem(source, row["messages"], {"task": row["task"]}, played.verifiers["taskset"]["id"])
        yield dataclasses.replace(problem, key=row["task"]["key"])


def _read_file(source: DataSourceConfig, key: str, faults: Faults) -> Iterator[tuple[str, Problem]]:
    """Yield one problem per row: `input_key` is text or messages, `output_key` the answer. Other fields go to the environment."""
    path, process = Path(source.data_path or ""), _processor(source, key)
    columns: rows.Columns | None = None
    for where, number, row in rows.file_rows(path, key, faults):
        try:
            processed = process(row)
            columns = columns or rows.find_columns(processed, source.input_key, source.output_key)
            problem = _make_from_row(processed, columns, source, path.stem)
        except BadRow as error:
            faults.add(where, error)
        else:
            yield where, dataclasses.replace(problem, row=(str(path), number))


def _read_own(source: DataSourceConfig, key: str, faults: Faults) -> Iterator[tuple[str, Problem]]:
    name, process = source.dataset_name or "", _processor(source, key)
    task = name.rpartition(":")[2].rpartition(".")[2]
    columns: rows.Columns | None = None
    for where, row in rows.own_rows(name, source.task_config, f"{key}.dataset_name", faults):
        try:
            processed = process(row)
            columns = columns or rows.find_columns(processed, source.input_key, source.output_key)
            yield where, _make_from_row(processed, columns, source, task)
        except BadRow as error:
            faults.add(where, error)


def _processor(source: DataSourceConfig, key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the source's processor: a function of a row that returns a row."""
    if source.processor is None:
        return lambda row: row
    return rows.processor(source.processor, f"{key}.processor")


def _make_from_row(row: dict[str, Any], columns: rows.Columns, source: DataSourceConfig, task_name: str) -> Problem:
    """Make the problem of a row. Raises `BadRow`."""
    rows.check_text(row, source.info_keys or ())
    question, info, answer = _field(row, columns.question, "input_key"), dict(row), None
    if columns.whose is None or not isinstance(question, str):
        info.pop(columns.question, None)  # a text that stays tells a reward function of TRL's to expect texts
    if source.info_keys is not None:
        info = {name: _field(row, name, "info_keys") for name in source.info_keys}
    if source.output_key is None:
        question, answer = _last_answer(question)
    elif columns.answer is not None:
        value = _field(row, columns.answer, "output_key")
        if columns.answer != rows.VERL_TRUTH or (isinstance(value, str | int | float) and not isinstance(value, bool)):
            answer = _answer(value, columns.answer)
    if columns.whose is None and columns.answer is not None and source.info_keys is None:
        info.pop(columns.answer, None)
    if answer is not None:
        info["answer"] = answer
    rows.check_carried({columns.question: question, **info})
    return _make_problem(source, question, info, task_name, columns.question)


def describe_columns(source: DataSourceConfig, key: str) -> Iterator[str]:
    """Yield a line if the source is a file with the columns of TRL or of verl: what is read as what."""
    if source.data_path is None or on_the_hub(source) or not Path(source.data_path).is_file():
        return
    process = _processor(source, key)
    for _, _, row in rows.file_rows(Path(source.data_path), key, make_faults(source, key)):
        processed = process(row)
        columns = rows.find_columns(processed, source.input_key, source.output_key)
        if columns.whose is not None:
            names = source.info_keys
            if names is None:
                names = [name for name in processed if name != columns.question]
            others = ", ".join(names) or "no other column"
            answer = f"; {columns.answer} is the answer" if columns.answer else ""
            yield (
                f"{key}.data_path {source.data_path}: columns as in {columns.whose}: {columns.question} is the problem{answer}; the "
                f"environment gets {others}"
            )
        return


def _last_answer(question: Any) -> tuple[Any, str | None]:
    """Split the assistant's last message, the answer, from the conversation before it; None if it ends with another message."""
    match question:
        case [*before, {"role": "assistant", "content": str(answer)}] if before:
            return before, answer
    return question, None


def _answer(value: Any, name: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(
            f"field {name!r} is {value!r:.80}, not text or a number", f"field {name!r} is not text or a number"
        )
    if isinstance(value, float) and not math.isfinite(value):
        kind = f"field {name!r} is not a finite number"
        raise BadRow(f"field {name!r} is {value}, not a finite number; write it as text", kind)
    # tables make the whole numbers of a column floats where a row has none, and no policy writes 42.0 for 42
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def on_the_hub(source: DataSourceConfig) -> bool:
    """Return whether `source` is a data set of the Hugging Face Hub: a known one, or a `data_path` of the form owner/name that isn't a
    file."""
    path = source.data_path
    if source.dataset_name in HUB_DATASETS:
        return True
    return path is not None and _HUB_PATH.match(path) is not None and not Path(path).is_file()


def _hub_dataset(source: DataSourceConfig) -> HubDataset:
    """Return the data set that `source` names by `dataset_name` or by `data_path: owner/name`."""
    if source.dataset_name is not None and source.dataset_name in HUB_DATASETS:
        return HUB_DATASETS[source.dataset_name]
    return HubDataset(source.data_path or "", source.input_key, source.output_key)


def _read_hub(source: DataSourceConfig, key: str, faults: Faults) -> Iterator[tuple[str, Problem]]:
    known, process = _hub_dataset(source), _processor(source, key)
    columns: rows.Columns | None = None
    is_known = source.dataset_name in HUB_DATASETS
    task = source.dataset_name or Path(source.data_path or "").name
    for subset in known.subsets if source.subset is None else (source.subset,):
        for number, row in enumerate(_load_hub_dataset(known.path, subset, source.split or known.split, key)):
            where = f"{key}: row {number} of {known.path}"
            try:
                processed = process(row)
                columns = columns or rows.find_columns(processed, source.input_key, source.output_key)
                if source.processor is not None or (columns.whose is not None and not is_known):
                    yield where, _make_from_row(processed, columns, source, task)
                else:
                    yield where, _make_from_hub_row(row, known, source, task)
            except BadRow as error:
                faults.add(where, error)


def _make_from_hub_row(row: Mapping[str, Any], known: HubDataset, source: DataSourceConfig, task_name: str) -> Problem:
    """Make the problem of a row. The environment gets the answer, and what `info_keys` names. Raises `BadRow`."""
    rows.check_text(row, source.info_keys or ())
    info = {name: _field(row, name, "info_keys") for name in source.info_keys or ()}
    if known.shape is not None:
        row = known.shape(row)
    question, answer = _field(row, known.question, "input_key"), None
    if known.answer is None:
        question, answer = _last_answer(question)
    else:
        answer = _answer(_field(row, known.answer, "output_key"), known.answer)
    if known.after is not None and answer is not None:
        if known.after not in answer:
            raise BadRow(f"the answer {answer!r:.80} has no {known.after!r}", f"the answer has no {known.after!r}")
        answer = answer.rpartition(known.after)[2].strip()
    if answer is not None:
        info["answer"] = answer
    rows.check_carried({known.question: question, **info})
    return _make_problem(source, question, info, task_name)


def _load_hub_dataset(path: str, subset: str | None, split: str, key: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{key}: {path} needs the package datasets; pip install 'headrace[trainer]', {_AS_JSONL}"
        ) from error
    try:
        if any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(path)
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        what = " ".join(str(error).split())
        proxy = "" if Path(path).exists() else url_through_proxy(datasets.config.HF_ENDPOINT)
        raise ConfigError(
            f"{key}: {path} (subset {subset or 'default'}, split {split}) can't be read ({what:.300}{proxy}); check its name, {_AS_JSONL}"
        ) from error


def _field(row: Mapping[str, Any], name: str, option: str) -> Any:
    """Return the field of this name; dots lead into nested fields. Raises `BadRow` without it; `option` is the key that names it."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            there = f"it has {', '.join(map(repr, row))}, and {option} can name another" if row else "the row is empty"
            kind = f"no field {name!r} ({option})"
            raise BadRow(f"{kind}; {there}", kind, option)
    return value
