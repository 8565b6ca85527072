"""The rules for NeMo RL's keys, read from table.yaml, and how the rule for a key is found."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from headrace.config.keys import Keys
from headrace.config.nemo_rl.values import CONDITIONS, CONVERSIONS, Whole, off
from headrace.config.yaml_text import parse

# the similarity of a misspelling to the intended key; keys of the families below are less similar to each other
_MISSPELT = 0.92
# looser for the switch of a section: no family of keys has names like it
ENABLED, MISSPELT_SWITCH = "enabled", 0.8


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule for one key of NeMo RL; table.yaml says what its fields mean.

    `fine(value, file, keys)`: whether a value of a refused key has no effect. `convert(value)`: the value in Headrace's terms; raises
    `ValueError` with what is wrong.
    """

    key: str
    does: Literal["used", "renamed", "replaced", "refused"]
    to: str = ""
    says: str = ""
    fine: Callable[[Any, Whole, Keys], bool] = off
    convert: Callable[[Any], Any] = lambda value: value
    gathered: bool = False
    once: bool = False

    @functools.cached_property
    def parts(self) -> Keys:
        return tuple(self.key.split("."))

    @functools.cached_property
    def exactness(self) -> tuple[int, int, bool]:
        """A measure of how exactly the rule names a key. Of the rules that match, the most exact one applies."""
        exact = sum("*" not in part for part in self.parts)
        return exact, sum("*" in part and part not in ("*", "**") for part in self.parts), self.parts[-1] != "**"

    def matches(self, keys: Keys) -> bool:
        parts = self.parts
        if parts[-1] == "**":
            parts, keys = parts[:-1], keys[: len(parts) - 1]
        return len(parts) == len(keys) and all(map(_matches, keys, parts))

    def target(self, keys: Keys) -> Keys:
        """Return Headrace's keys for `keys`, which match; a `*` of `to` stands for the name that the same `*` of `key` matched."""
        if self.does == "used":
            return keys
        names = iter([key for part, key in zip(self.parts, keys, strict=False) if part == "*"])
        return tuple(next(names) if part == "*" else part for part in self.to.split("."))


def _matches(key: str, part: str) -> bool:
    return key == part or part == "*" or ("*" in part and fnmatchcase(key, part))


class Table:
    """All rules: `rows` as table.yaml has them, and `rules` with their alternatives written out. `dtensor_cfg`, the name of
    `automodel_cfg` in older releases, has the same ones."""

    def __init__(self, text: str) -> None:
        given = parse(text, "table.yaml")
        self.alternatives: Mapping[str, list[str]] = given["alternatives"]
        self.rows = tuple(_rows(given["table"]))
        self.rules = tuple(rule for row in self.rows for rule in _expanded(row, self.alternatives))
        self._exact = {rule.parts: rule for rule in self.rules if "*" not in rule.key}
        self._patterns: dict[str, list[Rule]] = {}  # by first part, the most exact first
        for rule in sorted(self.rules, key=lambda rule: rule.exactness, reverse=True):
            if "*" in rule.key:
                self._patterns.setdefault(rule.parts[0], []).append(rule)
        self._beside: dict[Keys, list[str]] = {}

    def find(self, keys: Keys) -> Rule | None:
        """Return the most exact rule that matches `keys`; None if none does, or if `keys` is a misspelling of a key with its own rule."""
        keys = _newer(keys)
        if rule := self._exact.get(keys):
            return rule
        rule = next((rule for rule in self._patterns.get(keys[0], ()) if rule.matches(keys)), None)
        family = rule is not None and rule.parts[-1] not in (keys[-1], "*")
        return None if family and self._is_misspelt(keys) else rule

    def _is_misspelt(self, keys: Keys) -> bool:
        beside = self.beside(keys)
        near_switch = difflib.get_close_matches(keys[-1].lower(), {ENABLED} & {*beside}, 1, MISSPELT_SWITCH)
        return bool(near_switch or difflib.get_close_matches(keys[-1], beside, 1, _MISSPELT))

    def beside(self, keys: Keys) -> list[str]:
        """Return the names with their own rules in the section of `keys`."""
        section = _newer(keys[:-1])
        if section not in self._beside:
            longer = (rule.parts for rule in self.rules if len(rule.parts) > len(section))
            found = {parts[len(section)] for parts in longer if all(map(_matches, section, parts))}
            self._beside[section] = sorted(name for name in found if "*" not in name)
        return self._beside[section]


def _newer(keys: Keys) -> Keys:
    return tuple("automodel_cfg" if key == "dtensor_cfg" else key for key in keys)


def _rows(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[Rule]:
    """Yield a rule for each name of each row; its alternatives are not yet written out."""
    for section, rows in sections.items():
        for names, given in rows.items():
            row: dict[str, Any] = {given: ""} if isinstance(given, str) else {**given}
            does: Any = next(iter(row))
            row["to" if does == "renamed" else "says"] = row.pop(does)
            if "unless" in row:
                row["fine"] = _condition(row.pop("unless"))
            if "convert" in row:
                row["convert"] = CONVERSIONS[row["convert"]]
            for name in names.split():
                rule = Rule(f"{section}.{name}".lstrip("."), does, **row)
                yield dataclasses.replace(rule, to=rule.to.replace("<name>", name))


def _condition(unless: str | list[Any]) -> Callable[[Any, Whole, Keys], bool]:
    if isinstance(unless, str):
        return CONDITIONS[unless]
    return lambda value, whole, keys: off(value, whole, keys) or value in unless


def _expanded(row: Rule, alternatives: Mapping[str, Iterable[str]]) -> Iterator[Rule]:
    """Yield `row` once for each alternative of every `<name>` in its key."""
    found = re.search(r"<(\w+)>", row.key)
    if found is None:
        yield row
        return
    for alternative in alternatives[found[1]]:
        written = {field: getattr(row, field).replace(found[0], alternative) for field in ("key", "to", "says")}
        yield from _expanded(dataclasses.replace(row, **written), alternatives)


TABLE = Table(Path(__file__).with_name("table.yaml").read_text(encoding="utf-8"))
