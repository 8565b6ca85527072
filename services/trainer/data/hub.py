"""Data sets of the Hugging Face hub, through `datasets`: known ones by name, any other by `data_path` owner/name.

Read from the hub or from its cache (`HF_HOME`; `HF_HUB_OFFLINE=1` takes the cache alone), or from a folder of that name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.config.data import DataSource
from headrace.errors import ConfigError

_BRING = "or bring the set as a JSONL file, by data_path, input_key and output_key"


@dataclasses.dataclass(frozen=True)
class HubSet:
    """Where a set is and what is where in its rows. `question` and `answer` are fields, with dots into what they hold; the answer
    is what follows `after` in its field, if that is given. `subsets` are read one after the other."""

    path: str
    question: str
    answer: str
    split: str = "train"
    subsets: tuple[str | None, ...] = (None,)
    after: str | None = None
    repeat: int = 1


_GSM8K = HubSet("openai/gsm8k", "question", "answer", subsets=("main",), after="####")

SETS: Mapping[str, HubSet] = {
    "OpenMathInstruct-2": HubSet("nvidia/OpenMathInstruct-2", "problem", "expected_answer", split="train_1M"),
    "DeepScaler": HubSet("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer"),
    "DAPOMath17K": HubSet("BytedTsinghua-SIA/DAPO-Math-17k", "prompt.0.content", "reward_model.ground_truth"),
    "DAPOMathAIME2024": HubSet("BytedTsinghua-SIA/AIME-2024", "prompt.0.content", "reward_model.ground_truth"),
    "AIME2024": HubSet("HuggingFaceH4/aime_2024", "problem", "answer", repeat=16),
    "AIME2025": HubSet(
        "opencompass/AIME2025", "question", "answer", split="test", subsets=("AIME2025-I", "AIME2025-II"), repeat=16
    ),
    "AIME2026": HubSet("MathArena/aime_2026", "problem", "answer", repeat=16),
    "gsm8k": _GSM8K,
    "GSM8K": _GSM8K,
    "OpenR1-Math-220k": HubSet("open-r1/OpenR1-Math-220k", "problem", "answer", subsets=("default",)),
    "NuminaMath-1.5": HubSet("AI-MO/NuminaMath-1.5", "problem", "answer"),
}


def known_set(source: DataSource) -> HubSet:
    """The set that `source` names, by `dataset_name` or by `data_path` owner/name."""
    if source.dataset_name is not None and source.dataset_name in SETS:
        return SETS[source.dataset_name]
    return HubSet(source.data_path or "", source.input_key, source.output_key)


def times(source: DataSource) -> int:
    """How often each problem of `source` is asked."""
    return source.repeat or known_set(source).repeat


def rows(source: DataSource, key: str) -> Iterator[tuple[Any, str]]:
    """(question, answer) of every row, in the set's own order. Raises `ConfigError` naming `key` where the set can't be had or has
    other fields."""
    known = known_set(source)
    for subset in known.subsets if source.subset is None else (source.subset,):
        table = _table(known.path, subset, source.split or known.split, key)
        for number, row in enumerate(table):
            where = f"{key}: row {number} of {known.path}"
            yield _field(row, known.question, where), _answer(_field(row, known.answer, where), known.after, where)


def _table(path: str, subset: str | None, split: str, key: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{key}: {path} needs the package datasets; pip install 'headrace[trainer]', {_BRING}"
        ) from error
    try:
        return datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(
            f"{key}: {path} (subset {subset or 'default'}, split {split}) can't be read ({what:.300}); look at its name, {_BRING}"
        ) from error


def _field(row: Any, name: str, where: str) -> Any:
    here = row
    for part in name.split("."):
        if isinstance(here, list) and part.isdecimal() and int(part) < len(here):
            here = here[int(part)]
        elif isinstance(here, Mapping) and part in here:
            here = here[part]
        else:
            raise ConfigError(f"{where} has no field {name!r} (it has {', '.join(row)}); {_BRING}")
    return here


def _answer(value: Any, after: str | None, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{where}: the answer is {value!r:.80}, not text or a number; {_BRING}")
    text = str(value)
    if after is None:
        return text
    if after not in text:
        raise ConfigError(f"{where}: the answer {text!r:.80} has no {after!r}; {_BRING}")
    return text.rpartition(after)[2].strip()
