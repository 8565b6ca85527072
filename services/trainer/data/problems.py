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

from headrace.base.errors import ConfigError, Problems
from headrace.config.data import DataConfig, DataSourceConfig
from headrace.config.environments import EnvConfig, EpisodicConfig
from headrace.records.trajectory import Message

from .faults import BadRow, Faults
from .sources import Problem, count_repeats, make_faults, on_the_hub, read

log = logging.getLogger(__name__)

_NO_ENV: Mapping[str, EnvConfig] = MappingProxyType({})

_BRACES = "write {} where the problem goes, {name} for another field of the row, and {{ and }} for braces"


def load_problems(
    data: DataConfig, left_out: Counter[str] | None = None, env: Mapping[str, EnvConfig] = _NO_ENV
) -> tuple[list[Problem], list[Problem]]:
    """Return the training problems and the validation problems. `env` are the run's environments, some of which have tasks. `left_out`
    counts the problems removed: `duplicates` and `held_out` ones, which validation has, from training; `duplicates_validation`.

    Two problems are equal if their messages, their keys, the fields named by their prompt files and those that programs get
    (`env.<name>.public`) are, whatever else prompt files and system prompts contain. Only the first of equal problems is kept (unless
    `remove_duplicates` is false). A validation problem is never in training. Raises `ConfigError` with everything that is wrong with the
    sources, their files and their rows, or if nothing is left to train on.
    """
    training, validation = _own_problems(data, env, left_out)
    if not training:
        raise ConfigError(
            "data.train: there is no problem to train on; name a data set that validation does not use up"
        )
    return training, validation


def load_evaluated(
    data: DataConfig, left_out: Counter[str] | None = None, env: Mapping[str, EnvConfig] = _NO_ENV
) -> dict[str, list[Problem]]:
    """Return the problems of each data set under `data.evaluate`, by its name, and count those removed as `load_problems` does. Raises
    `ConfigError` as that does, and for a data set without problems."""
    asked = data.evaluate or {}
    own: dict[str, list[Problem]] = {}
    found, repeated, wrong = {}, Counter[str](), Problems()
    if None in asked.values():
        # training and validation depend on each other; a run that only evaluates reads no more than it needs
        whole = "train" in asked or any(source.split_validation_size for source in data.train)
        dropped = Counter[str]()
        training, validation = _own_problems(data if whole else data.model_copy(update={"train": []}), env, dropped)
        own = {"train": training, "validation": validation}
        counts = {"train": dropped["duplicates"], "validation": dropped["duplicates_validation"]}
        repeated["duplicates"] = sum(counts[name] for name in own if name in asked)
    for number, (name, source) in enumerate(asked.items()):
        key = f"data.evaluate.{name}"
        with wrong.gathered():
            part = None if source is None else [_read(source, number, key, env, held_out=True)]
            found[name] = own[name] if part is None else _assemble(part, set(), repeated, once=data.remove_duplicates)
            if not found[name]:
                raise ConfigError(f"{key}: the data set has no problem; name another one")
    wrong.tell()
    if left_out is not None:
        left_out["duplicates_validation"] = repeated["duplicates"]
    return found


def _own_problems(
    data: DataConfig, env: Mapping[str, EnvConfig], left_out: Counter[str] | None = None
) -> tuple[list[Problem], list[Problem]]:
    """Return what `load_problems` does, but allow an empty training set."""
    parts: dict[str, list[tuple[_Template, list[Problem]]]] = {"validation": [], "train": []}
    wrong = Problems()
    for part, number, key, source in _number_sources(data):
        with wrong.gathered():
            parts[part].append(_read(source, number, key, env, held_out=part == "validation"))
    wrong.tell()
    validation, train = parts["validation"], list[tuple[_Template, list[Problem]]]()
    for template, problems in _tell_apart(parts["train"]):
        kept, held = _split(template, problems)
        validation.append((template, held))
        train.append((template, kept))
    held_out = {template.question(problem) for template, problems in validation for problem in problems}
    training, repeated = _assemble(train, held_out, left_out, once=data.remove_duplicates), Counter[str]()
    asked = _assemble(_tell_apart(validation), set(), repeated, once=data.remove_duplicates)
    if left_out is not None:
        left_out["duplicates_validation"] = repeated["duplicates"]
    return training, asked


def _tell_apart(parts: list[tuple[_Template, list[Problem]]]) -> list[tuple[_Template, list[Problem]]]:
    """Return the parts with task names of their own. Each task has its own metrics, and data sets of one name (`gsm8k/test.parquet`,
    `math/test.parquet`) would be one task. They get their folder's name too, or, where that is the same, their number: of validation, what
    is held out of training comes after its own data sets."""
    parts = [(template, problems) for template, problems in parts if problems]
    for rename in (_name_by_folder, _name_by_number):
        shared = _repeated(problems[0].task_name for _, problems in parts)
        parts = [
            (template, [dataclasses.replace(each, task_name=rename(each.task_name, template, at)) for each in problems])
            if problems[0].task_name in shared
            else (template, problems)
            for at, (template, problems) in enumerate(parts)
        ]
    return parts


def _name_by_folder(task: str, template: _Template, _: int) -> str:
    """Return the name of a source's task with that of the folder in which it is, if it comes from a path."""
    path = template.source.data_path
    return task if path is None else f"{Path(path).absolute().parent.name}-{task}"


def _name_by_number(task: str, _: _Template, number: int) -> str:
    return f"{task}-{number}"


def _repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def _split(template: _Template, problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on, and the share that is held out. It is of the distinct ones: where a set has each many times, a few
    rows are nearly all problems. A share of a few problems is not none."""
    share = template.source.split_validation_size
    if not share:
        return problems, []
    questions = [template.question(problem) for problem in problems]
    distinct = list(dict.fromkeys(questions))
    size = round(len(distinct) * share) or min(len(distinct), 1)
    chosen = {distinct[at] for at in random.Random(template.source.seed).sample(range(len(distinct)), size)}
    asked = list(zip(questions, problems, strict=True))
    kept = [problem for question, problem in asked if question not in chosen]
    return kept, [problem for question, problem in asked if question in chosen]


def _number_sources(data: DataConfig) -> Iterator[tuple[str, int, str, DataSourceConfig]]:
    """Yield part, number and key of each data set of the run, in the order in which they are read."""
    for part, sources in (("validation", data.validation), ("train", data.train)):
        for number, source in enumerate(sources):
            yield part, number, f"data.{part}[{number}]", source


def look_at(data: DataConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what is wrong with the sources and their files, as (keys, message). Every row of a file is read; of rows that the user's own
    code makes, only the first. Data sets of the Hugging Face Hub are not read."""
    for part, number, key, source in _number_sources(data):
        keys = ("data", part, str(number))
        for option, message in _find_faults(source, number, key, part == "validation"):
            yield (*keys, option) if option else keys, message
    if not data.train:
        yield ("data", "train"), "data.train names no data set, so there is nothing to train on; name one"


def _find_faults(source: DataSourceConfig, number: int, key: str, held_out: bool) -> Iterator[tuple[str | None, str]]:
    """Yield the key at fault and what is wrong with a source."""
    faults = make_faults(source, key)
    try:
        template = _Template.of(source, number, _NO_ENV)
        if source.dataset_name in ("reasoning_gym", "verifiers") or on_the_hub(source):
            return
        problems = _usable(template, key, _NO_ENV, faults, held_out=held_out)
        if next(problems, None) is None and not faults:
            yield "data_path", f"{key}.data_path {source.data_path}: it has no problem; give one per line"
        if source.data_path is not None and source.processor is None:
            for _ in problems:
                pass
    except ConfigError as error:
        yield error.key, str(error)
    yield from faults.problems()


def _usable(
    template: _Template, key: str, env: Mapping[str, EnvConfig], faults: Faults, *, held_out: bool
) -> Iterator[Problem]:
    """Yield the problems of the template's source; rows that can't be used go to `faults`."""
    for where, problem in read(template.source, key, env, faults, held_out=held_out):
        try:
            template.check(problem)
        except BadRow as error:
            faults.add(where, error)
        else:
            yield problem


def _read(
    source: DataSourceConfig, number: int, key: str, env: Mapping[str, EnvConfig], *, held_out: bool
) -> tuple[_Template, list[Problem]]:
    """Return the problems of a source, and its template. Raises `ConfigError` with everything that is wrong with its rows."""
    template, faults, wrong = _Template.of(source, number, env), make_faults(source, key), Problems()
    problems: list[Problem] = []
    with wrong.gathered():
        problems.extend(_usable(template, key, env, faults, held_out=held_out))
    for _, message in faults.problems():
        wrong.add(message)
    wrong.tell()
    log.info("%s: %d problems", key, len(problems))
    return template, problems


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
        assembled += kept * count_repeats(template.source)
    return [dataclasses.replace(problem, index=index) for index, problem in enumerate(assembled)]


@dataclasses.dataclass(frozen=True)
class _Template:
    """The text that a data set adds to each of its problems: a system prompt, and the text of `prompt_file`, with `{}` for the problem and
    `{name}` for each of the environment's `fields`. `public` are the fields that programs of the run get."""

    source: DataSourceConfig
    number: int
    system: str | None
    prompt: str | None
    fields: tuple[str, ...]
    public: tuple[str, ...]

    @classmethod
    def of(cls, source: DataSourceConfig, number: int, env: Mapping[str, EnvConfig]) -> _Template:
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
        return cls(source, number, system, prompt, tuple(sorted(named - {"", "0"})), _public(env))

    def question(self, problem: Problem) -> str:
        """Return the text that identifies the problem among others."""
        asked: Any = problem.messages
        if problem.key:
            asked = [asked, problem.key]
        elif self.public:
            asked = [asked, *(problem.extra_env_info.get(name) for name in self.public)]
        if self.fields:
            asked = [asked, *(problem.extra_env_info.get(name) for name in self.fields)]
        return json.dumps(asked, sort_keys=True)

    def check(self, problem: Problem) -> None:
        """Raise `BadRow` if the problem lacks a field of the prompt, and `ConfigError` if no environment is to score it."""
        if self.source.env_name is None:
            raise ConfigError(f"data: task {problem.task_name!r} has no env_name; set data.default.env_name")
        info = problem.extra_env_info
        if lacking := [name for name in self.fields if name not in info]:
            kind = f"prompt_file {self.source.prompt_file}: {{{lacking[0]}}} is not a field of {problem.task_name}"
            raise BadRow(f"{kind}, which has {', '.join(map(repr, info)) or 'none'}; {_BRACES}", kind, "prompt_file")

    def apply(self, problem: Problem) -> Problem:
        """Return a problem that passes `check` with the prompt around its last message, and with the system prompt first unless it has
        one."""
        messages: tuple[Message, ...] = problem.messages
        if self.prompt is not None:
            *before, last = messages
            info = problem.extra_env_info
            fields = {name: info[name] for name in self.fields}
            messages = (*before, {**last, "content": self.prompt.format(last["content"], **fields)})
        if self.system is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system}, *messages)
        return dataclasses.replace(problem, messages=messages, source=self.number)


def _public(env: Mapping[str, EnvConfig]) -> tuple[str, ...]:
    """Return the fields of problems that any program of the run gets: of the same problem, data sets for different environments say the
    same."""
    programs = (each for each in env.values() if isinstance(each, EpisodicConfig))
    return tuple(sorted({name for each in programs for name in each.public}))


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
