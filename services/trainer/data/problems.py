"""The problems of a run: those of `data.train` and `data.validation`, without duplicates or overlap."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Any

from headrace.base.errors import ConfigError
from headrace.config.data import DataConfig, DataSourceConfig
from headrace.config.environments import EnvConfig
from headrace.records.trajectory import Message
from headrace_services.trainer.data.sources import Problem, on_the_hub, read, repeats

log = logging.getLogger(__name__)

_NO_ENV: Mapping[str, EnvConfig] = MappingProxyType({})

_BRACES = "write {} where the problem goes, {name} for another field of the row, and {{ and }} for braces"


def load_problems(
    data: DataConfig, left_out: Counter[str] | None = None, env: Mapping[str, EnvConfig] = _NO_ENV
) -> tuple[list[Problem], list[Problem]]:
    """Return the training problems and the validation problems. `env` are the run's environments, some of which have tasks. `left_out`
    counts the problems removed from training: `duplicates`, and `held_out` ones, which validation has.

    Two problems are equal if their messages, their keys and the fields named by their prompt files are, whatever else prompt files and
    system prompts contain. Only the first of equal problems is kept (unless `remove_duplicates` is false). A validation problem is never in
    training. Raises `ConfigError` if a source or one of its files can't be used, or if nothing is left to train on.
    """
    training, validation = _own_problems(data, env, left_out)
    if not training:
        raise ConfigError(
            "data.train: there is no problem to train on; name a data set that validation does not use up"
        )
    return training, validation


def load_evaluated(data: DataConfig, env: Mapping[str, EnvConfig] = _NO_ENV) -> dict[str, list[Problem]]:
    """Return the problems of each data set under `data.evaluate`, by its name. Raises `ConfigError` as `load_problems` does, and for a data
    set without problems."""
    asked = data.evaluate or {}
    own: dict[str, list[Problem]] = {}
    if None in asked.values():
        # training and validation depend on each other; a run that only evaluates reads no more than it needs
        whole = "train" in asked or any(source.split_validation_size for source in data.train)
        training, validation = _own_problems(data if whole else data.model_copy(update={"train": []}), env)
        own = {"train": training, "validation": validation}
    found = {}
    for number, (name, source) in enumerate(asked.items()):
        key = f"data.evaluate.{name}"
        found[name] = own[name] if source is None else _of_source(source, number, key, env, once=data.remove_duplicates)
        if not found[name]:
            raise ConfigError(f"{key}: the data set has no problem; name another one")
    return found


def _of_source(
    source: DataSourceConfig, number: int, key: str, env: Mapping[str, EnvConfig], *, once: bool
) -> list[Problem]:
    problems = _read(source, key, env, held_out=True)
    return _assemble([(_Template.of(source, number), problems)], set(), None, once=once)


def _own_problems(
    data: DataConfig, env: Mapping[str, EnvConfig], left_out: Counter[str] | None = None
) -> tuple[list[Problem], list[Problem]]:
    """Return what `load_problems` does, but allow an empty training set."""
    validation: list[tuple[_Template, list[Problem]]] = []
    train: list[tuple[_Template, list[Problem]]] = []
    for number, source in enumerate(data.validation):
        template = _Template.of(source, number)
        validation.append((template, _read(source, f"data.validation[{number}]", env, held_out=True)))
    for number, source in enumerate(data.train):
        template = _Template.of(source, number)
        problems = _read(source, f"data.train[{number}]", env, held_out=False)
        size = round(len(problems) * source.split_validation_size)
        chosen = set(random.Random(source.seed).sample(range(len(problems)), size))
        validation.append((template, [problem for at, problem in enumerate(problems) if at in chosen]))
        train.append((template, [problem for at, problem in enumerate(problems) if at not in chosen]))
    held_out = {template.question(problem) for template, problems in validation for problem in problems}
    training = _assemble(train, held_out, left_out, once=data.remove_duplicates)
    return training, _assemble(validation, set(), None, once=data.remove_duplicates)


def look_at(data: DataConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what is wrong with the sources and their files, as (keys, message), by the first problem of each. Data sets of the Hugging Face
    Hub are not read. From a data set of the user's own, only the first row is made."""
    for part, sources in (("validation", data.validation), ("train", data.train)):
        for number, source in enumerate(sources):
            keys, key = ("data", part, str(number)), f"data.{part}[{number}]"
            try:
                template = _Template.of(source, number)
                if source.dataset_name in ("reasoning_gym", "verifiers") or on_the_hub(source):
                    continue
                first = next(read(source, key, _NO_ENV, held_out=part == "validation"), None)
                if first is None:
                    raise ConfigError(
                        f"{key}.data_path {source.data_path}: it has no problem; give one per line", "data_path"
                    )
                template.apply(first)
            except ConfigError as error:
                yield (*keys, error.key) if error.key else keys, str(error)
    if not data.train:
        yield ("data", "train"), "data.train names no data set, so there is nothing to train on; name one"


def _read(source: DataSourceConfig, key: str, env: Mapping[str, EnvConfig], *, held_out: bool) -> list[Problem]:
    problems = list(read(source, key, env, held_out=held_out))
    log.info("%s: %d problems", key, len(problems))
    return problems


def _assemble(
    parts: Iterable[tuple[_Template, list[Problem]]], taken: Set[str], left_out: Counter[str] | None, *, once: bool
) -> list[Problem]:
    """Return the problems of all parts that are not `taken`, in their templates. With `once`, only the first of equal problems is kept.
    Each source is repeated as a whole, as many times as it is configured to be."""
    seen = set(taken)
    assembled: list[Problem] = []
    for template, problems in parts:
        kept = []
        for problem in problems:
            question = template.question(problem)
            if question not in seen:
                kept.append(template.apply(problem))
                if once:
                    seen.add(question)
            elif left_out is not None:
                left_out["held_out" if question in taken else "duplicates"] += 1
        assembled += kept * repeats(template.source)
    return [dataclasses.replace(problem, index=index) for index, problem in enumerate(assembled)]


@dataclasses.dataclass(frozen=True)
class _Template:
    """The text that a data set adds to each of its problems: a system prompt, and the text of `prompt_file`, with `{}` for the problem and
    `{name}` for each of the environment's `fields`."""

    source: DataSourceConfig
    number: int
    system: str | None
    prompt: str | None
    fields: tuple[str, ...]

    @classmethod
    def of(cls, source: DataSourceConfig, number: int) -> _Template:
        system, prompt, named = source.system_prompt, None, set[str]()
        if source.system_prompt_file is not None:
            system = _text(source.system_prompt_file, "system_prompt_file")
        if source.prompt_file is not None:
            prompt = _text(source.prompt_file, "prompt_file")
            try:
                named = {name for _, name, _, _ in Formatter().parse(prompt) if name is not None}
                prompt.format("", **dict.fromkeys(named, ""))
            except (LookupError, ValueError, AttributeError, TypeError) as error:
                raise ConfigError(f"prompt_file {source.prompt_file}: {error!r}; {_BRACES}", "prompt_file") from error
            if not named & {"", "0"}:
                raise ConfigError(
                    f"prompt_file {source.prompt_file}: it has no place for the problem; write {{}} where the problem goes",
                    "prompt_file",
                )
        return cls(source, number, system, prompt, tuple(sorted(named - {"", "0"})))

    def question(self, problem: Problem) -> str:
        """Return the text that identifies the problem among others."""
        asked: Any = problem.messages
        if problem.key:
            asked = [asked, problem.key]
        if self.fields:
            asked = [asked, *(problem.extra_env_info.get(name) for name in self.fields)]
        return json.dumps(asked, sort_keys=True)

    def apply(self, problem: Problem) -> Problem:
        """Return the problem with the prompt around its last message, and with the system prompt first unless it has one."""
        if self.source.env_name is None:
            raise ConfigError(f"data: task {problem.task_name!r} has no env_name; set data.default.env_name")
        messages: tuple[Message, ...] = problem.messages
        if self.prompt is not None:
            *before, last = messages
            info = problem.extra_env_info
            if lacking := [name for name in self.fields if name not in info]:
                raise ConfigError(
                    f"prompt_file {self.source.prompt_file}: {{{lacking[0]}}} is not a field of {problem.task_name}, which has "
                    f"{', '.join(map(repr, info)) or 'none'}; {_BRACES}",
                    "prompt_file",
                )
            fields = {name: info[name] for name in self.fields}
            messages = (*before, {**last, "content": self.prompt.format(last["content"], **fields)})
        if self.system is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system}, *messages)
        return dataclasses.replace(problem, messages=messages, source=self.number)


def _text(path: str, key: str) -> str:
    """Return the text of the file without a newline at its end. Whether an editor adds one must not change prompts."""
    try:
        return Path(path).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{key} {path}: can't be read ({error}); give the path of a text file, relative to the file that names it or to the directory "
            "where the run is started",
            key,
        ) from error
