"""From a file of NeMo RL to Headrace's keys: what is used, what takes the place of what, and what can't be honoured."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.config.explain import known_keys, pattern
from headrace.config.nemo import backends
from headrace.config.nemo.older import modernise
from headrace.config.nemo.rules import Keys, Rule, look, sources
from headrace.config.nemo.table import GATHERED, IMPLIED, NO_FILE_OF_OURS, rule_for


@dataclasses.dataclass(frozen=True)
class Translation:
    """`values`: in Headrace's keys. `came_from`: the keys there of those here that have another name.

    `problems`: one line for each key that can't be honoured. `replaced`: (what takes the place, keys there). `renamed`: (key there,
    key here). `implied`: what a file of NeMo RL means without saying it.
    """

    values: dict[str, Any]
    came_from: dict[Keys, Keys]
    problems: tuple[str, ...]
    replaced: Mapping[str, tuple[str, ...]]
    renamed: tuple[tuple[str, str], ...]
    implied: Mapping[str, Any]
    used: int


def is_nemo_rl(values: Mapping[str, Any]) -> bool:
    """Whether this is a file of NeMo RL: it has a section that each of its files has, and none of Headrace's."""
    return any(look(values, key) is not None for key in NO_FILE_OF_OURS)


def translate(values: dict[str, Any]) -> Translation:
    """`values` (of a file of NeMo RL, interpolations resolved) in Headrace's keys. Keys of Headrace in it stay as they are."""
    builder = _Builder(copy.deepcopy(values))
    builder.run()
    return builder.result()


class _Builder:
    def __init__(self, values: dict[str, Any]) -> None:
        self.theirs = values
        self.ours: dict[str, Any] = {}
        self.came_from: dict[Keys, Keys] = {}
        self.problems: list[str] = []
        self.replaced: dict[str, list[str]] = {}
        self.renamed: list[tuple[str, str]] = []
        self.implied: dict[str, Any] = {}
        self.used = 0

    def run(self) -> None:
        self.renamed += modernise(self.theirs)
        _sources_as_lists(self.theirs)
        for key, says in backends.in_force(self.theirs):
            self.replaced.setdefault(says, []).append(key)
        self._environments()
        for keys, value in _leaves(self.theirs, ()):
            self._one(keys, value)
        for gathered in GATHERED:
            for key, value, origin in gathered(self.theirs, self.problems.append):
                self._put(tuple(key.split(".")), value, tuple(origin.split(".")))
        for key, value in IMPLIED.items():
            keys = tuple(key.split("."))
            if look(self.ours, key, self) is self and keys in known_keys():
                self._put(keys, value, keys)
                self.implied[key] = value

    def result(self) -> Translation:
        return Translation(
            self.ours,
            self.came_from,
            tuple(self.problems),
            {says: tuple(keys) for says, keys in self.replaced.items()},
            tuple(self.renamed),
            self.implied,
            self.used,
        )

    def _one(self, keys: Keys, value: Any) -> None:
        if not self._decide(keys, value) and (value is not None or _takes_null(keys)):
            # one of Headrace's own, or unknown to both
            self._put(keys, value, keys)

    def _decide(self, keys: Keys, value: Any) -> bool:
        """Whether the table says what becomes of `keys`."""
        rule = rule_for(keys)
        if rule is None:
            return False
        key = ".".join(keys)
        if rule.does == "replaced":
            self.replaced.setdefault(rule.says, []).append(key)
        elif rule.does == "refused":
            if rule.fine is None or not rule.fine(value, self.theirs):
                self._refuse(rule, key, value)
        else:
            self._carry(rule, keys, value)
        return True

    def _refuse(self, rule: Rule, key: str, value: Any) -> None:
        if rule.once:
            key, value = rule.key.removesuffix(".**"), {}
        problem = f"{key}: {_shown(value)}{rule.says}"
        if problem not in self.problems:
            self.problems.append(problem)

    def _carry(self, rule: Rule, keys: Keys, value: Any) -> None:
        target = rule.target(keys)
        if rule.does == "renamed":
            self.renamed.append((".".join(keys), ".".join(target)))
        self.used += 1
        if rule.gathered:
            return
        try:
            value = rule.convert(value) if rule.convert else value
        except ValueError as error:
            self.problems.append(f"{'.'.join(keys)}: {error}")
            return
        if value is None and not _takes_null(target):
            return
        self._put(target, value, keys)

    def _put(self, target: Keys, value: Any, origin: Keys) -> None:
        """Set `target`, making sections on the way; not below what is no section, which is said where it is checked."""
        here: Any = self.ours
        for key, following in itertools.pairwise(target):
            here = _entered(here, key, [] if following.isdecimal() else {})
        if isinstance(here, list):
            _entered(here, target[-1], value)
        elif isinstance(here, dict):
            here[target[-1]] = value
        if target != origin:
            self.came_from[target] = origin

    def _environments(self) -> None:
        """Files of NeMo RL bring environments along that no data set of theirs names; the others have to be known."""
        given = [source.get("env_name") for part in ("train", "validation") for source in sources(self.theirs, part)]
        named = [name for name in (*given, look(self.theirs, "data.default.env_name")) if isinstance(name, str)]
        environments = self.theirs.get("env")
        if not isinstance(environments, dict):
            return
        for name in list(environments):
            if named and name not in named:
                del environments[name]
                self.replaced.setdefault("no data set names this environment", []).append(f"env.{name}")
            else:
                self.ours.setdefault("env", {})[name] = {}
                self._decide(("env", name), environments[name])


def _entered(here: Any, key: str, empty: Any) -> Any:
    """What is at `key` of `here`, where `empty` is put if there is nothing."""
    if isinstance(here, dict):
        return here.setdefault(key, empty)
    if isinstance(here, list) and key.isdecimal():
        here += [{} for _ in range(int(key) - len(here))]
        if int(key) == len(here):
            here.append(empty)
        return here[int(key)]
    return None


def _sources_as_lists(values: dict[str, Any]) -> None:
    data = values.get("data")
    if isinstance(data, dict):
        for part in ("train", "validation"):
            if isinstance(data.get(part), dict):
                data[part] = [data[part]]


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """Every value by its keys; lists are values, but for the lists of data sets."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*keys, str(key)))
    elif isinstance(value, list) and keys in (("data", "train"), ("data", "validation")):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*keys, str(number)))
    elif keys:
        yield keys, value


def _takes_null(target: Keys) -> bool:
    """Whether null is a value of Headrace's key; of another it means the default."""
    field = known_keys().get(pattern(target))
    return field is None or field.default is None or type(None) in getattr(field.annotation, "__args__", ())


def _shown(value: Any) -> str:
    return "" if isinstance(value, dict | list) else f"{value!r:.60}: "
