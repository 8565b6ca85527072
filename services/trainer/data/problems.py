"""The problems of a run: what `data.train` and `data.validation` name, without duplicates and without overlap."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
from collections.abc import Set
from pathlib import Path
from typing import Any

from headrace.config.data import Data, DataSource
from headrace.errors import ConfigError
from headrace.trajectory import Message
from services.trainer.data.hub import times
from services.trainer.data.sources import Draft, read

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem of the data sets. `index` is its place among them all; `extra_env_info` is what the environment scores it by, and
    `source` the place of its data set in `data.train` or `data.validation`."""

    index: int
    messages: tuple[Message, ...]
    extra_env_info: dict[str, Any]
    env_name: str
    task_name: str
    source: int = 0


def load_problems(data: Data) -> tuple[list[Problem], list[Problem]]:
    """The training problems and the validation problems.

    Problems are the same if they ask the same, whatever the system prompt. Each is kept once, where it comes first (unless
    `remove_duplicates` is false), and one that is in validation never is in training. Raises `ConfigError` where a source or one of
    its files is unusable or nothing is left to train on.
    """
    validation: list[_Sourced] = []
    train: list[_Sourced] = []
    for number, source in enumerate(data.validation):
        origin = _Origin(number, source, _Words.of(source))
        validation += (_Sourced(origin, draft) for draft in _read(source, f"data.validation[{number}]", held_out=True))
    for number, source in enumerate(data.train):
        origin = _Origin(number, source, _Words.of(source))
        held, rest = _split(_read(source, f"data.train[{number}]", held_out=False), source)
        validation += (_Sourced(origin, draft) for draft in held)
        train += (_Sourced(origin, draft) for draft in rest)
    validation = _kept(validation, set(), once=data.remove_duplicates)
    train = _kept(train, {item.question for item in validation}, once=data.remove_duplicates)
    if not train:
        raise ConfigError(
            "data.train: there is no problem to train on; name a data set, or one that validation leaves some of"
        )
    return _problems(train), _problems(validation)


def _read(source: DataSource, key: str, *, held_out: bool) -> list[Draft]:
    drafts = list(read(source, key, held_out=held_out))
    log.info("%s: %d problems", key, len(drafts))
    return drafts


def _split(drafts: list[Draft], source: DataSource) -> tuple[list[Draft], list[Draft]]:
    """(held out, the rest), each in the set's own order."""
    chosen = set(
        random.Random(source.seed).sample(range(len(drafts)), round(len(drafts) * source.split_validation_size))
    )
    return (
        [draft for at, draft in enumerate(drafts) if at in chosen],
        [draft for at, draft in enumerate(drafts) if at not in chosen],
    )


@dataclasses.dataclass(frozen=True)
class _Words:
    """What a source's files say around each of its problems."""

    system: str | None
    prompt: str | None

    @classmethod
    def of(cls, source: DataSource) -> _Words:
        system = source.system_prompt
        if source.system_prompt_file is not None:
            system = _text(source.system_prompt_file, "system_prompt_file")
        if source.prompt_file is None:
            return cls(system, None)
        prompt = _text(source.prompt_file, "prompt_file")
        try:
            asks = prompt.format("\0")
        except (LookupError, ValueError) as error:
            raise ConfigError(
                f"prompt_file {source.prompt_file}: {error!r}; write {{}} where the problem goes, and {{{{ and }}}} for braces"
            ) from error
        if "\0" not in asks:
            raise ConfigError(
                f"prompt_file {source.prompt_file}: nothing says where the problem goes; write {{}} there"
            )
        return cls(system, prompt)

    def around(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """`messages` with the prompt around what the user says last, and the system prompt before them, unless they have one."""
        if self.prompt is not None:
            *before, last = messages
            messages = (*before, {**last, "content": self.prompt.format(last["content"])})
        if self.system is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system}, *messages)
        return messages


@dataclasses.dataclass(frozen=True, eq=False)
class _Origin:
    number: int
    source: DataSource
    words: _Words


@dataclasses.dataclass(frozen=True)
class _Sourced:
    """A problem and the source that gave it."""

    origin: _Origin
    draft: Draft

    @property
    def question(self) -> str:
        return json.dumps(self.draft.messages, sort_keys=True)


def _kept(items: list[_Sourced], taken: Set[str], *, once: bool) -> list[_Sourced]:
    """Without those that are `taken`; each but once, if `once`."""
    seen = set(taken)
    kept = []
    for item in items:
        question = item.question
        if question not in seen:
            kept.append(item)
            if once:
                seen.add(question)
    return kept


def _problems(items: list[_Sourced]) -> list[Problem]:
    """Each source's problems as often as it says, one round after the other."""
    rounds: list[_Sourced] = []
    for origin, group in itertools.groupby(items, key=lambda item: item.origin):
        rounds += list(group) * times(origin.source)
    return [_problem(item, index) for index, item in enumerate(rounds)]


def _text(path: str, key: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{key} {path}: can't be read ({error}); give a text file, by its path from where the run is started"
        ) from error


def _problem(item: _Sourced, index: int) -> Problem:
    draft, source = item.draft, item.origin.source
    if source.env_name is None:
        raise ConfigError(f"data: task {draft.task_name!r} has no env_name; set data.default.env_name")
    messages = item.origin.words.around(draft.messages)
    return Problem(index, messages, draft.extra_env_info, source.env_name, draft.task_name, item.origin.number)
