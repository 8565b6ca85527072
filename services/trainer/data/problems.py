"""The problems of a run: what `data.train` and `data.validation` name, without duplicates and without overlap."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable
from typing import Any

from headrace.config.data import Data, DataSource
from headrace.errors import ConfigError
from headrace.trajectory import Message
from services.trainer.data.sources import Draft, read

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem of a data set. `index` is its place there; `extra_env_info` is what the environment scores it by."""

    index: int
    messages: tuple[Message, ...]
    extra_env_info: dict[str, Any]
    env_name: str
    task_name: str


def load_problems(data: Data) -> tuple[list[Problem], list[Problem]]:
    """The training problems and the validation problems.

    Problems are the same if they ask the same, whatever the system prompt. Each is kept once, where it comes first, and one
    that is in validation never is in training. Raises `ConfigError` where a source is unusable or nothing is left to train on.
    """
    validation = _without_repeats(data.validation, "data.validation", held_out=True, taken=set())
    train = _without_repeats(
        data.train, "data.train", held_out=False, taken={_question(draft) for _, draft in validation}
    )
    if not train:
        raise ConfigError(
            "data.train: there is no problem to train on; name a data set, or one that validation leaves some of"
        )
    return [_problem(*item, index) for index, item in enumerate(train)], [
        _problem(*item, index) for index, item in enumerate(validation)
    ]


def _without_repeats(
    sources: Iterable[DataSource], key: str, *, held_out: bool, taken: set[str]
) -> list[tuple[DataSource, Draft]]:
    seen = set(taken)
    kept: list[tuple[DataSource, Draft]] = []
    for number, source in enumerate(sources):
        drafts = list(read(source, f"{key}[{number}]", held_out=held_out))
        before = len(kept)
        for draft in drafts:
            if (question := _question(draft)) not in seen:
                seen.add(question)
                kept.append((source, draft))
        log.info("%s[%d]: %d problems, %d kept", key, number, len(drafts), len(kept) - before)
    return kept


def _question(draft: Draft) -> str:
    return json.dumps(draft.messages, sort_keys=True)


def _problem(source: DataSource, draft: Draft, index: int) -> Problem:
    messages = draft.messages
    if source.system_prompt is not None and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": source.system_prompt}, *messages)
    if source.env_name is None:
        raise ConfigError(f"data: task {draft.task_name!r} has no env_name; set data.default.env_name")
    return Problem(index, messages, draft.extra_env_info, source.env_name, draft.task_name)
